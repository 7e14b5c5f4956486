"""`headrace-bench ablate`: what is each optimisation of a Headrace worth on this machine?

Rules: each switch has a load of its own that shows what it is for, unless the user gives one for all; time is shared
out evenly, what a switch does not use goes to the next; a row is shown and stored as soon as it is there; a server that
does not start costs its row and no other.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace_bench import ablation
from headrace_bench.client.run import Run, now
from headrace_bench.client.run import run as run_load
from headrace_bench.client.target import Target, check
from headrace_bench.exhibits import SWITCHES, Exhibit, Primary, exhibit
from headrace_bench.fault import Fault, Misuse
from headrace_bench.figures.paired import MIN_PAIRS
from headrace_bench.lab import HEADRACE, Lab
from headrace_bench.listener import settle
from headrace_bench.load.schedule import Schedule
from headrace_bench.report import ablations
from headrace_bench.report.folder import claim
from headrace_bench.report.machine import machine, versions
from headrace_bench.report.table import Table, markdown, shown, write
from headrace_bench.server import NotReady, Server
from headrace_bench.verbs import flags

MINUTES = 25.0
PAIRS = 12
OWN_LOAD = ("--arrivals", "--workload", "--duration", "--warmup", "--drain", "--hang-ups", "--ignore-eos", "--requests")
"""What says nothing without --own-load."""


def add(parser: argparse.ArgumentParser) -> None:
    """The verb's flags."""
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the model file to serve")
    parser.add_argument("--switches", default="", metavar="A,B", help=f"by default {', '.join(SWITCHES)}")
    parser.add_argument("--list", action="store_true", help="the switches, what is done and what decides; no more")
    parser.add_argument(
        "--pairs", type=flags.count, default=PAIRS, help=f"for each switch, {MIN_PAIRS} at least ({PAIRS})"
    )
    parser.add_argument(
        "--minutes", type=flags.number(0, above=True), default=MINUTES,
        help=f"for all switches together, as long as each gets {MIN_PAIRS} pairs ({MINUTES:g})",
    )  # fmt: skip
    parser.add_argument("--threads", type=flags.count, default=len(os.sched_getaffinity(0)), help="of the engine")
    parser.add_argument("--headrace-args", default="", metavar="FLAGS", help="more for both servers, in one argument")
    parser.add_argument("--own-load", action="store_true", help="the load below for every switch, not each its own")
    flags.add_load(parser)
    flags.add_slo(parser)
    flags.add_out(parser)


def run(asked: argparse.Namespace) -> int:
    """0 measured, whatever came of it; 1 a switch could not be; 2 misused."""
    exhibits = _exhibits(asked)
    if asked.list:
        for one in exhibits:
            print(f"{one.switch}: {one.load}; decided by {one.primary}")
        return 0
    more = _more(asked)
    lab = _lab(asked)
    deadline = time.monotonic() + asked.minutes * 60
    rows: list[dict[str, Any]] = []
    wall = now()
    names = {str(asked.gguf): "MODEL", str(lab.folder): "DIR"}
    command = shown(asked.command, names)
    made: Table | None = None
    for left, one in zip(range(len(exhibits), 0, -1), exhibits, strict=True):
        at = time.monotonic()
        rows.append(_row(asked, lab, one, more, at + max(0.0, deadline - at) / left))
        made = ablations.table(rows, command=command, wall=wall, machine=machine(), versions=versions())
        write(lab.folder, made)
        print(_told(rows[-1]), flush=True)
    if made is not None:
        print("", markdown(made), sep="\n")
    return int(any("failed" in row for row in rows))


def _exhibits(asked: argparse.Namespace) -> list[Exhibit]:
    names = [name for name in asked.switches.split(",") if name] or list(SWITCHES)
    for name in names:
        if "." not in name:
            raise Misuse(f"--switches {name}: a switch reads SECTION.NAME, for example {next(iter(SWITCHES))}")
    if asked.pairs < MIN_PAIRS:
        raise Misuse(f"--pairs {asked.pairs}: below {MIN_PAIRS} no difference can be told from chance")
    unread = [flag for flag in OWN_LOAD if flag in {word.partition("=")[0] for word in asked.command}]
    if unread and not asked.own_load:
        raise Misuse(f"{unread[0]}: each switch has a load of its own; add --own-load to give one for all")
    return [exhibit(name) for name in names]


def _lab(asked: argparse.Namespace) -> Lab:
    if asked.gguf is None:
        raise Misuse("--gguf: which model file?")
    if not asked.gguf.is_file():
        raise Misuse(f"--gguf {asked.gguf}: there is no such file")
    folder = flags.out_of(asked)
    claim(folder)
    return Lab(asked.gguf, folder, threads=asked.threads)


def _more(asked: argparse.Namespace) -> list[str]:
    try:
        return shlex.split(asked.headrace_args)
    except ValueError as error:
        raise Misuse(f"--headrace-args: {error}") from None


def _row(asked: argparse.Namespace, lab: Lab, one: Exhibit, more: list[str], until: float) -> dict[str, Any]:
    own: Callable[[int], Schedule] | None = None
    if asked.own_load:
        own = lambda seed: flags.schedule_of(asked, seed)  # noqa: E731
        one = Exhibit(
            one.switch, own(asked.seed).kind, lambda _: (), Primary("ttft", "p50"), drain_s=asked.drain
        )  # the exhibit's own settings belong to the exhibit's load
    try:
        found = ablation.ablate(
            one,
            starting(lab, one, more),
            load,
            slo=flags.slo_of(asked),
            pairs=asked.pairs,
            until=until,
            seed=asked.seed,
            calm=lambda servers: settle([server.cpu for server in servers]),
            schedule=own,
            on_turn=_progress(one),
        )
    except (NotReady, Fault, OSError, ValueError) as error:  # ValueError: there was no engine to kill
        return ablations.failed(one.switch, str(error) or type(error).__name__)
    return ablations.row(found)


def starting(lab: Lab, one: Exhibit, more: list[str]) -> ablation.Start:
    """How a server of either side is started."""

    def start(on: bool) -> Server:
        settings: Mapping[str, str] = {**one.settings, one.switch: str(on).lower()}
        parts = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        return lab.headrace(*parts, *more, name=f"{HEADRACE}-{one.switch}-{'on' if on else 'off'}")

    return start


def load(server: Server, schedule: Schedule, drain_s: float) -> Run:
    """The load of real life. Raises Fault, and KeyboardInterrupt: a load that is interrupted ends without."""
    target = asyncio.run(check(Target(server.url, "")))
    ran = run_load(target, schedule, drain_s=drain_s)
    if ran.interrupted:
        raise KeyboardInterrupt
    return ran


def _progress(one: Exhibit) -> Callable[[ablation.Turn], None]:
    def show(made: ablation.Turn) -> None:
        def text(value: float | None) -> str:
            return "none" if value is None else f"{value:.4f}"

        why = f"  dropped: {'; '.join(made.invalid)}" if made.invalid else ""
        print(f"  {one.switch}: on {text(made.on.value)}, off {text(made.off.value)}{why}", file=sys.stderr, flush=True)

    return show


def _told(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return f"{row['switch']}: not measured: {row['failed']}"
    measured = f"{row['figure']} {ablations.effect(row)}, {row['pairs']} pairs, {row['took_s']:.0f} s"
    return f"{row['switch']}: {row['verdict']}: {measured}"
