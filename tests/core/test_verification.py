from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.core.plan import Draw, Drawn
from headrace.core.request import Decay, Sampling
from headrace.core.sampler import draw
from headrace.core.verification import accepted, verify

VOCAB = 50
EOG = frozenset({49})
NONE: frozenset[int] = frozenset()
PROMPT = [3, 4, 5, 6]


def piece(token: int) -> bytes:
    return b"%d" % token


class Model:
    """Logits are a function of the tokens so far, so that an answer can be computed with and without guesses."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def row(self, tokens: list[int]) -> NDArray[np.float32]:
        rng = np.random.default_rng([self._seed, *tokens[-3:]])
        return rng.normal(0.0, 2.0, VOCAB).astype(np.float32)


def plain(model: Model, sampling: Sampling, n: int) -> tuple[list[int], list[object]]:
    """(tokens, logprobs) of an answer, drawn one by one."""
    tokens = list(PROMPT)
    logprobs: list[object] = []
    while len(tokens) < len(PROMPT) + n and tokens[-1] not in EOG:
        one = draw(model.row(tokens), Draw(sampling, 11, len(tokens), tokens, len(PROMPT)), piece)
        tokens += one.tokens
        logprobs += one.logprobs
    return tokens[len(PROMPT) :], logprobs


def checked(model: Model, sampling: Sampling, before: list[int], guesses: list[int]) -> Drawn:
    tokens = PROMPT + before
    rows = np.stack([model.row(tokens + guesses[:i]) for i in range(len(guesses) + 1)])
    kept = rows.copy()
    want = Draw(sampling, 11, len(tokens), tokens, len(PROMPT), len(guesses))
    result = verify(rows, want, guesses, EOG, piece)
    assert (rows == kept).all(), "the logits are the engine's"
    assert tokens == PROMPT + before, "the history is the scheduler's"
    return result


SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.9),
    Sampling(temperature=0.8, top_p=0.9, min_p=0.02),
    Sampling(temperature=0.0, logprobs=2),
    Sampling(temperature=1.0, logprobs=0),
    Sampling(temperature=0.0, repetition_penalty=1.5),
    Sampling(temperature=0.7, presence_penalty=1.5, frequency_penalty=0.5),
    Sampling(temperature=0.0, frequency_penalty=1.0, logprobs=1),
    Sampling(temperature=0.0, logit_bias=((7, 3.0),)),
    Sampling(temperature=1.2, decay=Decay(2, 0.5, 0.1)),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_an_answer_with_guesses_is_the_answer_without(sampling: Sampling, seed: int) -> None:
    model = Model(seed)
    answer, logprobs = plain(model, sampling, 10)
    rng = np.random.default_rng(seed)
    for _ in range(12):
        got: list[int] = []
        told: list[object] = []
        while len(got) < len(answer):
            guesses = answer[len(got) :][: int(rng.integers(0, 8))]
            if guesses and rng.random() < 0.7:
                at = int(rng.integers(len(guesses)))
                guesses[at] = (guesses[at] + 1) % VOCAB
                right = at
            else:
                right = len(guesses)
            result = checked(model, sampling, got, guesses)
            ended = guesses[:right][-1:] and guesses[right - 1] in EOG
            assert len(result.tokens) == right + (0 if ended else 1)
            got += result.tokens
            told += result.logprobs
        assert got[: len(answer)] == answer
        assert told[: len(logprobs)] == logprobs


def one_hot(*tokens: int) -> NDArray[np.float32]:
    return np.eye(VOCAB, dtype=np.float32)[list(tokens)]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=0.0, logprobs=0)])
@pytest.mark.parametrize(
    ("says", "guesses", "drawn"),
    [
        ((1, 2, 3, 4), [1, 2, 3], (1, 2, 3, 4)),  # all right: one more comes for nothing
        ((1, 2, 3, 4), [9, 2, 3], (1,)),  # right again behind a wrong one is not right
        ((1, 2, 3, 4), [1, 9, 3], (1, 2)),
        ((1, 2, 3, 4), [1, 2, 9], (1, 2, 3)),
        ((49, 2, 3, 4), [49, 2, 3], (49,)),  # nothing follows the end
        ((1, 49, 3, 4), [1, 49, 3], (1, 49)),
        ((1, 2, 49, 4), [1, 2, 49], (1, 2, 49)),
        ((1, 49, 3, 4), [1, 2, 3], (1, 49)),
        ((1, 2, 3, 49), [1, 2, 3], (1, 2, 3, 49)),
    ],
)
def test_where_a_burst_ends(
    sampling: Sampling, says: tuple[int, ...], guesses: list[int], drawn: tuple[int, ...]
) -> None:
    want = Draw(sampling, 0, 1, [0], 1, len(guesses))
    result = verify(one_hot(*says), want, guesses, EOG, piece)
    assert result.tokens == drawn
    assert len(result.logprobs) == (0 if sampling.logprobs is None else len(drawn))


def test_a_penalty_sees_the_guesses_before() -> None:
    rows = np.zeros((3, VOCAB), dtype=np.float32)
    rows[:, 5], rows[:, 6] = 2.0, 1.0
    sampling = Sampling(temperature=0.0, presence_penalty=1.5)
    assert verify(rows, Draw(sampling, 0, 1, [0], 1, 2), [5, 6], EOG, piece).tokens == (5, 6, 5)


def test_each_token_has_its_own_random_number() -> None:
    rows = np.zeros((9, VOCAB), dtype=np.float32)
    sampling = Sampling(temperature=1.0)
    alone = [draw(rows[0], Draw(sampling, 4, 10 + i, [0] * (10 + i), 10), piece).tokens[0] for i in range(9)]
    assert len(set(alone)) > 4
    assert verify(rows, Draw(sampling, 4, 10, [0] * 10, 10, 8), alone[:8], NONE, piece).tokens == tuple(alone)


def test_accepted() -> None:
    assert accepted([1, 2, 3], [1, 2], NONE) == 2
    assert accepted([1, 2, 3], [1, 3], NONE) == 1
    assert accepted([1, 49, 3], [1, 49], EOG) == 1
    assert accepted([1], [], NONE) == 0
