from __future__ import annotations

import itertools

import pytest

from headrace.gateway.states import MEANING, TRANSITIONS, State, check, picture


def test_only_what_is_in_the_table_may_happen() -> None:
    for old, new in itertools.product(State, State):
        if (old, new) in TRANSITIONS:
            check(old, new)
        else:
            with pytest.raises(ValueError, match=f"{old} cannot become {new}"):
                check(old, new)


def test_every_state_can_be_left_and_reached_and_leads_to_gone() -> None:
    for state in State:
        assert any(old is state for old, _ in TRANSITIONS)
        assert any(new is state for _, new in TRANSITIONS)
        reached, fringe = {state}, [state]
        while fringe:
            here = fringe.pop()
            for new in (new for old, new in TRANSITIONS if old is here and new not in reached):
                reached.add(new)
                fringe.append(new)
        assert State.GONE in reached


def test_requests_come_only_after_loading_and_warming() -> None:
    assert {old for old, new in TRANSITIONS if new is State.READY} == {State.WARMING, State.DRAINING}
    assert {old for old, new in TRANSITIONS if new is State.DRAINING} == {State.READY}


def test_the_picture_shows_all_of_it() -> None:
    lines = list(picture())
    for (old, new), why in TRANSITIONS.items():
        assert f"    {old.name} --> {new.name}: {why}" in lines
    for state, meaning in MEANING.items():
        assert f"| {state.name} | {meaning} |" in lines
    assert lines.count("```") == 1
    assert set(MEANING) == set(State)
