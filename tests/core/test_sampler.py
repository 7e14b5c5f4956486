from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.core import sampler
from headrace.core.plan import Draw
from headrace.core.request import Sampling
from headrace.core.sampler import FLOOR, Logits, draw, is_greedy, logprob, uniform

NONE = float("-inf")
Uniform = Callable[[float], None]


def piece(token: int) -> bytes:
    return b"<%d>" % token


def logits_of(values: Sequence[float] | NDArray[Any]) -> Logits:
    """Read-only: the engine's buffer must not be changed."""
    out = np.array(values, dtype=np.float32)
    out.flags.writeable = False
    return out


def token_of(logits: Logits, sampling: Sampling, history: Sequence[int] = (0,), prompt: int = 1) -> int:
    drawn = draw(logits, Draw(sampling, 7, len(history), history, prompt), piece)
    assert drawn.logprobs == ()
    (token,) = drawn.tokens
    return token


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Uniform:
    """Sets the random number of the next draws."""

    def set_it(u: float) -> None:
        monkeypatch.setattr(sampler, "uniform", lambda seed, position: u)

    return set_it


# --- the distribution


def textbook(logits: Logits, s: Sampling) -> tuple[list[int], NDArray[np.float64]]:
    """(ids, weights) after temperature, top_k, top_p, min_p, by sorting everything; likeliest first, ties by id."""
    weights = np.exp((logits - logits.max()) * np.float32(1 / s.temperature)).astype(np.float64)
    if s.top_k == 0 and s.top_p >= 1 and s.min_p == 0:
        return list(range(len(logits))), weights
    ids = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    if s.top_k:
        ids = ids[: s.top_k]
    if s.top_p < 1:
        whole = math.fsum(weights[i] for i in ids)
        mass, n = 0.0, 0
        for i in ids:
            mass += weights[i]
            n += 1
            if mass >= s.top_p * whole:
                break
        ids = ids[:n]
    if s.min_p:
        ids = [i for i in ids if weights[i] >= np.float32(s.min_p) * weights[ids[0]]]
    return ids, weights[ids]


def pick(ids: list[int], weights: NDArray[np.float64], u: float) -> int:
    heap = np.cumsum(weights)
    return next(i for i, h in zip(ids, heap, strict=True) if h > u * heap[-1])


def shapes() -> dict[str, Logits]:
    rng = np.random.default_rng(11)
    spread = rng.normal(0, 3, 700)
    holes = spread.copy()
    holes[rng.integers(0, 700, 300)] = NONE
    return {
        "spread": logits_of(spread),
        "flat": logits_of(rng.normal(0, 0.01, 700)),
        "peaked": logits_of(np.concatenate([[20.0], rng.normal(0, 1, 699)])),
        "ties": logits_of(rng.integers(-4, 4, 700)),
        "equal": logits_of([2.5] * 700),
        "holes": logits_of(holes),
        "huge": logits_of(rng.choice([-1e4, 0, 1e4], 700)),
    }


SHAPES = shapes()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_number_gives_the_token_of_a_full_sort(shape: str, at: Uniform) -> None:
    logits = SHAPES[shape]
    rng = random.Random(shape)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.05, 0.7, 1.0, 2.0), (0, 2, 40, 699, 700, 9999), (1.0, 0.9999, 0.9, 0.5, 1e-9), (0.0, 1e-5, 0.05, 0.9)
    ):
        s = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        ids, weights = textbook(logits, s)
        for u in (0.0, 0.5, rng.random(), rng.random(), 1 - 2**-53):
            at(u)
            assert token_of(logits, s) == pick(ids, weights, u), (s, u)


@pytest.mark.parametrize("shape", SHAPES)
def test_tiny_temperatures_take_the_likeliest(shape: str, at: Uniform) -> None:
    logits = SHAPES[shape]
    for temperature in (0.0, 1e-9, 1e-5, 1e-4):
        for u in (1e-9, 0.5, 1 - 1e-9):
            at(u)
            token = token_of(logits, Sampling(temperature=temperature))
            assert logits[token] >= logits.max() - 40 * temperature


GREEDY = [Sampling(temperature=0), Sampling(top_k=1), Sampling(top_p=0), Sampling(min_p=1), Sampling(temperature=1e-6)]


@pytest.mark.parametrize("s", GREEDY, ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_is_the_likeliest_with_the_lowest_id(shape: str, s: Sampling, at: Uniform) -> None:
    at(0.999)
    assert is_greedy(s)
    logits = SHAPES[shape]
    assert token_of(logits, s) == np.flatnonzero(logits == logits.max())[0]


def test_sampling_is_not_greedy_by_default() -> None:
    assert not is_greedy(Sampling())
    assert not is_greedy(Sampling(temperature=0.01, top_k=2, top_p=0.01, min_p=0.99))


@pytest.mark.parametrize(
    ("s", "want"),
    [
        (Sampling(), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (Sampling(top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(top_p=0.6), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(top_p=0.71), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(min_p=0.45), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(top_k=3, top_p=0.75), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(temperature=0.5, top_p=0.6), [16 / 25, 9 / 25, 0, 0]),
    ],
)
def test_shares_are_the_probabilities(s: Sampling, want: list[float], at: Uniform) -> None:
    logits = logits_of(np.log([0.4, 0.3, 0.2, 0.1]) + 5)
    grid = 2000
    counts = [0] * 4
    for i in range(grid):
        at((i + 0.5) / grid)
        counts[token_of(logits, s)] += 1
    assert np.abs(np.array(counts) / grid - want).max() <= 1 / grid


@pytest.mark.parametrize("s", [Sampling(), Sampling(top_p=0.8), Sampling(top_k=9), Sampling(min_p=0.05)])
def test_frequencies_follow_the_probabilities(s: Sampling) -> None:
    logits = logits_of(np.random.default_rng(5).normal(0, 1.5, 30))
    ids, weights = textbook(logits, s)
    n = 6000
    counts = np.zeros(30)
    for position in range(n):
        counts[draw(logits, Draw(s, 1234, position, (), 0), piece).tokens[0]] += 1
    want = np.zeros(30)
    want[ids] = weights / weights.sum() * n
    assert counts[want == 0].sum() == 0
    common = want > 5
    chi2 = float(((counts - want)[common] ** 2 / want[common]).sum())
    freedom = int(common.sum()) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


def test_a_draw_is_the_same_whenever_it_is_asked_again() -> None:
    logits = SHAPES["spread"]
    first = [token_of(logits, Sampling(), history=range(n)) for n in range(50)]
    assert [token_of(logits, Sampling(), history=range(n)) for n in reversed(range(50))] == first[::-1]
    assert len(set(first)) > 10


def test_the_choice_s_seed_counts_not_the_request_s() -> None:
    logits = SHAPES["flat"]
    tokens = [
        draw(logits, Draw(Sampling(seed=request), choice, 3, (), 0), piece).tokens
        for request in (1, 2)
        for choice in (8, 9)
    ]
    assert tokens[0] == tokens[2] != tokens[1] == tokens[3]


def test_min_p_keeps_what_is_just_as_likely(at: Uniform) -> None:
    at(0.999)
    least = float(np.exp(np.float32(-1)))
    assert token_of(logits_of([0.0, -1.0]), Sampling(min_p=least)) == 1
    assert token_of(logits_of([0.0, -1.001]), Sampling(min_p=least)) == 0


# --- penalties and bias


def naive(logits: Logits, s: Sampling, history: Sequence[int], prompt: int) -> list[float]:
    out = [float(v) for v in logits]
    for token in set(history):
        out[token] = out[token] / s.repetition_penalty if out[token] > 0 else out[token] * s.repetition_penalty
    for token in history[prompt:]:
        out[token] -= s.frequency_penalty
    for token in set(history[prompt:]):
        out[token] -= s.presence_penalty
    for token, bias in s.logit_bias:
        out[token] += bias if abs(bias) < 100 else math.copysign(1e5, bias)
    return out


def test_penalties_and_bias_are_those_of_a_naive_loop(at: Uniform) -> None:
    for seed in range(1500):
        rng = random.Random(seed)
        logits = logits_of([rng.gauss(0, 2) for _ in range(8)])
        history = [rng.randrange(8) for _ in range(rng.randrange(1, 12))]
        prompt = rng.randint(0, len(history))
        s = Sampling(
            temperature=0.0,
            repetition_penalty=rng.choice([1.0, 1.0, 0.01, 0.8, 1.3, 2.0]),
            presence_penalty=rng.choice([0.0, 0.0, -2.0, 0.5, 2.0]),
            frequency_penalty=rng.choice([0.0, 0.0, -2.0, 0.3, 2.0]),
            logit_bias=tuple((i, rng.uniform(-5, 5)) for i in rng.sample(range(8), rng.choice([0, 0, 3]))),
        )
        want = naive(logits, s, history, prompt)
        best = sorted(want)
        if best[-1] - best[-2] < 1e-4:
            continue  # float32 may see it the other way round
        assert token_of(logits, s, history, prompt) == want.index(best[-1]), seed


def test_penalties_shape_the_distribution_too(at: Uniform) -> None:
    logits = logits_of([1.0, 1.0, 1.0, 1.0])
    s = Sampling(presence_penalty=math.log(2), frequency_penalty=math.log(2), logit_bias=((3, math.log(2)),))
    history = [0, 0, 1, 1, 1, 2]  # the prompt is [0, 0, 1]: 1 was drawn twice, 2 once
    counts = [0] * 4
    for i in range(1000):
        at((i + 0.5) / 1000)
        counts[token_of(logits, s, history, 3)] += 1
    want = np.array([1, 1 / 8, 1 / 4, 2])
    assert np.abs(np.array(counts) / 1000 - want / want.sum()).max() <= 0.001


@pytest.mark.parametrize("shape", SHAPES)
def test_a_bias_of_100_decides(shape: str, at: Uniform) -> None:
    logits = SHAPES[shape]
    wanted = int(np.flatnonzero(np.isfinite(logits))[-1])
    best = int(logits.argmax())
    for temperature in (0.0, 1.0, 2.0):
        for u in (0.0, 0.5, 1 - 2**-53):
            at(u)
            always = Sampling(temperature=temperature, logit_bias=((wanted, 100.0),))
            assert token_of(logits, always) == wanted
            never = Sampling(temperature=temperature, logit_bias=((best, -100.0),))
            assert token_of(logits, never) != best


def test_a_smaller_bias_only_adds() -> None:
    logits = logits_of([0.0, 150.0])
    assert token_of(logits, Sampling(temperature=0, logit_bias=((0, 99.9),))) == 1
    assert token_of(logits, Sampling(temperature=0, logit_bias=((0, 100.0),))) == 0


# --- logprobs


@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_are_normalised_and_finite(shape: str) -> None:
    logits = SHAPES[shape]
    told = logprob(logits, int(logits.argmax()), len(logits), piece)
    values = [value for _, _, value in told.top]
    assert all(math.isfinite(v) and FLOOR <= v <= 0 for v in values)
    assert math.fsum(map(math.exp, values)) == pytest.approx(1, abs=1e-4)
    assert values == sorted(values, reverse=True)
    assert {i for i, _, _ in told.top} == set(range(len(logits)))
    exact = logits.astype(np.float64) - float(logits.max())
    exact -= math.log(np.exp(exact).sum())
    for i, _, value in told.top:
        assert value == pytest.approx(max(exact[i], FLOOR), abs=1e-3)


def test_the_likeliest_are_told_best_first() -> None:
    logits = logits_of(np.log([0.1, 0.5, 0.15, 0.25]))
    told = logprob(logits, 0, 2, piece)
    assert (told.token, told.piece) == (0, b"<0>")
    assert told.logprob == pytest.approx(math.log(0.1))
    assert [(i, p) for i, p, _ in told.top] == [(1, b"<1>"), (3, b"<3>")]
    assert [v for _, _, v in told.top] == pytest.approx([math.log(0.5), math.log(0.25)])


def test_no_alternatives_no_top() -> None:
    assert logprob(SHAPES["spread"], 3, 0, piece).top == ()


def test_impossible_tokens_have_a_floor() -> None:
    assert logprob(logits_of([0.0, NONE]), 1, 2, piece).logprob == FLOOR
    assert logprob(logits_of([0.0, -3e4]), 1, 2, piece).top[1] == (1, b"<1>", FLOOR)


def test_a_certain_token_has_zero() -> None:
    assert logprob(logits_of([1e4, -1e4, -1e4]), 0, 0, piece).logprob == 0.0


@pytest.mark.parametrize("s", [{}, {"temperature": 0.0}, {"temperature": 0.3, "top_k": 3, "logit_bias": ((5, 100.0),)}])
def test_logprobs_are_the_model_s_own(s: dict[str, Any]) -> None:
    logits = SHAPES["spread"]
    drawn = draw(logits, Draw(Sampling(**s, logprobs=4), 7, 1, [0], 1), piece)
    (told,) = drawn.logprobs
    assert told == logprob(logits, drawn.tokens[0], 4, piece)


# --- the random number


def test_seed_0_gives_the_published_numbers_of_splitmix64() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]
    assert [uniform(0, i) for i in range(5)] == [(n >> 11) * 2**-53 for n in published]


def test_a_stream_replayed_by_another_release_draws_the_same() -> None:
    assert [uniform(1, 0), uniform(42, 7), uniform(2**63 - 1, 4095)] == [
        0.9557038184179468,
        0.17259965531893207,
        0.24783102183199868,
    ]


def test_the_numbers_fill_the_unit_interval() -> None:
    numbers = np.array([uniform(seed, position) for seed in (0, 1, 2**62) for position in range(4000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    want = len(numbers) / 20
    assert float(((counts - want) ** 2 / want).sum()) < 19 + 4 * math.sqrt(2 * 19)
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(("seeds", "positions"), [(1, 0), (0, 1), (1, 1), (1, -1), (2**32, 0), (2**62, 3)])
def test_neighbours_are_independent(seeds: int, positions: int) -> None:
    table = np.zeros((8, 8))
    for seed in range(60):
        for position in range(1, 101):
            x, y = uniform(seed, position), uniform(seed + seeds, position + positions)
            table[int(x * 8), int(y * 8)] += 1
    want = 6000 / 64
    assert float(((table - want) ** 2 / want).sum()) < 63 + 4 * math.sqrt(2 * 63)
