"""`python -m headrace_bench first-token …`: measures, writes one JSON file, prints a line a bar."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace_bench import first_token
from headrace_bench.first_token import Lab
from headrace_bench.server import NotReady

PARTS: dict[str, Callable[[Lab], dict[str, Any]]] = {
    "decode": first_token.decode,
    "single": lambda lab: first_token.peers(lab, ["single"]),
    "shared": lambda lab: first_token.peers(lab, ["shared"]),
    "leave": lambda lab: first_token.peers(lab, ["leave"]),
    "overhead": first_token.overhead,
    "streams": first_token.streams,
}

BARS: tuple[tuple[str, str, str, float], ...] = (
    ("decode", "ratio", ">=", 0.93),
    ("single", "single_ttft_p50", "<=", 1.08),
    ("shared", "shared_cold_p95", "<=", 0.5),
    ("leave", "leave", "<=", 1.3),
    ("overhead", "p95_ms", "<=", 5.0),
    ("streams", "wrong", "<=", 0),
    ("streams", "gap_p99_ratio", "<=", 1.5),
    ("streams", "server_rss_mb", "<", 200),
    ("streams", "idle_cpu_percent", "<", 1.0),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="headrace-bench", description="Measure a server from outside.")
    parser.add_argument("verb", choices=["first-token"])
    parser.add_argument("--model", type=Path, required=True, help="GGUF file for both sides")
    parser.add_argument("--llama-server", type=Path, help="the peer's program")
    parser.add_argument("--peerload", type=Path, help="the neutral load client")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma separated")
    parser.add_argument("--out", type=Path, default=Path("results"))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    lab = Lab(asked.model, asked.out, asked.llama_server, asked.peerload, asked.threads, asked.rounds)
    results: dict[str, Any] = {}
    for part in asked.only.split(","):
        if part not in PARTS:
            parser.error(f"--only {part}: choose from {', '.join(PARTS)}")
        if part in ("single", "shared", "leave") and (lab.llama_server is None or lab.peerload is None):
            print(f"{part}: left out, it needs --llama-server and --peerload", file=sys.stderr)
            continue
        try:
            results[part] = PARTS[part](lab)
        except NotReady as error:
            print(f"headrace-bench: {error}", file=sys.stderr)
            return 1
        (asked.out / "first_token.json").write_text(json.dumps(results, indent=1))
        for name, figure, sign, bar in BARS:
            if name == part:
                print(judge(name, figure, results[part][figure], sign, bar), flush=True)
    return 0


def judge(part: str, figure: str, value: float, sign: str, bar: float) -> str:
    """A line for people: the figure, its bar, and whether it is met."""
    met = {"<=": value <= bar, ">=": value >= bar, "<": value < bar}[sign]
    return f"{part:9} {figure:18} {value:8.3f}  bar {sign} {bar:g}  {'met' if met else 'MISSED'}"


if __name__ == "__main__":
    sys.exit(main())
