"""What a switch is worth: the same server with it and without it, in turn.

    round 1   start both    [on off] [off on]    stop both        two pairs of one schedule, each with text of its own
    round 2   start both    [off on] [on off]    stop both        the next schedule
                               └───── log(on / off) of a pair ─────┘
                             on against on, off against off, of the two pairs of a schedule ── the A/A floor

Rules: the sides of a pair follow each other within seconds, because a shared machine is fast for a minute and slow for
the next; the order of the first pair of a round is drawn and turns with each one after it; servers are new in each
round, so that a process that is slow for as long as it runs is one of many; a leg begins when both servers are idle; a
pair in which the client or the machine was not in order on either side, or the server that was not asked did not rest,
is dropped, and only their signals decide that; without a floor nothing is claimed, and a gain that costs the SLO is
called mixed; one pair before the first warms up and is not counted; p99s are of all legs of a side together.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace_bench.client.run import Run
from headrace_bench.exhibits import Exhibit, Primary
from headrace_bench.fault import Fault
from headrace_bench.figures import stats
from headrace_bench.figures.definitions import RequestFigures, figures
from headrace_bench.figures.paired import MIN_PAIRS, Comparison, Pair, Scale, compare, floor
from headrace_bench.figures.schema import Spread, Value
from headrace_bench.figures.slo import Slo
from headrace_bench.figures.summary import pooled_spread, spread
from headrace_bench.load.schedule import Schedule
from headrace_bench.pairing import salted
from headrace_bench.record import Record
from headrace_bench.server import Server

MS = 1000.0
WORTH = {"better": "helps", "worse": "hurts"}
RESTS = 0.05
"""Cores that the server which is not asked may use."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One side of a pair."""

    value: float | None
    """The deciding figure: seconds, or a share."""
    seen: tuple[RequestFigures, ...]
    """Of the requests with the deciding figure's tag."""
    good: int
    """Of all that were scheduled, those within the SLO."""
    scheduled: int
    failed: int
    invalid: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """A pair."""

    seed: int
    """Of its schedule, which two pairs have."""
    on: Leg
    off: Leg

    @property
    def invalid(self) -> tuple[str, ...]:
        """Why it does not count; empty: it does."""
        return tuple(dict.fromkeys((*self.on.invalid, *self.off.invalid)))


@dataclass(frozen=True, slots=True)
class Side:
    """All counted runs with a switch on, or off. Latencies in ms, of the deciding figure's requests."""

    ttft_ms: Spread
    gap_ms: Spread
    tpot_ms: Spread
    stalled: Value | None
    """Share of those requests with a stall."""
    goodput: Value | None
    """Share of all scheduled requests within the SLO."""
    failed: int
    scheduled: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A row of the table."""

    exhibit: Exhibit
    slo: str
    pairs: int
    dropped: tuple[str, ...]
    """Reasons of dropped pairs, a line a pair."""
    middle_on: float | None
    """Median over pairs of the deciding figure."""
    middle_off: float | None
    comparison: Comparison
    """On against off."""
    guard: Comparison
    """The same of the share of all scheduled requests within the SLO."""
    on: Side
    off: Side
    took_s: float

    @property
    def verdict(self) -> str:
        """helps, hurts, no difference, too few; mixed where it helps and fewer are within the SLO."""
        if self.comparison.verdict in WORTH and self.comparison.floor is None:
            return "too few"
        if self.comparison.verdict == "better" and self.guard.verdict == "worse":
            return "mixed"
        return WORTH.get(self.comparison.verdict, self.comparison.verdict)


Start = Callable[[bool], Server]
"""A server that is not started yet, with the switch on or off."""
Load = Callable[[Server, Schedule, float], Run]
"""server, schedule, drain in s → what happened. Faults for a server that cannot be asked."""


def ablate(
    exhibit: Exhibit,
    start: Start,
    load: Load,
    *,
    slo: Slo,
    pairs: int,
    until: float,
    seed: int = 1,
    clock: Callable[[], float] = time.monotonic,
    calm: Callable[[Sequence[Server]], object] = lambda servers: None,
    schedule: Callable[[int], Schedule] | None = None,
    on_turn: Callable[[Turn], None] | None = None,
) -> Finding:
    """Rounds until there are `pairs` that count or `clock` says `until`, but as many as a verdict needs in any case.

    `schedule`: another load than the exhibit's. `calm` returns once the servers are idle. Raises Fault: a server did
    not start or could not be asked.
    """
    began = clock()
    bout = _Bout(exhibit, start, load, slo, random.Random(f"{exhibit.switch} {seed}"), calm, schedule, seed * 1000)
    counted: list[Turn] = []
    dropped: list[str] = []
    while len(counted) < pairs and len(dropped) < pairs:
        if clock() >= until and len(counted) >= MIN_PAIRS:
            break
        for one in bout.round():
            if on_turn is not None:
                on_turn(one)
            if one.invalid:
                dropped.append("; ".join(one.invalid))
            else:
                counted.append(one)
    return conclude(exhibit, counted, dropped, slo, clock() - began, seed)


class _Bout:
    """The rounds of one switch."""

    def __init__(
        self,
        exhibit: Exhibit,
        start: Start,
        load: Load,
        slo: Slo,
        rng: random.Random,
        calm: Callable[[Sequence[Server]], object],
        schedule: Callable[[int], Schedule] | None,
        seed: int,
    ) -> None:
        self._exhibit = exhibit
        self._start = start
        self._load = load
        self._slo = slo
        self._rng = rng
        self._calm = calm
        self._schedule = schedule or exhibit.schedule
        self._seed = seed
        self._turns = 0

    def round(self) -> Iterator[Turn]:
        """Two new servers, and as many pairs as the exhibit has in a round; a warm-up before the first of all."""
        order = self._rng.sample((True, False), 2)
        with self._start(True) as on, self._start(False) as off:
            servers = {True: on, False: off}
            if not self._turns:
                self._turn(servers, order, self._seed)
            for _ in range(self._exhibit.turns):
                self._turns += 1
                yield self._turn(servers, order, self._seed + (self._turns + 1) // 2)
                order.reverse()

    def _turn(self, servers: Mapping[bool, Server], order: Sequence[bool], seed: int) -> Turn:
        # The second pair of a schedule must not find its prompts in a cache.
        schedule = salted(self._schedule(seed), self._rng.randrange(10**6))
        legs: dict[bool, Leg] = {}
        for which in order:
            self._calm(list(servers.values()))  # what one side does when it is done is not the other's load
            with killing(servers[which], self._exhibit.kill_after_s), resting(servers[not which]) as noise:
                ran = self._load(servers[which], schedule, self._exhibit.drain_s)
            leg = reduce(self._exhibit.primary, ran, self._slo)
            legs[which] = replace(leg, invalid=(*leg.invalid, *noise))
        return Turn(seed, legs[True], legs[False])


@contextlib.contextmanager
def resting(server: Server, clock: Callable[[], float] = time.monotonic) -> Iterator[list[str]]:
    """Gives a list which says afterwards what is wrong with a server that was not to do anything meanwhile."""
    noise: list[str] = []
    before, began = server.cpu(), clock()
    yield noise
    cores = (server.cpu() - before) / max(clock() - began, 1e-3)
    if cores > RESTS:
        noise.append(f"{server.name} was to be idle and used {cores:.2f} cores")


@contextlib.contextmanager
def killing(server: Server, after_s: float | None) -> Iterator[None]:
    """Kills the server's engine process `after_s` seconds from now, once; not for None. Raises Fault: it has none."""
    if after_s is None:
        yield
        return
    try:
        engine = server.biggest_child()
    except (ValueError, OSError):
        raise Fault(f"{server.name} has no process of an engine that could be killed") from None
    timer = threading.Timer(after_s, _kill, (engine,))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def reduce(primary: Primary, ran: Run, slo: Slo) -> Leg:
    """What is kept of a run."""
    measured = [record for record in ran.records if record.phase == "measure"]
    begun = {record.index for record in measured}
    due = [
        planned
        for planned in ran.schedule.requests
        if planned.phase == "measure" and (planned.at is not None or ran.schedule.finite or planned.index in begun)
    ]
    found = [figures(record) for record in measured]
    mine = [
        (record, one)
        for record, one in zip(measured, found, strict=True)
        if not primary.tag or record.tag == primary.tag
    ]
    wanted = sum(not primary.tag or planned.tag == primary.tag for planned in due)
    deadlines = {planned.index: deadline(planned.extra) for planned in due}
    return Leg(
        value=decide(primary, mine, wanted, deadlines),
        seen=tuple(one for _, one in mine),
        good=sum(map(slo.met, found)),
        scheduled=len(due),
        failed=len(due) - sum(one.whole for one in found),
        invalid=ran.health.invalid,
    )


def deadline(extra: Mapping[str, object]) -> float | None:
    """Seconds within which a request wants its first token; None: it does not say."""
    own = extra.get("headrace")
    ms = own.get("ttft_deadline_ms") if isinstance(own, dict) else None
    return float(ms) / MS if isinstance(ms, int | float) else None


def decide(
    primary: Primary,
    seen: Sequence[tuple[Record, RequestFigures]],
    scheduled: int,
    deadlines: Mapping[int, float | None],
) -> float | None:
    """The deciding figure of one run; None where nothing shows it."""
    if primary.figure == "in_time":
        kept = [_in_time(one, deadlines.get(record.index)) for record, one in seen]
        return sum(kept) / scheduled if scheduled else None
    whole = [one for _, one in seen if one.whole]
    values = [value for one in whole for value in _values(primary, one)]
    if not values:
        return None
    if primary.statistic == "mean":
        return sum(values) / len(values)
    return max(values) if primary.statistic == "max" else stats.percentile(values, int(primary.statistic[1:]))


def _values(primary: Primary, one: RequestFigures) -> Sequence[float]:
    if primary.figure == "gap":
        return one.gaps
    value = one.ttft if primary.figure == "ttft" else one.tpot
    return () if value is None else (value,)


def _in_time(one: RequestFigures, deadline: float | None) -> bool:
    if not one.whole or one.ttft_service is None:
        return False
    return deadline is None or one.ttft_service <= deadline


def conclude(
    exhibit: Exhibit, counted: Sequence[Turn], dropped: Sequence[str], slo: Slo, took_s: float, seed: int
) -> Finding:
    """The row of a switch."""
    scale: Scale = "difference" if exhibit.primary.figure == "in_time" else "ratio"
    pairs = [Pair(one.off.value, one.on.value) for one in counted]
    level = floor(repeats(counted), seed, count=len(pairs), scale=scale)
    return Finding(
        exhibit=exhibit,
        slo=slo.name,
        pairs=len(counted),
        dropped=tuple(dropped),
        middle_on=_middle([one.on.value for one in counted]),
        middle_off=_middle([one.off.value for one in counted]),
        comparison=compare(pairs, level, exhibit.primary.more_is_better, seed, scale=scale),
        guard=compare([Pair(_kept(one.off), _kept(one.on)) for one in counted], None, True, seed, scale="difference"),
        on=side([one.on for one in counted]),
        off=side([one.off for one in counted]),
        took_s=took_s,
    )


def repeats(counted: Sequence[Turn]) -> list[Pair]:
    """A/A: on against on and off against off, of the two pairs of each schedule."""
    schedules: dict[int, list[Turn]] = {}
    for one in counted:
        schedules.setdefault(one.seed, []).append(one)
    return [
        Pair(getattr(first, which).value, getattr(second, which).value)
        for first, second in (found[:2] for found in schedules.values() if len(found) > 1)
        for which in ("on", "off")
    ]


def _kept(leg: Leg) -> float | None:
    return leg.good / leg.scheduled if leg.scheduled else None


def side(legs: Sequence[Leg]) -> Side:
    """All runs of a side together."""
    whole = [one for leg in legs for one in leg.seen if one.whole]
    scheduled = sum(leg.scheduled for leg in legs)
    return Side(
        ttft_ms=spread([one.ttft for one in whole if one.ttft is not None], MS),
        gap_ms=pooled_spread([one.gaps for one in whole], MS),
        tpot_ms=spread([one.tpot for one in whole if one.tpot is not None], MS),
        stalled=_share(sum(bool(one.stalls) for one in whole), len(whole)),
        goodput=_share(sum(leg.good for leg in legs), scheduled),
        failed=sum(leg.failed for leg in legs),
        scheduled=scheduled,
    )


def _share(part: int, whole: int) -> Value | None:
    found = stats.wilson(part, whole)
    return None if found is None else Value(found.value, found.low, found.high)


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return stats.median(known) if known else None
