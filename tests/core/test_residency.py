from __future__ import annotations

from headrace.core.plan import Copy, Trim
from headrace.core.request import Generation
from headrace.core.residency import Residency
from headrace.core.sequence import Sequence, sequences
from headrace.kv.pool import Pool
from headrace.kv.radix import Radix


def new(tokens: list[int], *, salt: str = "", cache: bool = True) -> Sequence:
    (sequence,) = sequences(Generation(1, tokens, 4, cache=cache, salt=salt), 0.0)
    return sequence


def residency(*, cells: int = 1000, slots: int = 4, idle_cells: int = 1000) -> Residency:
    return Residency(index=Radix, pool=Pool(cells=cells, slots=slots), idle_cells=idle_cells, prefix_cache=True)


def ran(home: Residency, tokens: list[int], *, salt: str = "") -> int:
    """The idle slot of a sequence that ran."""
    sequence = new(tokens, salt=salt)
    home.enter(sequence, None, 0)
    slot = sequence.slot
    assert slot is not None
    home.extend(sequence, len(tokens))
    home.leave(sequence)
    return slot


def test_a_finished_sequence_is_found_again() -> None:
    home = residency()
    slot = ran(home, [1, 2, 3, 4])
    assert home.match(new([1, 2, 3, 9, 9])) == (3, slot)
    assert home.match(new([1, 2, 3, 4])) == (3, slot), "the last token is computed, for its logits"
    assert home.match(new([1, 2, 3, 9], cache=False)) == (0, None)


def test_tenants_do_not_see_each_other() -> None:
    home = residency()
    mine = ran(home, [1, 2, 3, 4], salt="a")
    assert home.match(new([1, 2, 3, 9], salt="a")) == (3, mine)
    assert home.match(new([1, 2, 3, 9], salt="b")) == (0, None)
    assert home.match(new([1, 2, 3, 9])) == (0, None)
    home.drop(mine)
    assert list(home._indexes) == [""], "nothing is left of a tenant who has nothing here"


def test_equal_texts_of_two_tenants_are_kept_twice() -> None:
    home = residency()
    ran(home, [1, 2, 3, 4], salt="a")
    ran(home, [1, 2, 3, 4], salt="b")
    assert len(home.idle) == 2
    assert home.pool.idle == 8


def test_what_another_slot_holds_as_well_is_not_kept_twice() -> None:
    home = residency()
    ran(home, [1, 2, 3, 4])
    longer = ran(home, [1, 2, 3, 4, 5])
    assert list(home.idle) == [longer]


def test_the_least_recently_used_goes_first_and_the_pinned_last() -> None:
    home = residency(idle_cells=8)
    first, second = ran(home, [1, 2, 3, 4]), ran(home, [5, 6, 7, 8])
    home.pinned.add(first)
    third = ran(home, [9, 10, 11, 12])
    home.shrink()
    assert list(home.idle) == [first, third]
    assert second not in home.idle
    home.make_room(1000, 0, ())
    assert not home.idle
    assert not home.pinned


def test_room_for_slots_spares_those_that_are_copied_from() -> None:
    home = residency(slots=2)
    first, second = ran(home, [1, 2, 3, 4]), ran(home, [5, 6, 7, 8])
    home.make_room(0, 1, {first})
    assert list(home.idle) == [first]
    assert second not in home.idle


def test_use_makes_recent() -> None:
    home = residency()
    first, second = ran(home, [1, 2, 3, 4]), ran(home, [5, 6, 7, 8])
    home.take_ops()
    sequence = new([1, 2, 3, 9])
    home.enter(sequence, first, 3)
    assert list(home.idle) == [second, first]
    assert home.take_ops() == [Copy(first, sequence.slot or 0, 3)]
    assert home.take_ops() == []


def test_wrong_guesses_are_cut_off() -> None:
    home = residency()
    sequence = new([1, 2, 3, 4, 5])
    home.enter(sequence, None, 0)
    home.extend(sequence, 5)
    home.cut(sequence, 3)
    assert sequence.computed == 3
    assert home.pool.used == 3
    assert home.match(new([1, 2, 3, 4, 5])) == (3, sequence.slot)
    assert home.take_ops() == [Trim(sequence.slot or 0, 3)]
