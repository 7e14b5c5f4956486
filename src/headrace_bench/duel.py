"""Two servers, run in turn by pairs: the engine of every comparison.

    floor   A A   A A   A A …      what two runs of one server differ by: nothing below it is claimed
    pairs   A B   B A   B A …      one schedule in a pair, a new one in the next
            ─────────────────────► time; while one is asked, the other has to be idle

Rules: a pair whose client or machine was not in order on either side is dropped for both sides and replaced once, and
only the machine's signals decide that, never a figure; what was measured is in the hands of the caller after each run;
a server that no longer answers ends the duel, which carries the pairs it has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from headrace_bench.client.run import Run
from headrace_bench.client.run import run as run_load
from headrace_bench.client.target import Target
from headrace_bench.client.target import check as check_target
from headrace_bench.fault import Fault, Misuse
from headrace_bench.figures.paired import MIN_PAIRS
from headrace_bench.figures.slo import Slo
from headrace_bench.figures.trial import ANSWERED, FIGURES, Both, Figure, Kind, Place, Trial, reduce
from headrace_bench.listener import settle
from headrace_bench.load.schedule import Schedule
from headrace_bench.pairing import Turn, plan, salted

IDLE_CPU = 0.05
"""Cores that the server which is not asked may use on average."""
INTERRUPTED = 130
Scheduler = Callable[[int], Schedule]
"""A seed → what is asked."""
DRAIN_S = 30.0
Around = Callable[[Schedule], AbstractContextManager[object]]
"""Entered before a run and left after it: to empty a cache, to kill a worker while it runs."""


@dataclass(frozen=True, slots=True)
class Side:
    """A server under comparison."""

    name: str
    target: Target
    cpu: Callable[[], float | None] | None = None
    """CPU seconds of its processes so far, to see that it is idle when it should be; None: cannot be read here."""
    around: Around | None = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """A pair that does not count."""

    kind: Kind
    pair: int
    reasons: tuple[str, ...]


@dataclass(slots=True)
class Duel:
    """What was measured so far; whole when `duel` returns it."""

    a: Side
    b: Side
    seed: int
    figures: tuple[Figure, ...]
    slo: Slo
    floor: list[Both] = field(default_factory=list)
    pairs: list[Both] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Cut(Fault):
    """The duel ended before its time; `duel` has what was measured."""

    def __init__(self, message: str, duel: Duel, status: int = 1) -> None:
        super().__init__(message, status)
        self.duel = duel


class Runner(Protocol):
    """`client.run.run`, or what stands in for it."""

    def __call__(self, target: Target, schedule: Schedule, *, drain_s: float) -> Run: ...


def ask(target: Target) -> None:
    """Fault: the server does not answer as it should."""
    asyncio.run(check_target(target))


def duel(
    a: Side,
    b: Side,
    scheduler: Scheduler,
    *,
    pairs: int = 12,
    floor_pairs: int | None = None,
    floor: Iterable[Both] | None = None,
    seed: int = 1,
    slo: Slo = ANSWERED,
    figures: Sequence[Figure] = FIGURES,
    drain_s: float = DRAIN_S,
    run: Runner = run_load,
    check: Callable[[Target], object] = ask,
    calm: Callable[[], object] | None = None,
    on_run: Callable[[Trial, Run], None] | None = None,
) -> Duel:
    """A against A for the noise floor, then A against B. Cut: a server went away, or never answered well; the user
    interrupted it, wherever; something is in the way of a later pair, as a seed that draws no request.

    `floor_pairs`: half of `pairs` and at least 6 unless given, 0 for none; `floor`: pairs of an earlier duel of
    the same A under the same load, used instead of measuring it again. `on_run` is told of every run, those of
    dropped pairs included. `calm` returns once both servers are idle: by their CPU, where it can be seen.
    """
    made = Duel(a, b, seed, tuple(figures), slo)
    if a.cpu is None or b.cpu is None:
        made.notes.append("whether the idle server was idle could not be checked: its processes are not seen from here")
    bout = _Bout(made, scheduler, drain_s, run, check, calm or (lambda: settle([a.cpu, b.cpu])), on_run)
    rng = np.random.default_rng(seed)
    try:
        if floor is not None:
            made.floor.extend(floor)
        else:
            bout.rounds("floor", (a, a), max(MIN_PAIRS, -(-pairs // 2)) if floor_pairs is None else floor_pairs, rng)
        bout.rounds("pair", (a, b), pairs, rng)
    except KeyboardInterrupt:  # outside a load: while settling, or keeping a run
        raise Cut("interrupted between two runs; what was measured is kept", made, INTERRUPTED) from None
    except Misuse as misuse:
        if not bout.measured:
            raise
        raise Cut(f"it ended before its time; what was measured is kept: {misuse}", made) from misuse
    return made


class _Bout:
    """The runs of one duel."""

    def __init__(
        self,
        made: Duel,
        scheduler: Scheduler,
        drain_s: float,
        run: Runner,
        check: Callable[[Target], object],
        calm: Callable[[], object],
        on_run: Callable[[Trial, Run], None] | None,
    ) -> None:
        self._made = made
        self._scheduler = scheduler
        self._drain_s = drain_s
        self._run = run
        self._check = check
        self._calm = calm
        self._on_run = on_run
        self._answered: set[str] = set()
        self.measured = 0
        """Runs so far."""

    def rounds(self, kind: Kind, sides: tuple[Side, Side], wanted: int, rng: np.random.Generator) -> None:
        """All pairs of a kind, and once as many fresh ones as were dropped."""
        counted = self._made.floor if kind == "floor" else self._made.pairs
        turns = plan(wanted, rng)
        for turn in turns:
            self._pair(kind, sides, turn, rng, counted)
        for turn in plan(wanted - len(counted), rng, first=wanted):
            self._pair(kind, sides, turn, rng, counted)

    def _pair(
        self, kind: Kind, sides: tuple[Side, Side], turn: Turn, rng: np.random.Generator, counted: list[Both]
    ) -> None:
        schedule = self._scheduler(turn.seed)
        one_server = sides[0].target.url == sides[1].target.url and sides[0].target.model == sides[1].target.model
        trials: dict[str, Trial] = {}
        for n, which in enumerate(turn.order):
            side = sides[which == "b"]
            asked = salted(schedule, int(rng.integers(1_000_000))) if one_server else schedule
            trials[which] = self._once(side, asked, Place(kind, turn.pair, n, which))
        reasons = tuple(dict.fromkeys(line for trial in trials.values() for line in trial.invalid))
        if reasons:
            self._made.dropped.append(Dropped(kind, turn.pair, reasons))
        else:
            counted.append((trials["a"], trials["b"]))

    def _once(self, side: Side, schedule: Schedule, place: Place) -> Trial:
        other = self._made.b if side is self._made.a else self._made.a
        self._calm()  # what was given up at the end of the last run may still be worked on
        with nullcontext() if side.around is None else side.around(schedule):
            before, began = _cpu(other), time.perf_counter()
            ran = self._run(side.target, schedule, drain_s=self._drain_s)
            after, ended = _cpu(other), time.perf_counter()
        self.measured += 1
        trial = reduce(side.name, place, ran.schedule, ran.records, ran.health, self._made.slo, self._made.figures)
        if before is not None and after is not None and other.target.url != side.target.url:
            trial = _disturbed(trial, other, (after - before) / (ended - began))
        if self._on_run is not None:
            self._on_run(trial, ran)
        if ran.interrupted:
            raise Cut(f"interrupted in {_where(place)}; what was measured is kept", self._made, INTERRUPTED)
        self._alive(side, trial, ran)
        return trial

    def _alive(self, side: Side, trial: Trial, ran: Run) -> None:
        """Cut: it no longer answers, or has never answered well."""
        if trial.outcomes.get("ok", 0) > 0:
            self._answered.add(side.name)
        where = _where(trial.place)
        if "connect" in trial.outcomes or not trial.outcomes.get("ok", 0):
            try:
                self._check(side.target)
            except Fault as fault:
                raise Cut(f"{side.name} went away in {where}: {fault}", self._made) from fault
        if side.name not in self._answered:
            ends = ", ".join(f"{count} {name}" for name, count in sorted(trial.outcomes.items())) or "nothing was sent"
            words = next((f": {record.error}" for record in ran.records if record.error), "")
            raise Cut(f"{side.name} brought no request to a good end in {where} ({ends}){words}", self._made)


def _disturbed(trial: Trial, other: Side, cores: float) -> Trial:
    """Invalid too, if the other server was at work meanwhile."""
    if cores <= IDLE_CPU:
        return trial
    return replace(trial, invalid=(*trial.invalid, f"{other.name} was to be idle and used {cores:.2f} cores"))


def _where(place: Place) -> str:
    return f"{'floor ' if place.kind == 'floor' else ''}pair {place.pair + 1}"


def _cpu(side: Side) -> float | None:
    return None if side.cpu is None else side.cpu()
