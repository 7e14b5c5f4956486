from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import pytest

from headrace_bench.capacity import Cut, Found, capacity
from headrace_bench.client.run import Run
from headrace_bench.client.target import Target
from headrace_bench.fault import Fault, Misuse
from headrace_bench.figures.point import winner
from headrace_bench.figures.search import Goal
from headrace_bench.figures.slo import Slo
from headrace_bench.load.schedule import Schedule
from headrace_bench.record import Outcome, Record
from made_runs import A, health, record, schedule

CHAT = Slo("chat", ttft=1.0)
GOAL = Goal(target=0.95, limit=math.inf, low=2.0)


def asked(load: float, seconds: float, seed: int) -> Schedule:
    return schedule(seed, n=int(load * seconds), duration=seconds)


@dataclass
class Server:
    """Answers in time up to a load."""

    most: float
    invalid: Callable[[int], tuple[str, ...]] = lambda n: ()
    outcome: Callable[[int], Outcome] = lambda n: "ok"
    runs: int = 0
    told: int = 0
    interrupted: bool = False

    def run(self, target: Target, schedule: Schedule, *, drain_s: float, on_record: Callable[[Record], None]) -> Run:
        self.runs += 1
        load = len(schedule.requests) / schedule.duration
        ttft = 0.2 if load <= self.most else 2.0
        records = [record(one.index, one.at or 0.0, ttft, outcome=self.outcome(self.runs)) for one in schedule.requests]
        for one in records:
            self.told += 1
            try:
                on_record(one)
            except Exception:  # as the driver does: what is in flight then is told as well, and the load ends
                now = one.closed or 0.0
                for late in records[one.index + 1 :]:
                    if late.dispatched < now:
                        with contextlib.suppress(Exception):
                            on_record(msgspec.structs.replace(late, outcome="unfinished", chunks=(), closed=now))
                raise
        return Run(schedule, tuple(records), health(*self.invalid(self.runs)), target, "", self.interrupted)


def sought(server: Server, goal: Goal = GOAL, check: Callable[[Target], object] = lambda target: None) -> Found:
    return capacity(A, asked, goal, CHAT, run=server.run, check=check, clock=lambda: 0.0)


def test_it_finds_what_the_server_carries() -> None:
    server = Server(9.0)
    found = sought(server)
    assert found.end is not None
    assert found.end.met is not None
    assert found.end.met <= 9.0 < (found.end.unmet or 0) <= found.end.met * 1.06
    won = winner(found.points, found.end)
    assert won is not None
    assert (won.purpose, won.good, won.growing) == ("confirm", won.scheduled, False)
    assert won.goodput == pytest.approx(won.load, rel=0.02)
    assert len({point.seed for point in found.points if point.purpose == "search"}) == 1
    assert won.seed != found.points[0].seed


def test_a_lost_point_is_stopped_early_and_is_still_not_met() -> None:
    server = Server(1.0)
    found = sought(server, replace(GOAL, low=8.0))
    first = found.points[0]
    assert (first.verdict, first.stopped, first.goodput) == ("not met", True, None)
    assert first.high < 0.95
    assert server.told < sum(point.scheduled for point in found.points) / 2
    assert first.scheduled == 240


def test_an_invalid_point_is_measured_again() -> None:
    server = Server(9.0, invalid=lambda n: ("late",) if n == 1 else ())
    found = sought(server)
    assert [(point.load, point.verdict) for point in found.points[:2]] == [(2.0, "invalid"), (2.0, "met")]
    assert found.points[0].invalid == ("late",)


def test_a_server_that_goes_away_leaves_its_points() -> None:
    def gone(target: Target) -> None:
        raise Fault("nobody listens there")

    server = Server(9.0, outcome=lambda n: "connect" if n > 2 else "ok")
    with pytest.raises(Cut, match=r"^the server went away at 8: nobody listens there$") as caught:
        sought(server, check=gone)
    assert [point.verdict for point in caught.value.found.points] == ["met", "met", "not met"]


def test_a_server_that_never_answers_well_ends_it_at_once() -> None:
    server = Server(9.0, outcome=lambda n: "timeout")
    with pytest.raises(Cut, match=r"the first point brought no request to a good end \(\d+ timeout\): no reason"):
        sought(server)
    assert server.runs == 1


def test_an_interrupt_ends_it() -> None:
    with pytest.raises(Cut, match="interrupted at 2"):
        sought(Server(9.0, interrupted=True))


@pytest.mark.parametrize("where", ["settle", "on_point", "check"])
def test_an_interrupt_outside_a_load_keeps_what_was_measured(where: str) -> None:
    calls = 0

    def third(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    settle: Callable[[], object] = third if where == "settle" else lambda: None
    on_point: Callable[..., None] | None = third if where == "on_point" else None
    server = Server(9.0, outcome=lambda n: "connect" if where == "check" else "ok")  # so that it is checked
    with pytest.raises(Cut, match=r"^interrupted at [28]; what was measured is kept$") as caught:
        capacity(
            A, asked, GOAL, CHAT, run=server.run, clock=lambda: 0.0, check=interrupts, settle=settle, on_point=on_point
        )  # fmt: skip
    assert caught.value.status == 130
    assert len(caught.value.found.points) == {"settle": 2, "on_point": 3, "check": 1}[where]


def interrupts(target: Target) -> None:
    raise KeyboardInterrupt


def test_a_load_that_cannot_be_drawn_ends_it() -> None:
    def short(load: float, seconds: float, seed: int) -> Schedule:
        if load > 4.0:
            raise Misuse("the trace is too short")
        return asked(load, seconds, seed)

    with pytest.raises(Cut, match=r"^it ended at 8; what was measured is kept: the trace is too short$") as caught:
        capacity(A, short, GOAL, CHAT, run=Server(99.0).run, check=lambda target: None, clock=lambda: 0.0)
    assert (caught.value.status, len(caught.value.found.points)) == (1, 2)
    with pytest.raises(Misuse, match="the trace is too short"):
        capacity(A, short, replace(GOAL, low=8.0), CHAT, run=Server(99.0).run, check=lambda target: None)


def test_the_clock_of_the_limit_is_wall_time() -> None:
    ticks = iter(range(0, 100_000, 50))
    server = Server(1e9)
    found = capacity(
        A, asked, replace(GOAL, limit=260.0), CHAT, run=server.run, check=lambda t: None, clock=lambda: next(ticks)
    )
    assert found.end is not None
    assert found.end.why == "limit"
    assert [point.took for point in found.points] == [50.0] * 5
