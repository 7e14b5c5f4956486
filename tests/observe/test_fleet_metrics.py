from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families

from headrace.observe.fleet_metrics import Standing, fleet_families
from headrace.observe.metrics import Metrics


class Fleet:
    """As much of a pool as a scrape looks at."""

    aliases: Collection[str] = ("chat",)
    counts: Mapping[str, int] = {"failovers": 3, "continued": 2}

    def standings(self) -> Iterator[Standing]:
        states = ("ready", "gone")
        yield Standing("a", "ready", states, 4, True, {"ok": 7, "failed": 1})
        yield Standing("b", "gone", states, 0, False, {"ok": 0, "failed": 0})


def test_every_engine_has_all_its_rows_from_the_start() -> None:
    rows = {}
    for family in text_string_to_metric_families(Metrics({}, fleet=Fleet()).render().decode()):
        for sample in family.samples:
            rows[(sample.name, *sorted(sample.labels.items()))] = sample.value
    for engine, state, value in (("a", "ready", 1), ("a", "gone", 0), ("b", "ready", 0), ("b", "gone", 1)):
        assert rows["headrace_engine_state", ("engine", engine), ("state", state)] == value
    assert rows["headrace_engine_in_flight", ("engine", "a")] == 4
    assert rows["headrace_breaker_open", ("engine", "a")] == 1
    assert rows["headrace_breaker_open", ("engine", "b")] == 0
    assert rows["headrace_attempts_total", ("end", "ok"), ("engine", "a")] == 7
    assert rows["headrace_attempts_total", ("end", "failed"), ("engine", "b")] == 0
    assert rows[("headrace_failovers_total",)] == 3
    assert rows[("headrace_continued_total",)] == 2
    assert rows["headrace_refused_total", ("model", "chat"), ("reason", "queue_full")] == 0, "refusals are an alias's"


def test_without_a_fleet_the_families_are_known() -> None:
    assert [family.name for family in fleet_families(None)] == [
        "headrace_engine_state",
        "headrace_engine_in_flight",
        "headrace_breaker_open",
        "headrace_attempts",
        "headrace_failovers",
        "headrace_continued",
    ]
    assert not any(family.samples for family in fleet_families(None))
