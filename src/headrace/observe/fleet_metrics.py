"""What `GET /metrics` shows of engines behind aliases: their states, and what became of the attempts they were given.

Rule: the label `engine` is the name of a declared engine, so that there are never more values than declarations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric


@dataclass(frozen=True, slots=True)
class Standing:
    """One declared engine."""

    engine: str
    state: str
    states: tuple[str, ...]
    """All that there are."""
    in_flight: int
    breaker_open: bool
    ends: Mapping[str, int]
    """How its attempts ended → how many."""


class Standings(Protocol):
    """Whoever keeps the engines."""

    @property
    def aliases(self) -> Collection[str]: ...

    @property
    def counts(self) -> Mapping[str, int]:
        """`failovers` and `continued`."""
        ...

    def standings(self) -> Iterable[Standing]: ...


class Mirrors(Protocol):
    """Whoever copies requests."""

    @property
    def counts(self) -> Mapping[tuple[str, str], int]:
        """(alias, outcome) → copies since the start."""
        ...


def mirror_family(mirror: Mirrors | None) -> Metric:
    """`mirror` None: the family without values."""
    family = CounterMetricFamily(
        "headrace_mirrored",
        "Copies of requests for a candidate; outcome is one of ok, error, cancelled, dropped, unpaired.",
        labels=("model", "outcome"),
    )
    for labels, count in sorted((mirror.counts if mirror is not None else {}).items()):
        family.add_metric(labels, count)
    return family


def fleet_families(fleet: Standings | None) -> Iterator[Metric]:
    """`fleet` None: the families without values."""
    engines = () if fleet is None else tuple(fleet.standings())
    state = GaugeMetricFamily(
        "headrace_engine_state", "1 for the state that the engine is in.", labels=("engine", "state")
    )
    in_flight = GaugeMetricFamily(
        "headrace_engine_in_flight", "Attempts at requests that the engine has now.", labels=("engine",)
    )
    broken = GaugeMetricFamily(
        "headrace_breaker_open", "1 while the engine gets nothing but trials after failures.", labels=("engine",)
    )
    attempts = CounterMetricFamily(
        "headrace_attempts",
        "Attempts at requests that are over; end is one of ok, cancelled, refused, failed, slow.",
        labels=("engine", "end"),
    )
    for one in engines:
        for name in one.states:
            state.add_metric((one.engine, name), float(name == one.state))
        in_flight.add_metric((one.engine,), one.in_flight)
        broken.add_metric((one.engine,), float(one.breaker_open))
        for end, count in one.ends.items():
            attempts.add_metric((one.engine, end), count)
    failovers = CounterMetricFamily(
        "headrace_failovers", "Requests given to another engine before their first text was written."
    )
    continued = CounterMetricFamily("headrace_continued", "Answers that one engine began and another one went on with.")
    if fleet is not None:
        failovers.add_metric((), fleet.counts.get("failovers", 0))
        continued.add_metric((), fleet.counts.get("continued", 0))
    yield from (state, in_flight, broken, attempts, failovers, continued)
