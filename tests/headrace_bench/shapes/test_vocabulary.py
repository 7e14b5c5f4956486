from __future__ import annotations

from itertools import pairwise

import pytest

from headrace_bench.load.prompts import WORDS
from headrace_bench.shapes.vocabulary import CONTROL, NORMAL, TURN, vocabulary

SIZE = 8000
KNOWN = vocabulary(SIZE, 16, 1)


def split(word: str) -> list[str]:
    """By merges alone, as a tokenizer does it: always the earliest that fits."""
    ranks = {merge: rank for rank, merge in enumerate(KNOWN.merges)}
    parts = list(word)
    while True:
        pairs = [(ranks.get(f"{a} {b}"), i) for i, (a, b) in enumerate(pairwise(parts))]
        found = [(rank, i) for rank, i in pairs if rank is not None]
        if not found:
            return parts
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_it_has_the_size_and_every_token_once() -> None:
    assert len(KNOWN.tokens) == len(set(KNOWN.tokens)) == SIZE
    assert KNOWN.types.count(CONTROL) == 16
    assert KNOWN.types.count(NORMAL) == SIZE - 16
    assert len(KNOWN.merges) == SIZE - 16 - 256


def test_every_merge_makes_a_token_of_two_that_there_are() -> None:
    tokens = set(KNOWN.tokens)
    for merge in KNOWN.merges:
        one, other = merge.split(" ")
        assert {one, other, one + other} <= tokens


@pytest.mark.parametrize("word", ["the", "people", *WORDS[::60]])
def test_a_common_word_is_a_token(word: str) -> None:
    assert split(f"Ġ{word}") == [f"Ġ{word}"]


def test_a_rare_word_is_some() -> None:
    parts = split("Ġstarfish")
    assert 1 < len(parts) < len("Ġstarfish")


def test_what_an_answer_must_not_hold() -> None:
    silent = set(KNOWN.silent)
    assert KNOWN.id(TURN) in silent
    assert {i for i, token in enumerate(KNOWN.tokens) if len(token) == 1} <= silent
    assert len(silent) == 256 + 16


def test_a_seed_makes_the_same_one_and_another_other_words() -> None:
    assert vocabulary(SIZE, 16, 1) == KNOWN
    assert vocabulary(SIZE, 16, 2) != KNOWN


def test_too_small_a_one_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        vocabulary(400, 16, 1)
    with pytest.raises(ValueError, match="control"):
        vocabulary(SIZE, 2, 1)
