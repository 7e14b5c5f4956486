from __future__ import annotations

from headrace.core.kv import Kept
from headrace.core.plan import Copy, Load, Trim
from headrace.core.request import Generation
from headrace.core.residency import Residency
from headrace.core.sequence import Sequence, sequences
from headrace.kv.pool import Pool
from headrace.kv.radix import Radix


def new(tokens: list[int], *, salt: str = "", cache: bool = True) -> Sequence:
    (sequence,) = sequences(Generation(1, tokens, 4, cache=cache, salt=salt), 0.0, lambda token: b"")
    return sequence


def residency(*, cells: int = 1000, slots: int = 4, idle_cells: int = 1000, warm_cells: int | None = None) -> Residency:
    pool = Pool(cells=cells, slots=slots)
    return Residency(index=Radix, pool=pool, idle_cells=idle_cells, prefix_cache=True, warm_cells=warm_cells)


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


def test_the_least_recently_used_goes_first() -> None:
    home = residency(idle_cells=8)
    first, second = ran(home, [1, 2, 3, 4]), ran(home, [5, 6, 7, 8])
    third = ran(home, [9, 10, 11, 12])
    home.shrink()
    assert list(home.idle) == [second, third]
    assert first not in home.idle
    home.make_room(1000, 0, ())
    assert not home.idle


def test_what_is_saved_leaves_early() -> None:
    home = residency(idle_cells=100, warm_cells=4)
    slots = [ran(home, [10 * i, 2, 3, 4]) for i in range(1, 5)]
    home.shrink()
    assert len(home.idle) == 4, "nothing is saved yet"
    home.saved.update(slots[:2])
    home.shrink()
    assert list(home.idle) == slots[2:]
    home.saved.add(slots[2])
    home.shrink()
    assert list(home.idle) == slots[3:]
    assert not home.saved


def test_the_next_to_go_is_the_next_to_save() -> None:
    home = residency()
    short, first = ran(home, [9, 8]), ran(home, [1, 2, 3, 4], salt="a")
    second = ran(home, [5, 6, 7, 8])
    assert home.unsaved(3) == (first, [1, 2, 3, 4], "a")
    assert not home.saved
    assert short in home.idle, "too short to be worth it"
    home.saved.add(first)
    assert home.unsaved(3) == (second, [5, 6, 7, 8], "")
    home.saved.add(second)
    assert home.unsaved(3) is None


def test_blocks_are_loaded_and_cut_to_what_is_wanted() -> None:
    home = residency()
    sequence = new(list(range(20)))
    home.enter(sequence, None, 0)
    home.load(sequence, (Kept(0, 8, b"a"), Kept(8, 16, b"b")), 13)
    slot = sequence.slot or 0
    assert (sequence.computed, home.pool.used) == (13, 13)
    assert home.take_ops() == [Load(slot, 0, 8, b"a"), Load(slot, 8, 16, b"b"), Trim(slot, 13)]
    assert home.match(new(list(range(20)))) == (13, slot)


def test_right_guesses_stay_and_wrong_ones_go() -> None:
    home = residency()
    sequence = new([1, 2, 3])
    home.enter(sequence, None, 0)
    home.extend(sequence, 3)
    sequence.tokens += [4, 5, 6]
    home.settle(sequence, 4, 2)
    slot = sequence.slot or 0
    assert (sequence.computed, home.pool.used) == (5, 5)
    assert home.take_ops() == [Trim(slot, 5)]
    home.settle(sequence, 1, 1)
    assert (sequence.computed, home.pool.used) == (6, 6)
    assert home.take_ops() == []


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


def test_what_the_engine_never_had_is_cut_in_the_books_only() -> None:
    home = residency()
    sequence = new(list(range(20)))
    home.enter(sequence, None, 0)
    home.load(sequence, (Kept(0, 8, b"a"), Kept(8, 16, b"b")), 13)
    home.take_ops()
    home.cut(sequence, 8, told=True)
    assert (sequence.computed, home.pool.used) == (8, 8)
    assert home.match(new(list(range(20)))) == (8, sequence.slot)
    assert home.take_ops() == [], "what it computes next must not be trimmed away"


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
