"""`first-token`: the first token of one request at a time, and what the server adds to it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from headrace_bench import first_token
from headrace_bench.verbs import bars

PARTS: Mapping[str, bars.Part] = {
    "start": first_token.start,
    "decode": first_token.decode,
    "single": lambda lab: first_token.peers(lab, ["single"]),
    "shared": lambda lab: first_token.peers(lab, ["shared"]),
    "leave": lambda lab: first_token.peers(lab, ["leave"]),
    "overhead": first_token.overhead,
    "streams": first_token.streams,
}
BARS: tuple[bars.Bar, ...] = (
    ("start", "first_s", "<=", 25.0),
    ("start", "known_s", "<=", 2.5),
    ("decode", "ratio", ">=", 0.95),
    ("single", "single_ttft_p50", "<=", 1.08),
    ("shared", "shared_cold_p95", "<=", 0.5),
    ("leave", "leave", "<=", 1.3),
    ("overhead", "p95_ms", "<=", 5.0),
    ("streams", "wrong", "<=", 0),
    ("streams", "gap_p99_ratio", "<=", 1.5),
    ("streams", "server_rss_mb", "<", 200),
    ("streams", "idle_cpu_percent", "<", 1.0),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    bars.add(parser, rounds=5)


def run(asked: argparse.Namespace) -> int:
    """0 measured, whatever came of it; 1 a server did not do what it has to for that."""
    names = bars.listed("--only", asked.only, PARTS)
    return bars.measure(bars.lab_of(asked, asked.out), "first-token", PARTS, BARS, names)
