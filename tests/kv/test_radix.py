from __future__ import annotations

import random

import pytest

from headrace.kv.radix import Radix
from naive import CheckedIndex


def test_an_empty_index_matches_nothing() -> None:
    radix = Radix()
    assert radix.match([1, 2, 3]) == (0, None)
    assert radix.match([]) == (0, None)
    assert (radix.length(0), radix.tokens(0), radix.redundant(0)) == (0, [], True)


def test_the_longest_prefix_wins_and_may_end_inside_a_sequence() -> None:
    radix = Radix()
    radix.extend(0, [1, 2, 3, 4])
    radix.extend(1, [1, 2, 9])
    assert radix.match([1, 2, 3, 7]) == (3, 0)
    assert radix.match([1, 2, 9, 9]) == (3, 1)
    assert radix.match([1, 2]) == (2, 0)
    assert radix.match([1, 5])[0] == 1
    assert radix.match([2]) == (0, None)


def test_a_match_names_a_slot_that_holds_all_of_it() -> None:
    radix = Radix()
    radix.extend(0, [1])
    radix.extend(1, [1, 2])
    radix.extend(2, [1, 2, 3])
    assert radix.match([1, 2, 3, 4]) == (3, 2)
    assert radix.match([1, 2, 7]) in [(2, 1), (2, 2)]


def test_growing_a_shared_sequence_leaves_the_sharer_alone() -> None:
    radix = Radix()
    radix.extend(0, [1, 2])
    radix.extend(1, [1, 2])
    radix.extend(0, [3])
    assert (radix.tokens(0), radix.tokens(1)) == ([1, 2, 3], [1, 2])
    radix.extend(1, [3, 4])
    assert (radix.tokens(0), radix.tokens(1)) == ([1, 2, 3], [1, 2, 3, 4])
    assert radix.match([1, 2, 3, 4]) == (4, 1)


def test_what_is_entered_is_not_tied_to_the_caller_s_list() -> None:
    radix = Radix()
    tokens = [1, 2]
    radix.extend(0, tokens)
    radix.extend(0, [3])
    tokens.append(9)
    assert tokens == [1, 2, 9]
    assert radix.tokens(0) == [1, 2, 3]


def test_redundant_is_said_of_a_sequence_that_another_contains() -> None:
    radix = Radix()
    radix.extend(0, [1, 2])
    radix.extend(1, [1, 2, 3])
    assert radix.redundant(0)
    assert not radix.redundant(1)
    radix.remove(1)
    assert not radix.redundant(0)


@pytest.mark.parametrize("length", range(7))
def test_truncate_at_every_length(length: int) -> None:
    radix = Radix()
    radix.extend(0, [1, 2, 3, 4, 5, 6])
    radix.extend(1, [1, 2, 3, 9])
    radix.truncate(0, length)
    assert radix.tokens(0) == [1, 2, 3, 4, 5, 6][:length]
    assert radix.length(0) == length
    assert radix.tokens(1) == [1, 2, 3, 9]
    assert radix.match([1, 2, 3, 4, 5, 6])[0] == max(3, length)


def test_truncate_beyond_the_end_changes_nothing() -> None:
    radix = Radix()
    radix.extend(0, [1, 2])
    radix.truncate(0, 3)
    radix.truncate(7, 0)
    assert radix.tokens(0) == [1, 2]


def test_an_empty_sequence_can_be_forgotten() -> None:
    radix = Radix()
    radix.extend(0, [])
    radix.remove(0)
    assert repr(radix) == "<Radix [0 slots, 0 tokens]>"


def test_a_shared_prefix_is_held_once() -> None:
    radix = Radix()
    for slot in range(10):
        radix.extend(slot, [*range(100), 1000 + slot])
    assert repr(radix) == "<Radix [10 slots, 110 tokens]>"


def test_it_equals_lists_of_tokens_whatever_is_done() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        index = CheckedIndex()
        stems = [[rng.randrange(3) for _ in range(rng.randrange(12))] for _ in range(4)]

        def some(rng: random.Random = rng, stems: list[list[int]] = stems) -> list[int]:
            return rng.choice(stems) + [rng.randrange(3) for _ in range(rng.randrange(5))]

        for _ in range(80):
            slot = rng.randrange(6)
            match rng.randrange(6):
                case 0 | 1:
                    index.extend(slot, some() or [0])
                case 2:
                    index.truncate(slot, rng.randrange(14))
                case 3:
                    index.remove(slot)
                case 4:
                    index.match(some())
                case _:
                    index.redundant(slot)
            index.compare_all()
        for slot in range(6):
            index.remove(slot)
        index.compare_all()
        assert index.match([0]) == (0, None)
