"""`busy`: a neutral load client's scenarios against Headrace and its peers, and the bars of a busy server.

    round 1   headrace     llama-server  tuned      server.py      each: start, scenarios with seed 1, stop
    round 2   llama-server tuned         server.py  headrace       … with seed 2

Rules: one server at a time, fresh in every round; the order turns by one a round, so that a machine that gets slower
is slow for each of them; everybody gets the same seed, which differs between rounds; a server that fails is written
down as failed and the run goes on; every run ends by itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headrace_bench import bars
from headrace_bench.bars import Results
from headrace_bench.lab import HEADRACE, Lab
from headrace_bench.report import table as tables
from headrace_bench.report.folder import without_keys
from headrace_bench.report.table import Table, scrubbed
from headrace_bench.server import NotReady, Server

START = Callable[[], Server]
LIMIT_S = 900.0
"""Longest time for one server's scenarios; the load client gives up on a silent stream after 300 s by itself."""


def rotate(names: Sequence[str], turn: int) -> list[str]:
    """`names` in the order of round `turn`, counted from 0."""
    at = turn % len(names)
    return [*names[at:], *names[:at]]


def measure(
    lab: Lab, servers: Mapping[str, START], scenarios: Sequence[str], seconds: float, client: Sequence[str]
) -> list[dict[str, Any]]:
    """All rounds. Writes a file a server and round into `lab.folder`; returns, a round, server → result."""
    rounds: list[dict[str, Any]] = []
    for turn in range(lab.rounds):
        found: dict[str, Any] = {}
        for name in rotate(list(servers), turn):
            record = _once(lab, servers[name], name, scenarios, seconds, client, turn + 1)
            found[name] = record["result"]
            path(lab.folder, name, turn + 1).write_text(json.dumps(record, indent=1))
            print(f"round {turn + 1}: {name}: {record['took_s']:.0f} s", file=sys.stderr, flush=True)
        rounds.append(found)
    return rounds


def path(folder: Path, name: str, turn: int, ending: str = "json") -> Path:
    """Where a server's result of a round stands."""
    return folder / f"{name}-{turn}.{ending}"


def read(folder: Path) -> list[dict[str, Any]]:
    """The rounds that an earlier run wrote, as far as it came."""
    rounds: dict[int, dict[str, Any]] = {}
    for file in sorted(folder.glob("*.json")):
        record = json.loads(file.read_text())
        if isinstance(record, dict) and {"server", "round", "result"} <= set(record):
            rounds.setdefault(record["round"], {})[record["server"]] = record["result"]
    return [rounds[turn] for turn in sorted(rounds)]


def _once(
    lab: Lab,
    start: START,
    name: str,
    scenarios: Sequence[str],
    seconds: float,
    client: Sequence[str],
    turn: int,
) -> dict[str, Any]:
    out = path(lab.folder, name, turn, "out")
    model = ["--model", lab.model.stem, "--only", ",".join(scenarios), "--seed", str(turn), "--seconds", f"{seconds:g}"]
    began, load = time.monotonic(), os.getloadavg()
    server = start()
    try:
        with server, path(lab.folder, name, turn, "log").open("wb") as log:
            command = [*client, "--url", server.url, *model, "--out", str(out)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=log, timeout=LIMIT_S)
            if name == HEADRACE or name.startswith(f"{HEADRACE}-"):
                _keep_metrics(server, path(lab.folder, name, turn, "metrics"))
        result = json.loads(out.read_text())
    except (NotReady, subprocess.SubprocessError, OSError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        result = {"failed": f"{type(error).__name__}: {error}"}
    finally:
        out.unlink(missing_ok=True)
    return {
        "server": name,
        "command": list(without_keys(server.command)),
        "environment": server.env,
        "round": turn,
        "seed": turn,
        "load_average_before": load,
        "took_s": round(time.monotonic() - began, 1),
        "result": result,
    }


def _keep_metrics(server: Server, file: Path) -> None:
    """What ours says of the round, for whoever looks for the reason of a figure."""
    try:
        with urllib.request.urlopen(server.url + "/metrics", timeout=5) as answer:
            file.write_bytes(answer.read())
    except OSError as error:
        file.write_text(f"# {error}\n")


def report(rounds: Sequence[Results], scenarios: Sequence[str]) -> str:
    """The table with the ratio of every round, and below it what did not go as it should."""
    lines = [bars.table(bars.judged(rounds, HEADRACE), HEADRACE, scenarios), ""]
    return "\n".join([*lines, *failures(rounds)])


def keep(folder: Path, of: Table, rounds: Sequence[Results], scenarios: Sequence[str]) -> None:
    """Leaves the bars as a table of their own in `folder`, measured as `of` says. Raises Misuse."""
    head, lines = bars.cells(bars.judged(rounds, HEADRACE), HEADRACE, scenarios)
    folder.mkdir(parents=True, exist_ok=True)
    notes = tuple(scrubbed(line) for line in failures(rounds))
    tables.write(
        folder, replace(of, verb="busy", columns=head, rows=tuple(lines), commands={}, notes=notes, figures={})
    )


def failures(rounds: Sequence[Results]) -> list[str]:
    """What failed, a line each."""
    return [
        f"round {turn}: {name}: {trouble}"
        for turn, round_ in enumerate(rounds, 1)
        for name, result in round_.items()
        for trouble in troubles(result)
    ]


def troubles(result: Mapping[str, Any]) -> list[str]:
    """What failed in one server's round, a line each."""
    if "failed" in result:
        return [str(result["failed"])]
    found = []
    for scenario in bars.SCENARIOS:
        failed = result.get(scenario, {}).get("failed")
        if failed:
            found.append(
                f"{scenario}: {failed} requests failed" if isinstance(failed, int) else f"{scenario}: {failed}"
            )
    return found
