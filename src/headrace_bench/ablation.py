"""What a switch is worth: the same server with it and without it, again and again, each time started afresh.

    round 1  [start · load · stop] on   [start · load · stop] off     one schedule …
    round 2  [start · load · stop] off  [start · load · stop] on      … for two rounds, then a new one
                                   └───── log(on / off) a round ─────┘  pairs
             on of round 1 against on of round 2, off against off ────  the A/A floor

Rules: a process computes at its own speed from start to start, so a pair is two new processes and not two runs of the
same two; the order within a round is drawn; a round in which the client or the machine was not in order on either side
is dropped, and only their signals decide that; one round before the first warms up (calibrations, the page cache) and
is not counted; p99s are of all runs of a side together, never averaged.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace_bench.client.run import Run
from headrace_bench.exhibits import Exhibit, Primary
from headrace_bench.figures import stats
from headrace_bench.figures.definitions import RequestFigures, figures
from headrace_bench.figures.paired import MIN_PAIRS, Comparison, Pair, Scale, compare, floor
from headrace_bench.figures.schema import Spread, Value
from headrace_bench.figures.slo import Slo
from headrace_bench.figures.summary import pooled_spread, spread
from headrace_bench.load.schedule import Schedule
from headrace_bench.record import Record
from headrace_bench.server import Server

MS = 1000.0
WORTH = {"better": "helps", "worse": "hurts"}


@dataclass(frozen=True, slots=True)
class Leg:
    """One side of a round."""

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
class Round:
    """A pair."""

    seed: int
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
    rounds: int
    dropped: tuple[str, ...]
    """Reasons of dropped rounds, a line a round."""
    middle_on: float | None
    """Median over rounds of the deciding figure."""
    middle_off: float | None
    comparison: Comparison
    """On against off."""
    on: Side
    off: Side
    took_s: float

    @property
    def verdict(self) -> str:
        """helps, hurts, no difference, too few."""
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
    rounds: int,
    until: float,
    seed: int = 1,
    clock: Callable[[], float] = time.monotonic,
    schedule: Callable[[int], Schedule] | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> Finding:
    """Rounds until there are `rounds` that count or `clock` says `until`, but as many as a verdict needs in any case.

    `schedule`: another load than the exhibit's. Raises Fault: a server did not start or could not be asked.
    """
    began = clock()
    rng = random.Random(f"{exhibit.switch} {seed}")
    made = schedule or exhibit.schedule
    counted: list[Round] = []
    dropped: list[str] = []
    _round(exhibit, start, load, made(seed * 1000), rng, slo)  # warms up
    most_dropped = rounds
    while len(counted) < rounds and len(dropped) < most_dropped:
        if clock() >= until and len(counted) >= MIN_PAIRS:
            break
        one = _round(exhibit, start, load, made(seed * 1000 + 1 + len(counted) // 2), rng, slo)
        if on_round is not None:
            on_round(one)
        if one.invalid:
            dropped.append("; ".join(one.invalid))
        else:
            counted.append(one)
    return conclude(exhibit, counted, dropped, slo, clock() - began, seed)


def _round(exhibit: Exhibit, start: Start, load: Load, schedule: Schedule, rng: random.Random, slo: Slo) -> Round:
    legs: dict[bool, Leg] = {}
    for on in rng.sample((True, False), 2):
        with start(on) as server, killing(server, exhibit.kill_after_s):
            ran = load(server, schedule, exhibit.drain_s)
        legs[on] = reduce(exhibit.primary, ran, slo)
    return Round(schedule.seed, legs[True], legs[False])


@contextlib.contextmanager
def killing(server: Server, after_s: float | None) -> Iterator[None]:
    """Kills the server's engine process `after_s` seconds from now, once; nothing for None. ValueError: it has none."""
    if after_s is None:
        yield
        return
    timer = threading.Timer(after_s, _kill, (server.biggest_child(),))
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
    due = [planned for planned in ran.schedule.requests if planned.phase == "measure"]
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
    exhibit: Exhibit, counted: Sequence[Round], dropped: Sequence[str], slo: Slo, took_s: float, seed: int
) -> Finding:
    """The row of a switch."""
    scale: Scale = "difference" if exhibit.primary.figure == "in_time" else "ratio"
    pairs = [Pair(one.off.value, one.on.value) for one in counted]
    level = floor(repeats(counted), seed, count=len(pairs), scale=scale)
    return Finding(
        exhibit=exhibit,
        slo=slo.name,
        rounds=len(counted),
        dropped=tuple(dropped),
        middle_on=_middle([one.on.value for one in counted]),
        middle_off=_middle([one.off.value for one in counted]),
        comparison=compare(pairs, level, exhibit.primary.more_is_better, seed, scale=scale),
        on=side([one.on for one in counted]),
        off=side([one.off for one in counted]),
        took_s=took_s,
    )


def repeats(counted: Sequence[Round]) -> list[Pair]:
    """A/A: rounds of one schedule, on against on and off against off, each of two processes."""
    by_seed: dict[int, list[Round]] = {}
    for one in counted:
        by_seed.setdefault(one.seed, []).append(one)
    return [
        Pair(getattr(first, which).value, getattr(second, which).value)
        for first, second in (found[:2] for found in by_seed.values() if len(found) > 1)
        for which in ("on", "off")
    ]


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
