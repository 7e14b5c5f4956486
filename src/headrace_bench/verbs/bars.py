"""What the three verbs that measure this repository's bars have in common: their flags, their parts, their lines."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_bench.fault import Misuse
from headrace_bench.lab import Lab, Programs
from headrace_bench.peers import catalogue, example_server, kept, llama_server
from headrace_bench.server import NotReady
from headrace_bench.wire import Refused

Part = Callable[[Lab], dict[str, Any]]
Bar = tuple[str, str, str, float]
"""Part, figure, sign, bar."""
INSTALLED = (llama_server.NAME, llama_server.TUNED_NAME, example_server.NAME)
"""The peers that these verbs know."""
COMPARED = ("single", "shared", "leave")
"""Parts that need a peer and the load client."""


def add(parser: argparse.ArgumentParser, rounds: int) -> None:
    """The flags of all three."""
    parser.add_argument("--model", type=Path, help="GGUF file for all sides")
    parser.add_argument("--llama-server", type=Path, help="a peer's program, instead of the one that `peers` installed")
    parser.add_argument("--server-py", type=Path, help="likewise llama-cpp-python's example server: its source")
    parser.add_argument("--peer-python", type=Path, default=Path(sys.executable), help="what runs --server-py")
    parser.add_argument("--peerload", type=Path, help="the neutral load client")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--only", default="", help="parts or scenarios, comma separated")
    parser.add_argument("--out", type=Path, default=Path("results"))


def lab_of(asked: argparse.Namespace, folder: Path) -> Lab:
    """Where it is measured. Misuse without a model."""
    if asked.model is None:
        raise Misuse("--model: which GGUF file?")
    folder.mkdir(parents=True, exist_ok=True)
    there = catalogue.find(INSTALLED, kept.home(), None, lambda _: None).programs
    programs = Programs(
        asked.llama_server or there.llama_server,
        asked.server_py or there.server_py,
        asked.peer_python if asked.server_py else there.peer_python,
    )
    return Lab(asked.model, folder, programs, asked.peerload, asked.threads, asked.rounds)


def dated(out: Path) -> Path:
    """A folder of this run's own."""
    return out / time.strftime("%Y%m%d-%H%M%S")


def listed(flag: str, text: str, known: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """What a flag lists; all that is known for an empty one."""
    asked = [name for name in text.split(",") if name]
    for name in asked:
        if name not in known:
            raise Misuse(f"{flag} {name}: choose from {', '.join(known)}")
    return asked or list(known)


def measure(lab: Lab, verb: str, parts: Mapping[str, Part], wanted: Sequence[Bar], names: Sequence[str]) -> int:
    """Each part in turn: a line a bar, and all figures in `VERB.json`. 1 when a server did not do what it has to."""
    results: dict[str, Any] = {}
    for part in names:
        if part in COMPARED and not _can_compare(lab):
            print(f"{part}: left out, it needs --llama-server and --peerload", file=sys.stderr)
            continue
        try:
            results[part] = parts[part](lab)
        except (NotReady, Refused, OSError, subprocess.SubprocessError) as error:
            print(f"headrace-bench: {part}: {_said(error)}", file=sys.stderr)
            return 1
        (lab.folder / f"{verb.replace('-', '_')}.json").write_text(json.dumps(results, indent=1))
        for name, figure, sign, bar in wanted:
            if name == part:
                print(judge(name, figure, results[part][figure], sign, bar), flush=True)
    return 0


def _said(error: Exception) -> str:
    """In one line; the command of a child may be a whole program, and is not repeated."""
    match error:
        case subprocess.CalledProcessError():
            words = str(error.stderr or "").strip().splitlines()[-1:]
            return ": ".join([f"the client ended with status {error.returncode}", *words])
        case subprocess.TimeoutExpired():
            return f"the client was not done within {error.timeout:g} s"
        case _:
            return " ".join(str(error).split()) or type(error).__name__


def _can_compare(lab: Lab) -> bool:
    return lab.programs.llama_server is not None and lab.peerload is not None


def judge(part: str, figure: str, value: float | None, sign: str, bar: float) -> str:
    """A line for people: the figure, its bar, and whether it is met. None, a figure that never came about, is not."""
    met = value is not None and {"<=": value <= bar, ">=": value >= bar, "<": value < bar}[sign]
    shown = "none" if value is None else f"{value:.3f}"
    return f"{part:9} {figure:18} {shown:>8}  bar {sign} {bar:g}  {'met' if met else 'MISSED'}"
