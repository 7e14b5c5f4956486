from __future__ import annotations

import msgspec

from headrace.kv.tiers import TierStats
from headrace.observe.tier_metrics import tier_families


def test_every_figure_is_shown_once() -> None:
    names = TierStats.__struct_fields__
    stats = TierStats(*range(1, len(names) + 1))
    shown = [sample for family in tier_families({"m": stats}) for sample in family.samples]
    assert sorted(sample.value for sample in shown) == list(range(1, len(names) + 1))
    assert all(sample.labels["model"] == "m" for sample in shown)
    values = {(sample.name, sample.labels.get("tier")): sample.value for sample in shown}
    assert values["headrace_tier_hits_total", "redis"] == stats.redis_hits
    assert values["headrace_tier_bytes", "ssd"] == stats.ssd_bytes
    assert values["headrace_restore_seconds_total", None] == stats.restore_s


def test_two_models_stand_side_by_side() -> None:
    families = list(tier_families({"a": TierStats(ram_hits=1), "b": TierStats(ram_hits=2)}))
    hits = next(family for family in families if family.name == "headrace_tier_hits")
    assert [s.value for s in hits.samples if s.labels["tier"] == "ram"] == [1, 2]


def test_stats_cross_processes_unchanged() -> None:
    stats = TierStats(ram_bytes=5, ssd_down=True, restore_s=0.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=TierStats) == stats
