from __future__ import annotations

from typing import Any

from headrace.core.door import WORTH_WAITING, Door
from headrace.core.kv import Kept, Outside
from headrace.core.plan import Admission
from headrace.core.request import BATCH, Generation
from headrace.core.residency import Residency
from headrace.core.sequence import Sequence, sequences
from headrace.kv.pool import Pool
from headrace.kv.radix import Radix


class House:
    """A residency with running sequences."""

    def __init__(self, *, cells: int = 1000, slots: int = 8) -> None:
        self.residency = Residency(
            index=Radix, pool=Pool(cells=cells, slots=slots), idle_cells=cells, prefix_cache=True
        )
        self.running: list[Sequence] = []
        self._rid = 0

    def new(self, tokens: list[int], **fields: Any) -> Sequence:
        self._rid += 1
        (sequence,) = sequences(Generation(self._rid, tokens, 4, **fields), 0.0, lambda token: b"")
        return sequence

    def run(self, sequence: Sequence, computed: int) -> Sequence:
        self.residency.enter(sequence, None, 0)
        self.residency.extend(sequence, computed)
        self.running.append(sequence)
        return sequence

    def door(self, *, max_batch: int = 4, max_running: int = 6, await_prefix: bool = True) -> Door:
        return Door(
            self.residency,
            self.running,
            max_batch=max_batch,
            max_running=max_running,
            await_prefix=await_prefix,
            prefill=lambda _, count: count * 1e-3,
        )


def prompt(n: int, first: int) -> list[int]:
    return [first, *range(1, n)]


def test_who_has_burnt_the_fuse_joins_beyond_the_batch() -> None:
    house = House()
    for i in range(2):
        house.run(house.new(prompt(5, 100 + i)), 5)
    door = house.door(max_batch=2, max_running=3)
    late = house.new(prompt(5, 110))
    assert door.open(late, burnt=False) is None
    assert door.open(late, burnt=True) is not None
    assert door.open(house.new(prompt(5, 111)), burnt=True) is None, "the hard limit holds"


def test_who_is_paused_takes_no_place() -> None:
    house = House()
    house.run(house.new(prompt(5, 100)), 5).paused = True
    assert house.door(max_batch=1, max_running=1).open(house.new(prompt(5, 101)), burnt=False) is not None


def test_it_waits_for_a_prefix_that_is_being_computed() -> None:
    house = House()
    shared = prompt(WORTH_WAITING + 40, 100)
    house.run(house.new([*shared, 7]), WORTH_WAITING)
    assert house.door().open(house.new([*shared, 8]), burnt=True) is None
    assert house.door(await_prefix=False).open(house.new([*shared, 8]), burnt=True) is not None
    assert house.door().open(house.new([*shared, 8], cache=False), burnt=True) is not None
    assert house.door().open(house.new([*shared, 8], salt="b"), burnt=True) is not None, "another tenant's is not mine"


def test_of_two_with_one_beginning_the_second_waits_for_the_first() -> None:
    house, shared = House(), prompt(WORTH_WAITING + 40, 100)
    door = house.door()
    assert door.open(house.new([*shared, 7]), burnt=False) is not None
    assert door.open(house.new([*shared, 8]), burnt=False) is None
    assert door.open(house.new(prompt(5, 101)), burnt=False) is not None, "others pass"


def test_once_somebody_finds_no_room_nobody_behind_gets_in() -> None:
    house = House(cells=100)
    house.run(house.new(prompt(50, 100)), 50)
    door = house.door()
    assert door.open(house.new(prompt(60, 101)), burnt=False) is None
    assert door.open(house.new(prompt(5, 102)), burnt=False) is None


def test_without_a_slot_nobody_gets_in() -> None:
    house = House(slots=1)
    house.run(house.new(prompt(5, 100)), 5)
    assert house.door().open(house.new(prompt(5, 101)), burnt=True) is None


def kept(*ends: int) -> tuple[Kept, ...]:
    return tuple(Kept(start, end, bytes([end])) for start, end in zip((0, *ends), ends, strict=False))


def test_what_is_kept_outside_is_loaded_if_that_is_faster() -> None:
    house = House()
    sequence = house.new(prompt(50, 100))
    sequence.outside = Outside(40, kept(16, 32, 48), seconds=0.01)
    admission = house.door().open(sequence, burnt=False)
    assert admission == Admission(sequence, None, 0, 40, kept(16, 32, 48))
    sequence.outside = Outside(40, kept(16, 32, 48), seconds=0.05)
    assert house.door().open(sequence, burnt=False) == Admission(sequence, None, 0, 0)


def test_cells_are_shared_up_to_the_block_that_brings_more() -> None:
    house = House()
    running = house.run(house.new(prompt(20, 100)), 20)
    sequence = house.new(prompt(50, 100))
    sequence.outside = Outside(40, kept(16, 32, 48), seconds=0.01)
    admission = house.door().open(sequence, burnt=False)
    assert admission == Admission(sequence, running.slot, 16, 40, kept(16, 32, 48)[1:])


def test_what_is_loaded_for_one_is_not_loaded_again_for_the_next() -> None:
    """One step later it shares the cells."""
    house = House()
    one, two, other = house.new(prompt(50, 100)), house.new(prompt(50, 100)), house.new(prompt(50, 101))
    one.outside = two.outside = Outside(40, kept(16, 32, 48), seconds=0.01)
    other.outside = Outside(40, (Kept(0, 40, b"other"),), seconds=0.01)
    door = house.door()
    assert door.open(one, burnt=False) is not None
    assert door.open(two, burnt=False) is None
    assert door.open(other, burnt=False) is not None
    alone = house.door(await_prefix=False)
    assert all(alone.open(s, burnt=False) is not None for s in (one, two))


def test_nothing_is_loaded_that_the_cells_hold() -> None:
    house = House()
    running = house.run(house.new(prompt(45, 100)), 45)
    sequence = house.new([*prompt(45, 100), 7])
    sequence.outside = Outside(40, kept(16, 32, 48), seconds=0.0)
    assert house.door().open(sequence, burnt=False) == Admission(sequence, running.slot, 45, 45)


def test_the_last_token_is_always_computed() -> None:
    house = House()
    sequence = house.new(prompt(48, 100))
    sequence.outside = Outside(48, kept(16, 32, 48), seconds=0.0)
    admission = house.door().open(sequence, burnt=False)
    assert admission is not None
    assert admission.length == 47


def test_who_waits_for_a_prefix_says_for_whom() -> None:
    """That one gets the turn, or it might stand still for as long as others come."""
    house = House()
    running = house.run(house.new(prompt(200, 9), priority=BATCH), 50)
    door = house.door()
    assert door.open(house.new(prompt(202, 9)), burnt=False) is None
    assert door.awaited is running
    assert door.open(house.new(prompt(5, 10)), burnt=False) is not None
    assert door.awaited is None
