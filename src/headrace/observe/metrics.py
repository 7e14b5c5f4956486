"""Everything `GET /metrics` shows.

Counts of requests are kept here, on the event loop's thread and without locks; what an engine knows (its queue, its
cells, its tokens) is read from it at the moment of a scrape, so no gauge can go stale. One collector in a registry
of its own yields all families: two servers in one process do not meet. Label values are our own names only: routes
of the path table, outcomes, stages, served models, declared engines.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric

from headrace import __version__
from headrace.core.errors import LIMITS, REASONS
from headrace.core.timeline import STAGES
from headrace.engines.base import EngineStats, Lives
from headrace.observe.fleet_metrics import Mirrors, Standings, fleet_families, mirror_family
from headrace.observe.histogram import Histogram
from headrace.observe.record import Record
from headrace.observe.stream_metrics import StreamFigures, stream_families
from headrace.observe.tier_metrics import tier_families

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

# fmt: off
TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0)
STAGE_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, *TTFT_BOUNDS)
ITL_BOUNDS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
PACE_BOUNDS = (0.0, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 1.0, 10.0)
LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
WIRE_STATUSES = (400, 408, 431, 501, 505)

Row = tuple[str, str, Callable[[EngineStats], float]]
ENGINE_GAUGES: tuple[Row, ...] = (
    ("headrace_requests_running", "Sequences in prefill or decode.", lambda s: s.running),
    ("headrace_requests_waiting", "Sequences in the engine's queue.", lambda s: s.waiting),
    ("headrace_backlog_tokens", "Prompt tokens of all sequences that are still to be computed.",
     lambda s: s.backlog_tokens),
    ("headrace_kv_cells_used", "KV cells that running sequences hold.", lambda s: s.cells_running),
    ("headrace_kv_cells_cached", "KV cells kept for reuse until they are needed.", lambda s: s.cells_cached),
    ("headrace_kv_cells_capacity", "KV cells in the pool.", lambda s: s.cells_total),
    ("headrace_kv_cells_shared", "KV cells that more than one sequence has.", lambda s: s.cells_shared),
    ("headrace_kv_cells_width", "Highest used KV cell + 1: each step pays for all below.", lambda s: s.cells_width),
    ("headrace_cost_error_p50", "Median error of the predicted step time, as a share.", lambda s: s.cost_error_p50),
    ("headrace_cost_error_p95", "95th percentile of that error.", lambda s: s.cost_error_p95),
    ("headrace_kv_fragmentation", "Part of the free KV cells outside of their longest row.", lambda s: s.fragmentation),
    ("headrace_kv_slots_running", "KV sequence ids of running sequences.", lambda s: s.slots_running),
    ("headrace_kv_slots_cached", "KV sequence ids kept for reuse.", lambda s: s.slots_cached),
    ("headrace_prefixes_pinned", "Prefixes that stay in RAM, given or mined.", lambda s: s.prefixes_pinned),
    ("headrace_kv_slots_free", "KV sequence ids that nothing holds.", lambda s: s.slots_free),
)
ENGINE_COUNTERS: tuple[Row, ...] = (
    ("headrace_prompt_tokens", "Prompt tokens computed.", lambda s: s.prompt_tokens),
    ("headrace_cached_tokens", "Prompt tokens reused from the cache.", lambda s: s.cached_tokens),
    ("headrace_completion_tokens", "Tokens drawn.", lambda s: s.completion_tokens),
    ("headrace_engine_steps", "Batches computed.", lambda s: s.steps),
    ("headrace_drafts", "Tokens guessed ahead.", lambda s: s.drafts),
    ("headrace_drafts_right", "Those of them that were right.", lambda s: s.drafts_right),
    ("headrace_logits_not_finite", "Generations that failed because their logits were NaN or infinite.",
     lambda s: s.broken),
    ("headrace_preemptions", "Running sequences that had to give up their cells.", lambda s: s.preemptions),
)
LIFE_COUNTERS: tuple[tuple[str, str, Callable[[Lives], int]], ...] = (
    ("headrace_engine_restarts", "Workers started again after one died.", lambda lives: lives.restarts),
    ("headrace_streams_replayed", "Streams that went on in another worker.", lambda lives: lives.replayed),
    ("headrace_streams_given_up", "Streams that ended because their worker died.", lambda lives: lives.given_up),
)
# fmt: on


class Measured(Protocol):
    """What an engine, of whatever kind, tells of itself."""

    @property
    def ready(self) -> bool: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def lives(self) -> Lives: ...


class Metrics:
    """`engines`: name → engine, and `fleet`: all that are declared; both read anew at each scrape."""

    def __init__(
        self,
        engines: Mapping[str, Measured],
        *,
        fleet: Standings | None = None,
        mirror: Mirrors | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._engines = engines
        self._fleet = fleet
        self._mirror = mirror
        self._requests: Counter[tuple[str, str]] = Counter()
        self._refused: Counter[tuple[str, str]] = Counter()
        self._limited: Counter[str] = Counter()
        self._wire: Counter[int] = Counter()
        self._ttft = Histogram(TTFT_BOUNDS)
        self._stages = {stage: Histogram(STAGE_BOUNDS) for stage in STAGES}
        self._itl = Histogram(ITL_BOUNDS)
        self._pace = Histogram(PACE_BOUNDS)
        self._lag = Histogram(LAG_BOUNDS)
        self.open_streams = 0
        """Set by whoever opens and closes them."""
        self.streams = StreamFigures()
        self._registry = CollectorRegistry() if registry is None else registry
        self._registry.register(self)
        ProcessCollector(namespace="headrace", registry=self._registry)

    def request(self, record: Record) -> None:
        """Count one request that is over."""
        self._requests[record.route, record.outcome] += 1
        if record.reason is not None and record.model is not None:
            self._refused[record.model, record.reason] += 1
        if record.limit is not None:
            self._limited[record.limit] += 1
        ttft = record.timeline.ttft()
        for stage, ms in record.timeline.stages().items():
            # The last stage of a whole answer spans all its decoding; only a stream's says how long delivery takes.
            if record.stream or stage != STAGES[-1]:
                self._stages[stage].observe(ms / 1e3)
        if record.stream and ttft is not None:
            self._ttft.observe(ttft / 1e3)
        self._itl.observe_all(record.gaps)
        self._pace.observe_all(record.delays)

    def wire_refusal(self, status: int) -> None:
        """Count one request that was refused before it was one."""
        self._wire[status] += 1

    def lag(self, late: float) -> None:
        """The event loop ran a timer `late` s after its time."""
        self._lag.observe(late)

    def render(self) -> bytes:
        """The text exposition, of type `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing ahead of time: a registry would otherwise collect once just to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families; called by the registry."""
        yield self._build()
        requests = CounterMetricFamily("headrace_requests", "Requests that are over.", labels=("route", "outcome"))
        for labels, count in sorted(self._requests.items()):
            requests.add_metric(labels, count)
        yield requests
        yield self._refusals()
        limited = CounterMetricFamily(
            "headrace_limited",
            f"Requests refused because their key is over a limit; reason is one of {', '.join(LIMITS)}.",
            labels=("reason",),
        )
        for limit in LIMITS:
            limited.add_metric((limit,), self._limited[limit])
        yield limited
        wire = CounterMetricFamily(
            "headrace_wire_refused", "Connections closed because of what came there for a request.", labels=("status",)
        )
        for status in WIRE_STATUSES:
            wire.add_metric((str(status),), self._wire[status])
        yield wire
        yield _histogram("headrace_ttft_seconds", "First byte of a streamed request to its first text.", self._ttft)
        stages = HistogramMetricFamily("headrace_stage_seconds", "Time to the first text by stage.", labels=("stage",))
        for stage, histogram in self._stages.items():
            stages.add_metric((stage,), histogram.buckets(), histogram.total)
        yield stages
        yield _histogram("headrace_inter_token_seconds", "Gaps between writes that carry text.", self._itl)
        yield _histogram("headrace_pace_delay_seconds", "By how much pacing held pieces of text back.", self._pace)
        yield _histogram("headrace_event_loop_lag_seconds", "How late timers ran while streams were open.", self._lag)
        yield GaugeMetricFamily("headrace_open_streams", "Event streams being answered.", self.open_streams)
        yield from stream_families(self.streams)
        yield from self._of_engines()
        yield from fleet_families(self._fleet)
        yield mirror_family(self._mirror)

    def _build(self) -> Metric:
        build = InfoMetricFamily("headrace_build", "The version that runs.")
        build.add_metric((), {"version": __version__, "python": platform.python_version()})
        return build

    def _refusals(self) -> Metric:
        refused = CounterMetricFamily(
            "headrace_refused",
            f"Requests refused because of the queue; reason is one of {', '.join(REASONS)}.",
            labels=("model", "reason"),
        )
        names = self._engines if self._fleet is None else self._fleet.aliases
        for labels in sorted({(name, reason) for name in names for reason in REASONS} | self._refused.keys()):
            refused.add_metric(labels, self._refused[labels])
        return refused

    def _of_engines(self) -> Iterator[Metric]:
        stats: dict[str, EngineStats] = {name: engine.stats for name, engine in self._engines.items()}
        ready = GaugeMetricFamily("headrace_engine_ready", "1 if the engine takes requests.", labels=("model",))
        for name, engine in self._engines.items():
            ready.add_metric((name,), float(engine.ready))
        yield ready
        for title, text, read in ENGINE_GAUGES:
            gauge = GaugeMetricFamily(title, text, labels=("model",))
            for name, one in stats.items():
                gauge.add_metric((name,), read(one))
            yield gauge
        for title, text, read in ENGINE_COUNTERS:
            counter = CounterMetricFamily(title, text, labels=("model",))
            for name, one in stats.items():
                counter.add_metric((name,), read(one))
            yield counter
        rung = GaugeMetricFamily(
            "headrace_engine_rung",
            "Rungs below its settings that the engine runs on, because kernels fail on this machine; 0: none.",
            labels=("model", "rung"),
        )
        for name, engine in self._engines.items():
            rung.add_metric((name, engine.lives.rung), float(engine.lives.depth))
        yield rung
        for title, text, count in LIFE_COUNTERS:
            counter = CounterMetricFamily(title, text, labels=("model",))
            for name, engine in self._engines.items():
                counter.add_metric((name,), count(engine.lives))
            yield counter
        yield from tier_families({name: one.tiers for name, one in stats.items()})


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, text)
    family.add_metric((), histogram.buckets(), histogram.total)
    return family
