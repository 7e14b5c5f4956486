"""`memory`: KV that comes back, text that is looked up, streams that survive."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from headrace_bench import crash, lookup, memory
from headrace_bench.verbs import bars

PARTS: Mapping[str, bars.Part] = {
    "restore": memory.restore,
    "turns": memory.turns,
    "template": memory.template,
    "lookup": lookup.lookup,
    "crash": crash.crash,
}
BARS: tuple[bars.Bar, ...] = (
    ("restore", "ram_times", ">=", 100),
    ("restore", "ssd_times", ">=", 30),
    ("turns", "p95_ratio", "<=", 0.2),
    ("template", "restart_ratio", "<=", 1.5),
    ("lookup", "copy_ratio", ">=", 1.5),
    ("lookup", "prose_ratio", ">=", 0.98),
    ("crash", "right", ">=", crash.STREAMS),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    bars.add(parser, rounds=5)


def run(asked: argparse.Namespace) -> int:
    """0 measured, whatever came of it; 1 a server did not do what it has to for that."""
    names = bars.listed("--only", asked.only, PARTS)
    return bars.measure(bars.lab_of(asked, bars.dated(asked.out)), "memory", PARTS, BARS, names)
