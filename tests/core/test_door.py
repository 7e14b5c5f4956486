from __future__ import annotations

from headrace.core.door import WORTH_WAITING, Door
from headrace.core.request import Generation
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

    def new(self, tokens: list[int], *, salt: str = "", cache: bool = True) -> Sequence:
        self._rid += 1
        (sequence,) = sequences(Generation(self._rid, tokens, 4, cache=cache, salt=salt), 0.0)
        return sequence

    def run(self, sequence: Sequence, computed: int) -> Sequence:
        self.residency.enter(sequence, None, 0)
        self.residency.extend(sequence, computed)
        self.running.append(sequence)
        return sequence

    def door(self, *, max_batch: int = 4, max_running: int = 6, await_prefix: bool = True) -> Door:
        return Door(
            self.residency, self.running, max_batch=max_batch, max_running=max_running, await_prefix=await_prefix
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
