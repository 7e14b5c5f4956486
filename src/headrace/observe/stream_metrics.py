"""What `GET /metrics` shows of resumable streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

How = Literal["live", "finished", "elsewhere"]
"""From memory while it is written, after its end, or from another server's."""
HOW: tuple[How, ...] = ("live", "finished", "elsewhere")
ENDINGS = ("done", "stopped", "abandoned", "failed", "lost")


@dataclass(slots=True)
class StreamFigures:
    """Counted by whoever keeps the logs."""

    open: int = 0
    """Logs that are written."""
    kept: int = 0
    """Logs that have ended and can still be read."""
    bytes: int = 0
    readers: int = 0
    resumed: Counter[How] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    adopted: int = 0
    """Streams of other servers that this one went on with."""
    unshared: int = 0
    """Streams that only this process can resume, because the shared Redis did not take them."""


def stream_families(figures: StreamFigures) -> Iterator[Metric]:
    """One family a figure."""
    logs = GaugeMetricFamily("headrace_stream_logs", "Resumable streams in memory.", labels=("state",))
    logs.add_metric(("open",), figures.open)
    logs.add_metric(("ended",), figures.kept)
    yield logs
    yield GaugeMetricFamily("headrace_stream_log_bytes", "Memory they take.", figures.bytes)
    yield GaugeMetricFamily("headrace_stream_log_readers", "Connections that read them.", figures.readers)
    resumed = CounterMetricFamily("headrace_streams_resumed", "Streams that were taken up again.", labels=("how",))
    for how in HOW:
        resumed.add_metric((how,), figures.resumed[how])
    yield resumed
    ended = CounterMetricFamily("headrace_stream_logs_ended", "Resumable streams that ended.", labels=("how",))
    for reason in ENDINGS:
        ended.add_metric((reason,), figures.ended[reason])
    yield ended
    yield CounterMetricFamily(
        "headrace_streams_adopted", "Answers that a server gone began and this one went on with.", figures.adopted
    )
    yield CounterMetricFamily(
        "headrace_streams_unshared", "Resumable streams that Redis did not take or keep up with.", figures.unshared
    )
