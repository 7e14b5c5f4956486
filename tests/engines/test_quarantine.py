from __future__ import annotations

from headrace.core.events import Admitted, Delta, Failed, Finished
from headrace.engines.quarantine import Quarantine


def accused(*rids: int) -> Quarantine:
    quarantine = Quarantine()
    assert quarantine.crash(rids) is None
    return quarantine


def test_nobody_is_suspected_at_first() -> None:
    quarantine = Quarantine()
    assert not quarantine
    assert quarantine.next() is None
    assert quarantine.hear([Delta(1, 0, "x", 1)]) is None


def test_suspects_are_tried_one_at_a_time_in_the_order_given() -> None:
    quarantine = accused(5, 3)
    assert quarantine.next() == 5
    assert quarantine.next() is None
    assert quarantine.hear([Delta(3, 0, "x", 1), Admitted(5, 0, 0)]) is None, "neither another's token nor a place"
    assert quarantine.hear([Delta(5, 0, "", 1)]) == 5
    assert quarantine
    assert quarantine.next() == 3
    assert quarantine.hear([Finished(3, 0, "stop", 1)]) == 3
    assert not quarantine
    assert quarantine.next() is None


def test_all_choices_that_were_begun_have_to_give_something() -> None:
    quarantine = accused(5)
    quarantine.next()
    quarantine.charge({0, 2})
    assert quarantine.hear([Delta(5, 0, "x", 1), Delta(5, 1, "x", 1), Delta(5, 0, "y", 1)]) is None
    assert quarantine.hear([Delta(5, 2, "x", 1)]) == 5


def test_one_that_dies_on_trial_is_guilty_and_nobody_else() -> None:
    quarantine = accused(5, 3, 4)
    quarantine.next()
    quarantine.hear([Delta(5, 0, "x", 1)])
    assert quarantine.next() == 3
    assert quarantine.crash([5, 3]) == 3
    assert quarantine.suspects == [4], "5 had proved harmless"
    assert quarantine.next() == 4


def test_a_death_with_nobody_on_trial_adds_suspects() -> None:
    quarantine = accused(5, 3)
    assert quarantine.crash([]) is None, "a worker that could not even start"
    assert quarantine.suspects == [5, 3]
    assert quarantine.crash([3, 7]) is None
    assert quarantine.suspects == [5, 3, 7]


def test_a_cleared_one_can_be_suspected_again() -> None:
    quarantine = accused(5)
    quarantine.next()
    quarantine.hear([Delta(5, 0, "x", 1)])
    assert quarantine.crash([5]) is None
    assert quarantine.next() == 5
    assert quarantine.crash([5]) == 5


def test_a_failed_step_ends_the_trial() -> None:
    quarantine = accused(5)
    quarantine.next()
    quarantine.charge({0, 1})
    assert quarantine.hear([Failed(5, "c", "m")]) == 5
    assert not quarantine


def test_what_one_owed_the_next_does_not_owe() -> None:
    quarantine = accused(5, 3)
    quarantine.next()
    quarantine.charge({7})
    quarantine.drop(5)
    assert quarantine.next() == 3
    assert quarantine.hear([Delta(3, 0, "x", 1)]) == 3


def test_who_is_over_is_not_tried() -> None:
    quarantine = accused(5, 3, 4)
    quarantine.next()
    for rid in (3, 5, 99):
        quarantine.drop(rid)
    assert quarantine.suspects == [4]
    assert quarantine.on_trial is None
    assert quarantine.next() == 4
    quarantine.acquit()
    assert not quarantine


def test_it_says_how_many() -> None:
    quarantine = accused(5, 3, 4)
    quarantine.next()
    assert repr(quarantine) == "<Quarantine [5 on trial, 2 suspects]>"
