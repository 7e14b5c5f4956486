from __future__ import annotations

import random

import pytest

from headrace.core.attention import TILE, Attention
from headrace.core.budget import (
    ALIKE,
    BEYOND,
    BUCKETS,
    CROWD,
    DOUBLE,
    EASY,
    FARTHER,
    LEAST,
    MORE,
    PAYS,
    Pace,
    Room,
    Ways,
    fill,
    filled,
)
from headrace.core.costmodel import GROUP, CostModel, Work, positions

TRUE = CostModel((2e-3, 2.85e-3, 0.0, 3.9e-3, 1.4e-6, 2.6e-6, 0.0))
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


def given_cost(count: int, start: int, decodes: int) -> float:
    return TRUE.predict(Work(count, decodes, 100 * decodes + positions(start, count), count))


def test_no_size_that_fits_brings_more_tokens_a_second() -> None:
    rng = random.Random(1)
    for _ in range(500):
        decodes, start = rng.randrange(1, 12), rng.randrange(2000)
        seconds = rng.uniform(0.08, 0.6)
        given = room(seconds, decodes=decodes).give(start, 10_000)
        cost = given_cost(given, start, decodes)
        assert given == LEAST or cost <= seconds
        for count in (b - decodes for b in BUCKETS if decodes < b <= 512 + decodes):
            other = given_cost(count, start, decodes)
            assert other > seconds or ALIKE * count / other <= given / cost


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


AMX = CostModel(
    (2.5e-3, 5e-4, 0.0, 1e-3, 7e-7, 1e-5, 0.0),
    attention=Attention(heads=9, threads=2, tiled=True, splits=True, pads=True),
)
"""A machine whose matrices are fast: what a row looks back on is what costs (61 rows six times what 64 cost)."""


def deep(model: CostModel, seconds: float, ways: Ways = Ways(), *, decodes: int = 3, read: int = 100) -> Room:  # noqa: B008
    base = Work(0, decodes, read * decodes, 2000, reading=read * decodes)
    return Room(model, base, seconds=seconds, tokens=512, ways=ways)


def cost_of(start: int, count: int, *, pad: int = 0, split: bool = False, decodes: int = 3, read: int = 100) -> float:
    back = read * decodes
    return AMX.predict(Work(count, decodes, back + positions(start, count), 2000 + count, back, pad, split))


def arrangements(start: int, count: int) -> list[float]:
    """Seconds of each way to compute `count` tokens beside three readers."""
    found = [cost_of(start, count)]
    if count >= TILE:
        return [*found, cost_of(start, count, split=True)]
    found.append(cost_of(start, count, pad=TILE - count, split=True))
    return [*found, cost_of(start, count, pad=TILE - 3 - count)] if count < TILE - 3 else found


EVERY = Ways(0.0, splits=True, pads=True)


def test_a_tile_beyond_the_target_is_taken_where_it_doubles_the_tokens_per_second() -> None:
    start, seconds = 900, 0.08
    plain = deep(AMX, seconds).give(start, 10_000)
    assert plain + 3 < TILE
    one = deep(AMX, seconds, Ways(longest=0.1495))
    more = one.give(start, 10_000)
    assert more + 3 >= TILE
    took = AMX.predict(one.work)
    assert seconds < took <= 0.1495
    assert more / took >= DOUBLE * plain / cost_of(start, plain)


def test_what_brings_less_than_twice_stays_within_the_target() -> None:
    one = Room(TRUE, Work(0, 3, 300, 0, reading=300), seconds=0.1, tokens=512, ways=Ways(longest=10.0))
    one.give(0, 10_000)
    assert TRUE.predict(one.work) <= 0.1


def test_no_step_is_longer_than_it_may_be_unless_the_least_is() -> None:
    rng = random.Random(2)
    for _ in range(500):
        start, seconds = rng.randrange(6000), rng.uniform(0.05, 0.2)
        one = deep(AMX, seconds, Ways(BEYOND * seconds, splits=True, pads=True))
        count = one.give(start, rng.randrange(1, 10_000))
        assert count > 0
        least = min(arrangements(start, LEAST)) / PAYS
        assert AMX.predict(one.work) <= max(BEYOND * seconds, FARTHER * least) + 1e-9


def test_a_step_is_arranged_where_that_saves_time() -> None:
    for start in (0, 300, 1500, 4000):
        for count in (2, 8, 20, 40, 60, 62, 64, 100, 200):
            one = deep(AMX, 10.0, EVERY)
            assert one.give(start, count) == count
            took = AMX.predict(one.work)
            assert took <= min(arrangements(start, count)) / PAYS
            if one.work.pad or one.work.split:
                assert took <= PAYS * cost_of(start, count)
            assert one.work.prefill == count
            assert one.work.pad in (0, TILE - count, TILE - 3 - count)


def test_padding_brings_more_tokens_deep_in_a_prompt() -> None:
    plain, filled = deep(AMX, 0.13), deep(AMX, 0.13, EVERY)
    assert filled.give(1500, 10_000) >= 2 * plain.give(1500, 10_000)
    assert filled.work.pad > 0
    assert plain.work.pad == 0


def test_readers_of_long_texts_are_computed_apart() -> None:
    """In one tile each row would look at what all eight have read."""
    one = deep(AMX, 10.0, EVERY, decodes=8, read=500)
    one.give(0, 100)
    assert one.work.split
    assert one.work.pad == 0
    together = deep(AMX, 10.0, decodes=8, read=500)
    together.give(0, 100)
    assert AMX.predict(one.work) < 0.5 * AMX.predict(together.work)
    alone = deep(AMX, 10.0, EVERY, decodes=0)
    alone.give(0, 100)
    assert not alone.work.split, "there is nobody to be apart from"


def test_what_is_computed_apart_comes_in_whole_tiles() -> None:
    """Of a model whose heads are whole chunks, 72 rows of a prompt look at as much as 128 do."""
    model = CostModel((2e-3, 3e-4, 0.0, 1e-3, 2e-6, 1e-5, 0.0), attention=Attention(32, 2, splits=True))
    base = Work(0, 8, 4000, 2000, reading=4000)
    limit = model.predict(Work(80, 8, 4000 + positions(1000, 80), 2080, 4000, 0, True))
    one = Room(model, base, seconds=limit, tokens=512, ways=EVERY)
    assert one.give(1000, 10_000) == TILE
    assert one.work.split


def test_only_what_the_engine_can_and_may_is_done() -> None:
    for attention in (Attention(9, 2), Attention(9, 2, tiled=False, splits=True, pads=True)):
        one = deep(CostModel(AMX.coefficients, attention=attention), 10.0, EVERY, decodes=8, read=500)
        one.give(1500, 20)
        assert not one.work.split
        assert one.work.pad == 0
    split = deep(AMX, 10.0, Ways(splits=True), decodes=8, read=500)
    split.give(1500, 20)
    assert split.work.pad == 0
    padded = deep(AMX, 10.0, Ways(pads=True), decodes=8, read=500)
    padded.give(1500, 100)
    assert not padded.work.split
    nothing = deep(AMX, 10.0, EVERY)
    assert nothing.work == Work(0, 3, 300, 2000, reading=300), "there is no prompt in it"


def test_a_size_just_beyond_whole_tiles_is_passed_over() -> None:
    """72 rows of a model whose heads are whole chunks look at as much as 128 do."""
    model = CostModel((2e-3, 3e-4, 0.0, 1e-3, 2e-6, 1e-5, 0.0), attention=Attention(heads=32, threads=2))
    limit = model.predict(Work(76, 0, positions(1000, 76), 0))
    assert Room(model, Work(), seconds=limit, tokens=76).give(1000, 10_000) == TILE


def test_more_may_run_while_their_steps_are_short() -> None:
    reading = Work(0, 4, 400, 500, reading=400)
    assert PACE.batch(None, reading, 8, 16) == 8
    assert PACE.batch(AMX, reading, 8, 16) == 16
    slow = CostModel((2e-3, 3e-3, 0.0, 30e-3, 1e-6, 1e-6, 0.0))
    assert PACE.batch(slow, reading, 8, 16) == 8, "never fewer than is said"
    for each in (3e-3, 4e-3, 5e-3):
        model = CostModel((2e-3, 3e-3, 0.0, each, 1e-6, 2e-6, 0.0))
        n = PACE.batch(model, reading, 8, 16)
        assert n in (8, 16) or model.predict(Work(0, n, n * 100, 500)) <= EASY * PACE.itl
        assert n == 16 or model.predict(Work(0, n + 1, (n + 1) * 100, 500)) > EASY * PACE.itl


def test_what_steps_have_lately_taken_longer_makes_the_next_ones_shorter() -> None:
    model = CostModel(TRUE.coefficients, sure=True)
    before = Room(model, Work(0, 3, 300, 0, reading=300), seconds=0.13, tokens=512).give(0, 10_000)
    work = Work(40, 3, 1500, 0, reading=300)
    for _ in range(3):
        model.observe(work, 1.3 * model.predict(work))
    assert model.late > 1.1
    after = Room(model, Work(0, 3, 300, 0, reading=300), seconds=0.13, tokens=512).give(0, 10_000)
    assert after < before


REPACKED = CostModel((5e-3, 7.2e-3, 5e-3, 1e-3, 1e-6, 3e-6, 0.0), attention=Attention(32, 2, splits=True, pads=True))
"""Kernels that take 16 rows at a time: a 1B model with K-quants on two slow cores."""

BESIDE = Ways(longest=0.15, splits=True, pads=True)


def rows(one: Room) -> int:
    return one.work.prefill + one.work.decode + one.work.pad


def beside(readers: int, seconds: float, model: CostModel = REPACKED) -> Room:
    return Room(model, Work(0, readers, 100 * readers, 500, 100 * readers), seconds=seconds, tokens=512, ways=BESIDE)


@pytest.mark.parametrize("readers", [1, 3, 7])
def test_rows_come_in_whole_groups_where_others_are_dear(readers: int) -> None:
    one = beside(readers, 0.145)
    count = one.give(0, 1000)
    assert count + readers == GROUP, "15 would take longer than 16"
    assert one.work.pad == 0
    even = CostModel((5e-3, 7.2e-3, 0.0, 1e-3, 1e-6, 3e-6, 0.0), attention=REPACKED.attention)
    assert beside(readers, 0.145, even).give(0, 1000) + readers > GROUP


@pytest.mark.parametrize("pending", range(1, 40))
def test_what_a_prompt_leaves_over_is_filled_up_where_that_is_cheaper(pending: int) -> None:
    one = beside(0, 1.0)
    assert one.give(0, pending) == pending
    over = pending % GROUP
    plain = REPACKED.predict(Work(pending, 0, positions(0, pending), 500 + pending))
    whole = REPACKED.predict(Work(pending, 0, positions(0, pending), 500 + pending, pad=GROUP - over))
    assert rows(one) == (pending if over == 0 or whole > PAYS * plain else pending + GROUP - over)
    assert rows(one) == pending or over > GROUP // 2


def test_nothing_is_filled_up_for_an_engine_that_cannot() -> None:
    cannot = CostModel(REPACKED.coefficients, attention=Attention(32, 2, splits=True))
    for pending in range(1, 40):
        one = beside(0, 1.0, cannot)
        assert one.give(0, pending) == pending
        assert one.work.pad == 0
    assert fill(cannot, 15) == 0
    assert filled(cannot, Work(0, 15, 1500, 500, 1500)).pad == 0


@pytest.mark.parametrize("readers", range(1, 64))
def test_readers_alone_are_filled_up_where_that_is_cheaper(readers: int) -> None:
    base = Work(0, readers, 100 * readers, 500, 100 * readers)
    work = filled(REPACKED, base)
    assert (work.decode, work.positions, work.prefill) == (readers, 100 * readers, 0)
    assert work.pad == 0 or (readers + work.pad) % GROUP == 0
    assert work == base or REPACKED.predict(work) <= PAYS * REPACKED.predict(base)
    assert filled(TRUE, base) == base
    over = readers % GROUP
    assert work.pad == 0 or over >= 10
    assert work.pad > 0 or over <= 10 or readers > 48, "there attention takes a tile"


def test_where_nothing_fits_a_whole_group_may_take_a_fifth_longer() -> None:
    one = Room(REPACKED, Work(0, 1, 100, 500, 100), seconds=0.01, tokens=512, ways=Ways(longest=0.0104))
    assert one.give(0, 1000) + 1 == GROUP
    least = REPACKED.predict(Work(LEAST, 1, 100 + positions(0, LEAST), 508, 100))
    assert 0.1 < least < REPACKED.predict(one.work) <= FARTHER * least
    assert one.work.prefill / REPACKED.predict(one.work) >= MORE * LEAST / least
    plain = Room(REPACKED, Work(0, 1, 100, 500, 100), seconds=0.01, tokens=512)
    assert plain.give(0, 1000) == LEAST, "without efficient steps no longer than it must be"


def test_a_prompt_is_not_cut_if_its_end_would_come_later() -> None:
    def alone(pending: int, model: CostModel, uncut: float = PACE.stall) -> int:
        ways = Ways(PACE.guard, uncut, pads=True)
        return Room(model, Work(), seconds=PACE.guard, tokens=512, ways=ways).give(0, pending)

    assert alone(47, REPACKED) == 47, "two steps, each with rows of no whole group or rows for nobody"
    assert alone(47, REPACKED, 0.0) == 33
    assert alone(100, REPACKED) == 33, "longer than the stall"
    assert alone(100, TRUE) < 100, "two steps take hardly longer than one: a newcomer shall not wait for it"
