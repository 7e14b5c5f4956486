from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from gateway.hand_pool import HandBackend
from headrace.gateway.member import CopyLease, Member, MemberLease
from headrace.gateway.router import Condition
from headrace.gateway.spec import EngineSpec
from headrace.gateway.states import State
from headrace.testing import ManualClock


def member(kind: Any = "openai", **more: Any) -> Member:
    spec = EngineSpec("a", kind, "m", "f", **more)
    backend = HandBackend(spec)
    return Member(spec, 0.0, State.READY, backend, said="", restartable=backend)


def break_it(one: Member) -> None:
    for _ in range(3):
        MemberLease(one, ManualClock()).close("failed")


@pytest.mark.parametrize("state", [state for state in State if state is not State.READY])
def test_only_a_ready_one_is_asked(state: State) -> None:
    one = member()
    assert one.condition(0.0) is Condition.WELL
    one.state = state
    assert one.condition(0.0) is None


def test_conditions_and_their_reasons() -> None:
    one = member()
    assert isinstance(one.backend, HandBackend)
    one.health.probed("503")
    assert (one.condition(0.0), one.reason) == (Condition.DOWN, "503")
    one.backend.restarting = True
    assert (one.condition(0.0), one.reason) == (Condition.RESTARTING, "it is being started again")
    one.backend.ready = False
    assert (one.condition(0.0), one.reason) == (None, "it is being started again")


@pytest.mark.parametrize(("kind", "expected"), [("openai", None), ("llama", Condition.FAILING)])
def test_one_that_failed_is_left_alone_unless_it_is_ours(kind: Any, expected: Condition | None) -> None:
    one = member(kind)
    break_it(one)
    assert one.condition(0.0) is expected
    assert one.reason == "its requests failed"
    assert one.condition(1.0) is Condition.WELL, "a trial is due"


def test_a_full_one_is_not_asked() -> None:
    one = member(max_concurrency=1)
    lease = MemberLease(one, ManualClock())
    assert one.full
    assert one.condition(0.0) is None
    lease.close("ok")
    assert one.condition(0.0) is Condition.WELL
    assert not member().full, "there is no limit"


def test_a_full_one_is_fit_all_the_same() -> None:
    one = member(max_concurrency=1)
    MemberLease(one, ManualClock())
    assert (one.condition(0.0), one.fitness(0.0)) == (None, Condition.WELL)


def test_a_copy_s_lease_says_nothing() -> None:
    one = member(max_concurrency=1, ttft_timeout_s=1.5)
    lease = CopyLease(one)
    assert (lease.engine, lease.family, lease.backend, lease.ttft_timeout_s) == ("a", "f", one.backend, None)
    assert (one.leases, one.copies, one.used, one.full, one.takes_copies) == (0, 1, True, False, False)
    lease.first_text(0.5)
    for _ in range(2):
        lease.close("failed")
    assert (one.copies, one.used, one.takes_copies) == (0, False, True)
    assert (one.ends, one.health.in_flight, one.health.ttft(0.0)) == ({}, 0, 0.0)
    break_it(one)
    assert not one.takes_copies
    one.state = State.DRAINING
    assert not one.takes_copies


def test_a_lease_tells_what_became_of_it_once() -> None:
    clock, one = ManualClock(5.0), member(ttft_timeout_s=1.5)
    lease = MemberLease(one, clock)
    assert (lease.engine, lease.family, lease.ttft_timeout_s, lease.backend) == ("a", "f", 1.5, one.backend)
    assert (one.leases, one.health.in_flight) == (1, 1)
    lease.first_text(0.5)
    assert one.health.ttft(5.0) == 0.5
    for _ in range(2):
        lease.close("ok")
    assert (one.leases, one.health.in_flight) == (0, 0)
    assert one.ends == {"ok": 1}
    lease.first_text(9.0)
    assert one.health.ttft(5.0) == 0.5, "too late"


def test_a_continuation_counts_when_it_goes_on() -> None:
    counts = Counter[str]()
    MemberLease(member(), ManualClock(), continued=counts).close("failed")
    assert not counts
    lease = MemberLease(member(), ManualClock(), continued=counts)
    lease.first_text(0.1)
    assert counts == {"continued": 1}


def test_who_cannot_continue_an_answer_is_not_ill() -> None:
    one = member()
    for _ in range(5):
        MemberLease(one, ManualClock(), continued=Counter()).close("failed")
    assert not one.health.open
    assert one.ends == {"failed": 5}
    for _ in range(3):
        lease = MemberLease(one, ManualClock(), continued=Counter())
        lease.first_text(0.1)
        lease.close("failed")
    assert one.health.open, "these went on, and broke off"


def test_a_lease_of_an_engine_that_was_loaded_anew_says_nothing_of_the_new_one() -> None:
    one = member()
    old = MemberLease(one, ManualClock())
    one.health = type(one.health)()
    old.close("failed")
    assert one.health.in_flight == 0
    assert one.leases == 0
