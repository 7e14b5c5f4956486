from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.timeline import STAGES, Timeline
from headrace.engines.base import EngineStats, Lives
from headrace.observe.metrics import Metrics
from headrace.observe.record import Record


class Engine:
    """As much of an engine as a scrape looks at."""

    ready = True
    lives = Lives(3, 2, 1)

    def __init__(self, **stats: Any) -> None:
        self.stats = EngineStats(**stats)


def metrics(**engines: Any) -> Metrics:
    return Metrics(engines)


def record(*, stream: bool = True, outcome: Any = "ok", delivered: float | None = 2.0, gaps: Any = ()) -> Record:
    timeline = Timeline(
        1.0, body=1.001, routed=1.002, tokenized=1.003, scheduled=1.004, restored=1.005, prefilled=1.5, sampled=1.6,
        delivered=delivered,
    )  # fmt: skip
    return Record("id", "POST", "/p", timeline, status=200, outcome=outcome, stream=stream, gaps=list(gaps))


def samples(one: Metrics) -> dict[tuple[str, ...], float]:
    """(name, label values…) → value, by the parser that Prometheus' own client has."""
    out = {}
    for family in text_string_to_metric_families(one.render().decode()):
        for sample in family.samples:
            out[(sample.name, *sample.labels.values())] = sample.value
    return out


def test_requests_are_counted_by_route_and_outcome() -> None:
    one = metrics()
    for outcome in ("ok", "ok", "cancelled"):
        one.request(record(outcome=outcome))
    values = samples(one)
    assert values["headrace_requests_total", "ok", "/p"] == 2
    assert values["headrace_requests_total", "cancelled", "/p"] == 1


def test_delays_of_paced_streams() -> None:
    one, paced = metrics(), record()
    paced.delays = [0.0, 0.03, 0.4]
    one.request(paced)
    one.request(record())
    values = samples(one)
    assert values[("headrace_pace_delay_seconds_count",)] == 3
    assert values["headrace_pace_delay_seconds_bucket", "0.0"] == 1
    assert values["headrace_pace_delay_seconds_bucket", "0.05"] == 2
    assert values["headrace_pace_delay_seconds_bucket", "0.4"] == 3


def test_stages_and_ttft_of_a_stream() -> None:
    one = metrics()
    one.request(record())
    values = samples(one)
    assert values[("headrace_ttft_seconds_count",)] == 1
    assert values[("headrace_ttft_seconds_sum",)] == 1.0
    assert values["headrace_ttft_seconds_bucket", "0.75"] == 0
    assert values["headrace_ttft_seconds_bucket", "1.0"] == 1
    for stage in STAGES:
        assert values["headrace_stage_seconds_count", stage] == 1
    total = sum(values["headrace_stage_seconds_sum", stage] for stage in STAGES)
    assert abs(total - values[("headrace_ttft_seconds_sum",)]) < 1e-9


def test_what_deaths_of_workers_came_to() -> None:
    values = samples(metrics(m=Engine()))
    assert values["headrace_engine_restarts_total", "m"] == 3
    assert values["headrace_streams_replayed_total", "m"] == 2
    assert values["headrace_streams_given_up_total", "m"] == 1


def test_a_whole_answer_says_nothing_about_delivery() -> None:
    one = metrics()
    one.request(record(stream=False))
    values = samples(one)
    assert values[("headrace_ttft_seconds_count",)] == 0
    assert values["headrace_stage_seconds_count", "deliver"] == 0
    assert values["headrace_stage_seconds_count", "prefill"] == 1


def test_a_stream_without_text_has_no_ttft() -> None:
    one = metrics()
    one.request(record(delivered=None))
    assert samples(one)[("headrace_ttft_seconds_count",)] == 0


def test_gaps_come_with_their_request() -> None:
    one = metrics()
    one.request(record(gaps=[0.01, 0.02, 0.3]))
    values = samples(one)
    assert values[("headrace_inter_token_seconds_count",)] == 3
    assert values["headrace_inter_token_seconds_bucket", "0.02"] == 2


def test_engines_are_read_at_the_scrape() -> None:
    engine = Engine(running=2, waiting=1, cells_total=100, cells_running=40, cells_cached=20, completion_tokens=9)
    one = metrics(m=engine)
    values = samples(one)
    assert values["headrace_requests_running", "m"] == 2
    assert values["headrace_kv_cells_used", "m"] == 40
    assert values["headrace_kv_cells_cached", "m"] == 20
    assert values["headrace_kv_cells_capacity", "m"] == 100
    assert values["headrace_completion_tokens_total", "m"] == 9
    assert values["headrace_engine_ready", "m"] == 1
    engine.stats = EngineStats()
    engine.ready = False
    values = samples(one)
    assert values["headrace_requests_running", "m"] == 0
    assert values["headrace_engine_ready", "m"] == 0


def test_the_health_of_the_kv_pool() -> None:
    health = {"cells_shared": 7, "cells_width": 90, "fragmentation": 0.25}
    values = samples(metrics(m=Engine(**health, slots_running=3, slots_cached=2, slots_free=10)))
    for name, value in health.items():
        assert values[f"headrace_kv_{name}", "m"] == value
    kinds = ("running", "cached", "free")
    assert [values[f"headrace_kv_slots_{kind}", "m"] for kind in kinds] == [3, 2, 10]


def test_lag_and_open_streams() -> None:
    one = metrics()
    one.lag(0.02)
    one.open_streams = 3
    values = samples(one)
    assert values["headrace_event_loop_lag_seconds_bucket", "0.025"] == 1
    assert values[("headrace_open_streams",)] == 3


def test_every_name_is_ours_and_told_once() -> None:
    one = metrics(m=Engine())
    one.request(record())
    lines = one.render().decode().splitlines()
    for kind in ("# HELP ", "# TYPE "):
        names = [line.split()[2] for line in lines if line.startswith(kind)]
        assert len(names) == len(set(names))
        assert all(name.startswith("headrace_") for name in names)


def test_two_servers_do_not_meet() -> None:
    first, second = metrics(), metrics()
    first.request(record())
    assert not any(name[0] == "headrace_requests_total" for name in samples(second))
    Metrics({}, registry=CollectorRegistry())


def test_label_values_are_escaped() -> None:
    one = metrics(**{'a"b\\c\n': Engine(running=1)})
    assert samples(one)["headrace_requests_running", 'a"b\\c\n'] == 1


def test_refusals_are_counted_by_model_and_reason() -> None:
    one = metrics(m=Engine())
    assert samples(one)["headrace_refused_total", "m", "deadline"] == 0, "a rate needs its zero"
    for reason in ("deadline", "deadline", "queue_full"):
        refused = record(outcome="rejected")
        refused.model, refused.reason = "m", reason
        one.request(refused)
    one.request(record(outcome="rejected"))
    values = {name[1:]: value for name, value in samples(one).items() if name[0] == "headrace_refused_total"}
    assert values == {
        ("m", "deadline"): 2,
        ("m", "queue_full"): 1,
        ("m", "queue_timeout"): 0,
        ("m", "queue_tokens"): 0,
    }


def test_who_is_over_a_limit_is_counted_by_which_one() -> None:
    one = metrics(m=Engine())
    for limit in ("requests", "tokens", "tokens"):
        limited = record(outcome="invalid")
        limited.limit = limit
        one.request(limited)
    values = {name[1]: value for name, value in samples(one).items() if name[0] == "headrace_limited_total"}
    assert values == {"requests": 1, "tokens": 2, "streams": 0}


def test_the_backlog_is_read_at_the_scrape() -> None:
    assert samples(metrics(m=Engine(backlog_tokens=700)))["headrace_backlog_tokens", "m"] == 700
