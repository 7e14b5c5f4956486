"""The highest load that a server carries within an SLO: asks the search for points, measures them, tells it what came.

    search ── load, seconds, seed ──► schedule ──► run ──► good of scheduled, backlog ──► search ── … ──► sentence
                                                    └ stops when the rest, all good, could not save the point

Rules: a point that is stopped counts all that had not ended as good, so it is refused on what was seen; a server gets
time to become idle between two points, as it may still work on what was given up; a server that no longer answers ends
the search, which keeps its points.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from headrace_bench.client.health import Machine, Sample, judge
from headrace_bench.client.run import Run
from headrace_bench.client.run import run as run_load
from headrace_bench.client.target import Target
from headrace_bench.duel import INTERRUPTED
from headrace_bench.duel import ask as ask_target
from headrace_bench.fault import Fault, Misuse
from headrace_bench.figures import search
from headrace_bench.figures.backlog import Backlog, backlog
from headrace_bench.figures.definitions import figures
from headrace_bench.figures.point import Point
from headrace_bench.figures.search import Ask, End, Goal, Outcome
from headrace_bench.figures.slo import Slo
from headrace_bench.figures.trial import sample
from headrace_bench.load.schedule import Schedule
from headrace_bench.record import Health, Record

DRAIN_S = 10.0
Scheduler = Callable[[float, float, int], Schedule]
"""Load, seconds, seed → what is asked."""


class Runner(Protocol):
    """`client.run.run`, or what stands in for it."""

    def __call__(
        self, target: Target, schedule: Schedule, *, drain_s: float, on_record: Callable[[Record], None]
    ) -> Run: ...


class Enough(Exception):
    """Raised in a load to end it."""


class Cut(Fault):
    """The search ended before its time; `found` has its points."""

    def __init__(self, message: str, found: Found, status: int = 1) -> None:
        super().__init__(message, status)
        self.found = found


@dataclass(slots=True)
class Found:
    """What was measured so far; whole when `capacity` returns it."""

    goal: Goal
    slo: Slo
    closed: bool = False
    """A closed loop: its load is users at once, and no rate is a server's capacity by it."""
    points: list[Point] = field(default_factory=list)
    end: End | None = None


def capacity(
    target: Target,
    scheduler: Scheduler,
    goal: Goal,
    slo: Slo,
    *,
    seed: int = 1,
    drain_s: float = DRAIN_S,
    run: Runner = run_load,
    check: Callable[[Target], object] = ask_target,
    settle: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    on_point: Callable[[Point], None] | None = None,
) -> Found:
    """Points until the search ends. Cut: the server went away, never answered, or the user interrupted it; or a load
    cannot be drawn, as a short trace has no more to give. If that is the first one, it is what was asked for: Misuse.

    `settle` returns once the server is idle, or may be taken for it. Wall time stays below `goal.limit`, if a point's
    warm-up, drain and settling are within `goal.overhead`.
    """
    found = Found(goal, slo, goal.whole)
    state = search.start(goal)
    while not isinstance(following := search.ask(state), End):
        try:
            began = clock()
            settle()
            schedule = scheduler(following.load, following.seconds, seed + following.draw)
            before = (state.good, state.scheduled)
            seen = _measured(target, schedule, slo, goal, before, run, drain_s)
            if seen.interrupted:
                raise KeyboardInterrupt
            point, outcome = _point(following, seen, slo, goal, before, clock() - began)
            found.points.append(point)
            if on_point is not None:
                on_point(point)
            _alive(target, seen, found, check)
        except KeyboardInterrupt:  # wherever it comes: while settling and keeping too
            raise Cut(f"interrupted at {following.load:g}; what was measured is kept", found, INTERRUPTED) from None
        except Misuse as misuse:
            if not found.points:
                raise
            raise Cut(f"it ended at {following.load:g}; what was measured is kept: {misuse}", found) from misuse
        state = search.told(state, outcome)
    found.end = following
    return found


@dataclass(frozen=True, slots=True)
class _Seen:
    schedule: Schedule
    records: tuple[Record, ...]
    health: Health
    stopped: bool
    interrupted: bool = False


def _measured(
    target: Target, schedule: Schedule, slo: Slo, goal: Goal, before: tuple[int, int], run: Runner, drain_s: float
) -> _Seen:
    watch = _Watch(schedule, slo, goal, before)
    cpu = time.process_time()
    try:
        ran = run(target, schedule, drain_s=drain_s, on_record=watch)
        return _Seen(schedule, ran.records, ran.health, stopped=False, interrupted=ran.interrupted)
    except Enough:
        # The run is gone with its own watch over the machine: how late it sent, and what it used, has to do.
        records = tuple(sorted(watch.records, key=lambda record: record.index))
        until = max(record.closed or record.dispatched for record in records)
        looks = (Sample(0.0, None, 0.0), Sample(max(until, 0.001), None, time.process_time() - cpu))
        machine = Machine(looks, (), os.getloadavg()[0], None)
        return _Seen(schedule, records, judge(schedule, records, machine, until), stopped=True)


class _Watch:
    """Counts bad ones while they come; ends the load of a point that cannot be met any more."""

    def __init__(self, schedule: Schedule, slo: Slo, goal: Goal, before: tuple[int, int]) -> None:
        self._slo = slo
        self._goal = goal
        self._before = before
        self._bad = 0
        timed = [one for one in schedule.requests if one.phase == "measure" and one.at is not None]
        # With later turns or users nobody knows beforehand how many there will be, so nothing is certain early.
        whole = schedule.users is None and all(one.at is not None for one in schedule.requests)
        self._scheduled = len(timed) if whole else None
        self.records: list[Record] = []

    def __call__(self, record: Record) -> None:
        self.records.append(record)
        if self._scheduled is None or record.phase != "measure" or record.outcome == "unfinished":
            return
        self._bad += not self._slo.met(figures(record))
        if search.hopeless(self._goal, self._bad, self._scheduled, self._before):
            raise Enough


def _point(
    asked: Ask, seen: _Seen, slo: Slo, goal: Goal, before: tuple[int, int], took: float
) -> tuple[Point, Outcome]:
    counted = sample(seen.schedule, seen.records, slo)
    scheduled, good = counted.scheduled, counted.met
    if seen.stopped:  # what had not ended, or not begun, might have been good
        ended = sum(record.phase == "measure" and record.outcome != "unfinished" for record in seen.records)
        scheduled = sum(one.phase == "measure" for one in seen.schedule.requests)
        good += scheduled - ended
    trend: Backlog | None = None if seen.stopped else backlog(seen.schedule, seen.records)
    growing = trend is not None and trend.growing
    outcome = Outcome(good, scheduled, growing, bool(seen.health.invalid), took)
    pooled = (good + before[0], scheduled + before[1])
    low, high = search.bounds(*pooled, goal.z())
    return Point(
        load=asked.load,
        purpose=asked.purpose,
        seed=seen.schedule.seed,
        seconds=asked.seconds,
        took=took,
        verdict="invalid" if outcome.invalid else search.judge(goal, *pooled, growing),
        good=pooled[0],
        scheduled=pooled[1],
        low=low,
        high=high,
        goodput=None if seen.stopped else counted.met / seen.schedule.duration,
        backlog_per_s=None if trend is None else trend.slope,
        growing=growing,
        stopped=seen.stopped,
        invalid=seen.health.invalid,
    ), outcome


def _alive(target: Target, seen: _Seen, found: Found, check: Callable[[Target], object]) -> None:
    ends = [record.outcome for record in seen.records]
    point = found.points[-1]
    if "connect" in ends or "ok" not in ends:
        try:
            check(target)
        except Fault as fault:
            raise Cut(f"the server went away at {point.load:g}: {fault}", found) from fault
    if len(found.points) == 1 and "ok" not in ends:
        words = next((record.error for record in seen.records if record.error), "no reason was given")
        kinds = ", ".join(f"{ends.count(kind)} {kind}" for kind in sorted(set(ends))) or "nothing was sent"
        raise Cut(f"the first point brought no request to a good end ({kinds}): {words}", found)
