"""What `GET /metrics` shows of the KV outside the pool: one family a row, labelled by model and tier.

Rule: a row's tiers and its suffix name the fields of `TierStats`: ("ram", "ssd") and "bytes" are ram_bytes, ssd_bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from headrace.kv.tiers import TierStats

# fmt: off
_GAUGES = (
    ("headrace_tier_bytes", "What the tier holds.", ("ram", "ssd"), "bytes"),
    ("headrace_tier_blocks", "KV blocks in the tier, of 256 tokens or less.", ("ram", "ssd"), "blocks"),
    ("headrace_tier_down", "1 while the tier is left alone after an error.", ("ssd", "redis"), "down"),
)
_COUNTERS = (
    ("headrace_tier_hits", "KV blocks found in the tier.", ("ram", "ssd", "redis"), "hits"),
    ("headrace_tier_misses", "KV blocks sought there in vain.", ("ram", "ssd", "redis"), "misses"),
    ("headrace_tier_read_bytes", "KV read from the tier.", ("ram", "ssd", "redis"), "read"),
    ("headrace_tier_written_bytes", "KV written to the tier.", ("ram", "ssd", "redis"), "written"),
    ("headrace_tier_errors", "Reads and writes that failed.", ("ssd", "redis"), "errors"),
)
_TOTALS = (
    ("headrace_tier_damaged", "Files and Redis entries that were damaged, and removed.", "damaged"),
    ("headrace_tier_writes_dropped", "KV blocks that did not reach the disk.", "writes_dropped"),
    ("headrace_restores", "Prefixes put back into the pool.", "restores"),
    ("headrace_restored_tokens", "Prompt tokens put back into the pool.", "restored_tokens"),
    ("headrace_restore_seconds", "Time it took the engine.", "restore_s"),
)
# fmt: on


def tier_families(stats: Mapping[str, TierStats]) -> Iterator[Metric]:
    """`stats`: served name → what its engine says."""
    for family, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for title, text, tiers, suffix in rows:
            metric = family(title, text, labels=("model", "tier"))
            for name, one in stats.items():
                for tier in tiers:
                    metric.add_metric((name, tier), getattr(one, f"{tier}_{suffix}"))
            yield metric
    for title, text, field in _TOTALS:
        total = CounterMetricFamily(title, text, labels=("model",))
        for name, one in stats.items():
            total.add_metric((name,), getattr(one, field))
        yield total
