from __future__ import annotations

import random

import pytest

from headrace.core.request import Generation
from headrace.core.sequence import common_prefix, sequences
from naive import shared


def piece(token: int) -> bytes:
    """One token a byte."""
    return bytes([token])


def test_a_generation_becomes_its_choices() -> None:
    generation = Generation(7, [1, 2, 3], 5, n=3, stop=("x",))
    made = sequences(generation, 4.5, piece)
    assert [s.index for s in made] == [0, 1, 2]
    assert all(s.generation is generation and s.arrived == 4.5 and s.tokens == [1, 2, 3] for s in made)
    made[0].tokens.append(9)
    made[0].detokenizer.feed(b"x")
    assert made[1].tokens == generation.prompt == [1, 2, 3]
    assert not made[1].detokenizer.stopped


def test_computed_chases_the_tokens() -> None:
    (s,) = sequences(Generation(1, [1, 2, 3], 5), 0.0, piece)
    assert (s.pending, s.drawn, s.decoding) == (3, 0, False)
    s.computed = 2
    assert (s.pending, s.drawn, s.decoding) == (1, 0, False), "the prompt's last token is prefill"
    s.computed = 3
    s.tokens.append(8)
    assert (s.pending, s.drawn, s.decoding) == (1, 1, True)
    s.computed = 0
    assert (s.pending, s.drawn, s.decoding) == (4, 1, False), "sent back: it is computed again first"


def test_a_replay_goes_on_behind_what_was_told() -> None:
    over, fresh, begun = None, (), tuple(b"hello")
    first, second = sequences(Generation(1, [1, 2, 3], 9, n=3, resume=(over, fresh, begun)), 2.0, piece)
    assert (first.index, first.tokens, first.drawn, first.shown) == (1, [1, 2, 3], 0, False)
    assert (second.index, second.tokens, second.drawn, second.shown) == (2, [1, 2, 3, *b"hello"], 5, True)
    assert (second.computed, second.pending, second.untold, second.decoding) == (0, 8, [], False)
    assert second.arrived == 2.0
    second.computed = 7
    assert second.decoding, "its reader has a first token and waits for the next"


TEXTS = ("plain text", "héllo 🔥 wörld", "ab<stop>cd", "<<st<sto", "🔥<stop>", "end of<s", "<stop", "a<<stop>")


@pytest.mark.parametrize("text", TEXTS)
def test_a_replay_holds_back_what_was_held_back(text: str) -> None:
    data = text.encode()
    for told in range(len(data) + 1):
        (whole,) = sequences(Generation(1, [1], 99, stop=("<stop>",)), 0.0, piece)
        shown = "".join(whole.detokenizer.feed(bytes([b])) for b in data[:told])
        if whole.detokenizer.stopped:
            break
        (again,) = sequences(Generation(1, [1], 99, stop=("<stop>",), resume=(tuple(data[:told]),)), 0.0, piece)
        assert again.shown == bool(shown)
        rest = [[s.detokenizer.feed(bytes([b])) for b in data[told:]] for s in (whole, again)]
        assert rest[0] == rest[1]
        assert whole.detokenizer.flush() == again.detokenizer.flush()
        assert whole.detokenizer.stopped == again.detokenizer.stopped


def test_it_says_where_it_is() -> None:
    (s,) = sequences(Generation(4, [1, 2], 5), 0.0, piece)
    assert repr(s) == "<Sequence 4.0 [waiting, 0/2]>"
    s.slot, s.computed = 3, 1
    assert repr(s) == "<Sequence 4.0 [slot 3, 1/2]>"


def test_two_sequences_are_never_equal() -> None:
    a, b = sequences(Generation(4, [1, 2], 5, n=2), 0.0, piece)
    assert a != b
    assert len({a, b}) == 2


@pytest.mark.parametrize(
    ("a", "b", "start", "want"),
    [
        ([], [], 0, 0),
        ([1], [], 0, 0),
        ([1, 2, 3], [1, 2, 3], 0, 3),
        ([1, 2, 3], [1, 2, 4, 5], 0, 2),
        ([9], [1], 0, 0),
        ([2, 3, 4], [1, 2, 3], 1, 2),
        ([2, 3], [1, 2, 3], 3, 0),
    ],
)
def test_common_prefix(a: list[int], b: list[int], start: int, want: int) -> None:
    assert common_prefix(a, b, start) == want


def test_common_prefix_counts_as_one_would() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        a, b = ([rng.randrange(2) for _ in range(rng.randrange(12))] for _ in range(2))
        b = rng.choice([b, a + b, a[: len(a) // 2] + b])
        start = rng.randint(0, len(b))
        assert common_prefix(a, b, start) == shared(a, b[start:])
