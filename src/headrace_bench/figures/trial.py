"""One run of a comparison, reduced to the figures that are compared; the figures have names and a direction.

    records ── definitions ──► those that ended well ──► ttft_p50, gap_p99, stall … of this run
           └── all that were scheduled ──────────────► attainment, goodput, failed

Rules: a figure of a run without a sample is None, and its pair says nothing about it; latencies are of requests that
ended well, and what did not end well stands in `attainment` and `goodput`; percentiles are by nearest rank and need no
least count here, as the interval of a comparison is over pairs of runs: a p99 over all runs is `merged`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace_bench.figures.definitions import RequestFigures, figures, tokens_inside
from headrace_bench.figures.paired import Scale
from headrace_bench.figures.slo import Slo
from headrace_bench.figures.stats import percentile
from headrace_bench.figures.summary import never_sent
from headrace_bench.load.schedule import Schedule
from headrace_bench.record import Health, Record

Kind = Literal["floor", "pair"]
Which = Literal["a", "b"]
Unit = Literal["ms", "/s", "%"]
SHOWN: Mapping[Unit, float] = {"ms": 1e3, "/s": 1.0, "%": 100.0}
"""What a value is multiplied by where it is shown."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A run's measured part, as figures read it."""

    window: float
    """Seconds in which requests were due."""
    scheduled: int
    """Requests that were to be answered in it, sent or not."""
    good: tuple[RequestFigures, ...]
    """Those that ended well."""
    met: int
    """Of these, within every limit of the SLO."""
    tokens: int
    """Of these, those that came inside the window: what the drain brings is no rate of it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of one run that two sides are compared by."""

    name: str
    read: Callable[[Sample], float | None]
    more_is_better: bool = False
    guards: bool = False
    """A side metric: where it is worse, no gain elsewhere is claimed."""
    scale: Scale = "ratio"
    """difference: 0 is an ordinary value of it."""
    unit: Unit = "ms"
    """Where it is shown: ms of what are seconds here, % of a share."""


def _at(name: str, p: float, read: Callable[[RequestFigures], float | None]) -> Figure:
    def value(sample: Sample) -> float | None:
        return percentile([x for one in sample.good if (x := read(one)) is not None], p)

    return Figure(name, value)


def _gaps(sample: Sample) -> list[float]:
    return [gap for one in sample.good for gap in one.gaps]


def _tokens(sample: Sample) -> float | None:
    return sample.tokens / sample.window if sample.good else None


def _stalled(sample: Sample) -> float | None:
    """Seconds of stalls in all answers together."""
    return sum(one.stalled or 0.0 for one in sample.good) if sample.good else None


def _goodput(sample: Sample) -> float | None:
    return sample.met / sample.window


def _attainment(sample: Sample) -> float | None:
    return sample.met / sample.scheduled if sample.scheduled else None


DIFFERENCE: Scale = "difference"
ANSWERED = Slo("answered")
"""Where no SLO is given: a whole answer that is not empty is good."""
FIGURES: tuple[Figure, ...] = (
    _at("ttft_p50", 50, lambda one: one.ttft),
    _at("ttft_p90", 90, lambda one: one.ttft),
    _at("ttft_p95", 95, lambda one: one.ttft),
    _at("tpot_p50", 50, lambda one: one.tpot),
    Figure("gap_p99", lambda sample: percentile(_gaps(sample), 99)),
    Figure("gap_longest", lambda sample: max(_gaps(sample), default=None)),
    Figure("stall", _stalled, scale=DIFFERENCE),
    _at("e2e_p50", 50, lambda one: one.e2e),
    Figure("tokens_per_s", _tokens, more_is_better=True, unit="/s"),
    Figure("goodput", _goodput, more_is_better=True, scale=DIFFERENCE, unit="/s"),
    Figure("attainment", _attainment, more_is_better=True, guards=True, scale=DIFFERENCE, unit="%"),
)
"""What `compare` and `ablate` compare. Seconds, per second, shares of 1."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which run of a comparison."""

    kind: Kind
    pair: int
    """From 0, counted apart for floor and pairs."""
    nth: int
    """0: the first run of its pair."""
    which: Which
    """Its part in the pair; both are one server's in the floor."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of one side."""

    side: str
    place: Place
    seed: int
    scheduled: int
    outcomes: Mapping[str, int]
    invalid: tuple[str, ...]
    """By what the machine said, never by what was measured."""
    figures: Mapping[str, float | None]
    ttfts: tuple[float, ...] = field(default=(), repr=False)
    """Seconds, for percentiles over all runs of a side."""
    gaps: tuple[float, ...] = field(default=(), repr=False)


Both = tuple[Trial, Trial]
"""A pair: A's run, B's run; of the floor, two of A's."""


def sample(schedule: Schedule, records: Sequence[Record], slo: Slo) -> Sample:
    """The measured part. What had its time and was never sent counts as scheduled too."""
    measured = [record for record in records if record.phase == "measure"]
    missing = never_sent(schedule, measured).total()
    whole = [(record, one) for record in measured if (one := figures(record)).whole]
    good = tuple(one for _, one in whole)
    start, end = schedule.warmup, schedule.warmup + schedule.duration
    tokens = sum(tokens_inside(record, one, start, end) for record, one in whole)
    return Sample(schedule.duration, len(measured) + missing, good, sum(map(slo.met, good)), tokens)


def reduce(
    side: str,
    place: Place,
    schedule: Schedule,
    records: Sequence[Record],
    health: Health,
    slo: Slo,
    wanted: Sequence[Figure] = FIGURES,
) -> Trial:
    """A run as a trial."""
    seen = sample(schedule, records, slo)
    return Trial(
        side,
        place,
        schedule.seed,
        seen.scheduled,
        dict(Counter(record.outcome for record in records if record.phase == "measure")),
        health.invalid,
        {figure.name: figure.read(seen) for figure in wanted},
        tuple(one.ttft for one in seen.good if one.ttft is not None),
        tuple(_gaps(seen)),
    )
