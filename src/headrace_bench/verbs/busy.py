"""`busy`: a busy server, side by side with its peers."""

from __future__ import annotations

import argparse
import shlex
from datetime import UTC, datetime
from pathlib import Path

from headrace_bench import bars as figures
from headrace_bench import beside, busy
from headrace_bench.fault import Misuse
from headrace_bench.lab import HEADRACE
from headrace_bench.report.machine import machine, versions
from headrace_bench.report.table import Table, shown
from headrace_bench.verbs import bars


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    bars.add(parser, rounds=3)
    parser.add_argument("--peers", help="comma separated; empty for ours alone")
    parser.add_argument("--headrace-args", default="", help="more flags for ours, in one argument")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the scenario `full`")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the table of an earlier run")


def run(asked: argparse.Namespace) -> int:
    """Measures, or with `--table` reads what was measured; prints the table."""
    if asked.table is not None:
        print(busy.report(busy.read(asked.table), bars.listed("--only", asked.only, figures.SCENARIOS)))
        return 0
    if asked.model is not None and asked.peerload is None:
        raise Misuse("--peerload: the load client is needed")
    scenarios = bars.listed("--only", asked.only, figures.SCENARIOS)
    lab = bars.lab_of(asked, bars.dated(asked.out))
    assert lab.peerload is not None
    peers = lab.peers()
    names = [] if asked.peers == "" else bars.listed("--peers", asked.peers or "", peers)
    flags = shlex.split(asked.headrace_args)
    servers: dict[str, busy.START] = {HEADRACE: lambda: lab.headrace(*flags), **{name: peers[name] for name in names}}
    wall = datetime.now(UTC).isoformat(timespec="seconds")
    rounds = busy.measure(lab, servers, scenarios, asked.seconds, beside.client(lab.peerload, scenarios))
    paths = {str(lab.model): "MODEL", str(lab.peerload): lab.peerload.name, str(asked.out): "DIR"}
    command = shown(asked.command, paths)
    of = Table(verb="busy", wall=wall, command=command, machine=machine(), versions=versions(), columns=(), rows=())
    busy.keep(lab.folder / "bars", of, rounds, scenarios)
    print(busy.report(rounds, scenarios))
    return 0
