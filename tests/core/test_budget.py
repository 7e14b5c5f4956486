from __future__ import annotations

import random

import pytest

from headrace.core.budget import BUCKETS, CROWD, LEAST, Pace, Room
from headrace.core.costmodel import TILE, CostModel, Work, positions

TRUE = CostModel((2e-3, 2.85e-3, 3.9e-3, 1.4e-6, 2.6e-6, 0.0))
PACE = Pace(itl=0.1, itl_hard=0.145, stall=0.5, guard=0.25, fuse=0.1)


def room(seconds: float, *, decodes: int = 0, tokens: int = 512, width: int = 0) -> Room:
    return Room(TRUE, Work(0, decodes, 100 * decodes, width), seconds=seconds, tokens=tokens)


@pytest.mark.parametrize(
    ("reading", "burnt", "finishing", "seconds"),
    [
        (0, 0, 1, PACE.guard),
        (0, 5, 1, PACE.guard),
        (0, 0, CROWD + 1, PACE.stall),
        (1, 0, 0, PACE.itl),
        (1, 1, 0, PACE.itl_hard),
        (3, 1, 1, PACE.itl_hard),
        (3, 0, 1, PACE.itl),
        (3, 0, 2, PACE.stall),
        (16, 2, 2, PACE.itl_hard),
        (12, 0, 7, PACE.stall),
        (12, 0, 6, PACE.itl),
    ],
)
def test_the_length_of_a_step(reading: int, burnt: int, finishing: int, seconds: float) -> None:
    crowd = PACE.crowd(reading, finishing)
    assert PACE.seconds(reading, burnt=burnt > 0, crowd=crowd) == seconds


def test_what_fits_whole_is_given_whole() -> None:
    one = room(0.25)
    assert one.give(0, 37) == 37
    assert not one.full
    assert one.give(0, 21) == 21


def test_a_step_is_as_long_as_it_may_be_and_not_longer() -> None:
    rng = random.Random(1)
    for _ in range(500):
        decodes, start = rng.randrange(1, 12), rng.randrange(2000)
        seconds = rng.uniform(0.08, 0.6)
        given = room(seconds, decodes=decodes).give(start, 10_000)
        work = Work(given, decodes, 100 * decodes + positions(start, given), given)
        assert given == LEAST or TRUE.predict(work) <= seconds
        more = [b - decodes for b in BUCKETS if given < b - decodes <= 512]
        assert all(TRUE.predict(Work(n, decodes, 100 * decodes + positions(start, n), n)) > seconds for n in more), (
            "a larger bucket would have fitted"
        )


def test_sizes_come_from_the_buckets() -> None:
    for decodes in range(1, 12):
        given = room(0.4, decodes=decodes).give(700, 10_000)
        assert given + decodes in BUCKETS
        assert given + decodes >= TILE


def test_whole_tiles_are_taken_where_they_are_cheaper() -> None:
    """63 rows that look back row by row cost more than 64 in a tile."""
    deep = 1500
    tile = TRUE.predict(Work(TILE, 0, positions(deep, TILE), 0))
    assert room(tile).give(deep, 10_000) == TILE


def test_some_progress_is_always_made() -> None:
    assert room(0.001, decodes=8).give(4000, 500) == LEAST
    assert room(0.001, decodes=8).give(4000, 3) == 3


def test_the_second_prompt_gets_what_is_left() -> None:
    one = room(0.145, decodes=3)
    assert one.give(0, 20) == 20
    second = one.give(0, 1000)
    assert 0 < second < 40
    assert one.full
    assert one.give(0, 1) == 0


def test_the_second_prompt_may_get_nothing() -> None:
    one = room(0.06, decodes=8)
    assert one.give(0, 8) == 8
    assert one.give(2000, 50) == 0


def test_in_a_crowd_only_whole_prompts_follow_the_first() -> None:
    one = Room(TRUE, Work(0, 2, 0, 0), seconds=0.3, tokens=512, whole=True)
    assert one.give(0, 60) == 60
    assert one.give(0, 90) == 0
    assert one.give(0, 30) == 30
    alone = Room(TRUE, Work(0, 2, 0, 0), seconds=0.3, tokens=512, whole=True)
    assert 0 < alone.give(0, 500) < 500


def test_tokens_are_bounded_too() -> None:
    one = room(100.0, tokens=100)
    assert one.give(0, 60) == 60
    assert one.give(0, 60) == 36, "96 rows are a size that comes again, 100 are none"
    assert one.full


def test_without_a_model_the_tokens_are_the_bound() -> None:
    one = Room(None, Work(), seconds=0.0, tokens=100)
    assert one.give(0, 60) == 60
    assert one.give(0, 60) == 40
    assert one.full
