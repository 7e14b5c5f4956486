from __future__ import annotations

from headrace_bench.verbs import memory


def test_the_bars_of_memory() -> None:
    assert [(figure, sign, bar) for _, figure, sign, bar in memory.BARS] == [
        ("ram_times", ">=", 100),
        ("ssd_times", ">=", 30),
        ("p95_ratio", "<=", 0.2),
        ("restart_ratio", "<=", 1.5),
        ("copy_ratio", ">=", 1.5),
        ("prose_ratio", ">=", 0.98),
        ("right", ">=", 8),
    ]


def test_every_bar_belongs_to_a_part() -> None:
    assert {bar[0] for bar in memory.BARS} == set(memory.PARTS)
