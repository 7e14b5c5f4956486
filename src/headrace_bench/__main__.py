"""`python -m headrace_bench VERB …`: measures, writes JSON files, prints a line a bar or a table."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_bench import bars, busy, crash, first_token, lookup, memory
from headrace_bench.lab import HEADRACE, Lab, Programs
from headrace_bench.server import NotReady
from headrace_bench.wire import Refused

Part = Callable[[Lab], dict[str, Any]]
Bar = tuple[str, str, str, float]
"""Part, figure, sign, bar."""

FIRST_TOKEN: Mapping[str, Part] = {
    "decode": first_token.decode,
    "single": lambda lab: first_token.peers(lab, ["single"]),
    "shared": lambda lab: first_token.peers(lab, ["shared"]),
    "leave": lambda lab: first_token.peers(lab, ["leave"]),
    "overhead": first_token.overhead,
    "streams": first_token.streams,
}
FIRST_TOKEN_BARS: tuple[Bar, ...] = (
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
MEMORY: Mapping[str, Part] = {
    "restore": memory.restore,
    "turns": memory.turns,
    "template": memory.template,
    "lookup": lookup.lookup,
    "crash": crash.crash,
}
MEMORY_BARS: tuple[Bar, ...] = (
    ("restore", "ram_times", ">=", 100),
    ("restore", "ssd_times", ">=", 30),
    ("turns", "p95_ratio", "<=", 0.2),
    ("template", "restart_ratio", "<=", 1.5),
    ("lookup", "copy_ratio", ">=", 1.5),
    ("lookup", "prose_ratio", ">=", 0.98),
    ("crash", "right", ">=", crash.STREAMS),
)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 measured, whatever came of it; 1 a server did not do what it has to for that; 2 misused."""
    parser = _parser()
    asked = parser.parse_args(argv)
    if asked.verb == "busy" and asked.table is not None:
        print(busy.report(busy.read(asked.table), _listed(parser, "--only", asked.only, bars.SCENARIOS)))
        return 0
    if asked.model is None:
        parser.error("--model: which GGUF file?")
    folder: Path = asked.out if asked.verb == "first-token" else asked.out / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    programs = Programs(asked.llama_server, asked.server_py, asked.peer_python)
    lab = Lab(asked.model, folder, programs, asked.peerload, asked.threads, asked.rounds)
    if asked.verb == "busy":
        return _busy(parser, lab, asked)
    parts, wanted = (FIRST_TOKEN, FIRST_TOKEN_BARS) if asked.verb == "first-token" else (MEMORY, MEMORY_BARS)
    return _parts(lab, asked.verb, parts, wanted, _listed(parser, "--only", asked.only, parts))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headrace-bench", description="Measure a server from outside.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, rounds, text in (
        ("first-token", 5, "the first token of one request at a time, and what the server adds to it"),
        ("busy", 3, "a busy server, side by side with its peers"),
        ("memory", 5, "KV that comes back, text that is looked up, streams that survive"),
    ):
        one = verbs.add_parser(verb, help=text, description=text)
        one.add_argument("--model", type=Path, help="GGUF file for all sides")
        one.add_argument("--llama-server", type=Path, help="a peer's program")
        one.add_argument("--server-py", type=Path, help="llama-cpp-python's example server, the source file")
        one.add_argument("--peer-python", type=Path, default=Path(sys.executable), help="what runs --server-py")
        one.add_argument("--peerload", type=Path, help="the neutral load client")
        one.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
        one.add_argument("--rounds", type=int, default=rounds)
        one.add_argument("--only", default="", help="parts or scenarios, comma separated")
        one.add_argument("--out", type=Path, default=Path("results"))
        if verb == "busy":
            one.add_argument("--peers", help="comma separated; empty for ours alone")
            one.add_argument("--headrace-args", default="", help="more flags for ours, in one argument")
            one.add_argument("--seconds", type=float, default=20.0, help="length of the scenario `full`")
            one.add_argument("--table", type=Path, metavar="FOLDER", help="print the table of an earlier run")
    return parser


def _listed(
    parser: argparse.ArgumentParser, flag: str, text: str, known: Sequence[str] | Mapping[str, Any]
) -> list[str]:
    """What a flag lists; all that is known for an empty one."""
    asked = [name for name in text.split(",") if name]
    for name in asked:
        if name not in known:
            parser.error(f"{flag} {name}: choose from {', '.join(known)}")
    return asked or list(known)


def _busy(parser: argparse.ArgumentParser, lab: Lab, asked: argparse.Namespace) -> int:
    if lab.peerload is None:
        parser.error("--peerload: the load client is needed")
    scenarios = _listed(parser, "--only", asked.only, bars.SCENARIOS)
    peers = lab.peers()
    names = [] if asked.peers == "" else _listed(parser, "--peers", asked.peers or "", peers)
    flags = shlex.split(asked.headrace_args)
    servers: dict[str, busy.START] = {HEADRACE: lambda: lab.headrace(*flags), **{name: peers[name] for name in names}}
    client = [sys.executable, str(lab.peerload)]
    rounds = busy.measure(lab, servers, scenarios, asked.seconds, client)
    table = busy.report(rounds, scenarios)
    (lab.folder / "table.md").write_text(table + "\n")
    print(table)
    return 0


def _parts(lab: Lab, verb: str, parts: Mapping[str, Part], wanted: Sequence[Bar], names: Sequence[str]) -> int:
    results: dict[str, Any] = {}
    for part in names:
        if verb == "first-token" and part in ("single", "shared", "leave") and not _can_compare(lab):
            print(f"{part}: left out, it needs --llama-server and --peerload", file=sys.stderr)
            continue
        try:
            results[part] = parts[part](lab)
        except (NotReady, Refused, OSError) as error:
            print(f"headrace-bench: {part}: {str(error) or type(error).__name__}", file=sys.stderr)
            return 1
        (lab.folder / f"{verb.replace('-', '_')}.json").write_text(json.dumps(results, indent=1))
        for name, figure, sign, bar in wanted:
            if name == part:
                print(judge(name, figure, results[part][figure], sign, bar), flush=True)
    return 0


def _can_compare(lab: Lab) -> bool:
    return lab.programs.llama_server is not None and lab.peerload is not None


def judge(part: str, figure: str, value: float | None, sign: str, bar: float) -> str:
    """A line for people: the figure, its bar, and whether it is met. None, a figure that never came about, is not."""
    met = value is not None and {"<=": value <= bar, ">=": value >= bar, "<": value < bar}[sign]
    shown = "none" if value is None else f"{value:.3f}"
    return f"{part:9} {figure:18} {shown:>8}  bar {sign} {bar:g}  {'met' if met else 'MISSED'}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that servers that run are ended
    sys.exit(main())
