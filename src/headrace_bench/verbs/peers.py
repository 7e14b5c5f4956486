"""`peers`: Headrace and its peers with the same GGUF file, over the scenarios of a load client that is nobody's.

With `--gateways` it is another measurement, which `gateways` makes.

Rules: those of `busy`, which does the measuring: one server at a time, fresh in every round, the order turned by a
round. A peer that is not there or does not start is a line under the table, and the others go on. The bars of a busy
server are judged on the same rounds; their table stands in `bars/`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace_bench import bars, beside, busy, exhibits, first_start
from headrace_bench.fault import Fault, Misuse
from headrace_bench.lab import HEADRACE, Lab
from headrace_bench.peers import catalogue, kept, standing
from headrace_bench.peers.catalogue import Found
from headrace_bench.report import table as tables
from headrace_bench.report.folder import claim
from headrace_bench.report.machine import machine, versions
from headrace_bench.report.table import Table, scrubbed, shown
from headrace_bench.verbs import flags, gateways

ROUNDS, SECONDS = 3, 20.0
CHOSEN = "chosen"
CROWDED = 2.0
"""Load average a core. One server under load leaves about 1."""


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.add_argument("--gguf", type=Path, metavar="MODEL", help="the GGUF file that all of them serve")
    parser.add_argument("--peerload", type=Path, metavar="PATH", help="the load client, a Python file")
    parser.add_argument(
        "--by-itself",
        action="store_true",
        help="ours with what its first start, before round 1, measured and chose",
    )
    parser.add_argument(
        "--peers-gguf",
        metavar=f"FILE|{CHOSEN}",
        help=f"another file for the peers; `{CHOSEN}`: the one that ours, by itself, chose",
    )
    parser.add_argument(
        "--everything-off", action="store_true", help="ours once more, with each optimisation off that there is"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="PEER,…",
        help=f"of {', '.join(catalogue.ROWS)}; of gateways {', '.join(catalogue.GATEWAYS)}",
    )
    parser.add_argument("--install", action="store_true", help="install what is missing; without --peerload, only that")
    parser.add_argument("--scenarios", default="", metavar="NAME,…", help=f"of {', '.join(bars.SCENARIOS)}")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"{ROUNDS}, of gateways {gateways.ROUNDS}")
    parser.add_argument(
        "--seconds", type=flags.number(0, above=True), help="of the scenario `full`, or of a gateway's block"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--headrace-args", default="", help="more flags for `headrace serve`, in one argument")
    flags.add_out(parser)
    gateways.add(parser)


def run(asked: argparse.Namespace) -> int:
    """Prints the table, and leaves it in the folder. Raises Fault."""
    if asked.rounds is not None and asked.rounds < 1:
        raise Misuse(f"--rounds {asked.rounds}: at least 1")
    if asked.gateways:
        return gateways.run(asked)
    asked.rounds, asked.seconds = asked.rounds or ROUNDS, asked.seconds or SECONDS
    names, scenarios = catalogue.named(asked.only), _scenarios(asked.scenarios)
    for flag, file in (("--gguf", asked.gguf), ("--peerload", asked.peerload)):
        if file is not None and not file.is_file():
            raise Misuse(f"{flag} {file}: no such file")
    if asked.peerload is None and not asked.install:
        raise Misuse("--peerload PATH: the load client is needed (with --install alone, peers are only installed)")
    if asked.peers_gguf == CHOSEN and not asked.by_itself:
        raise Misuse(f"--peers-gguf {CHOSEN}: it is the first start that chooses: give --by-itself too")
    if asked.peers_gguf not in (None, CHOSEN) and not Path(asked.peers_gguf).is_file():
        raise Misuse(f"--peers-gguf {asked.peers_gguf}: no such file")
    if asked.peerload is not None and asked.gguf is None:
        raise Misuse("--gguf MODEL: which GGUF file?")
    more = _more(asked)
    found = catalogue.find(names, kept.home(), asked.gguf, _say, install=asked.install)
    for name, reason in found.left_out.items():
        _say(f"{name}: left out: {reason}")
    if asked.peerload is None:
        for name, version in found.versions.items():
            _say(f"{name}: {version}")
        return 1 if found.left_out else 0
    return _measure(asked, found, scenarios, more)


def _scenarios(text: str) -> list[str]:
    asked = [name.strip() for name in text.split(",") if name.strip()]
    for name in asked:
        if name not in bars.SCENARIOS:
            raise Misuse(f"--scenarios {name}: no such scenario; choose from {', '.join(bars.SCENARIOS)}")
    return asked or list(bars.SCENARIOS)


def _measure(asked: argparse.Namespace, found: Found, scenarios: list[str], more: list[str]) -> int:
    wall = datetime.now(UTC).isoformat(timespec="seconds")
    folder = flags.out_of(asked)
    claim(folder)
    lab = Lab(asked.gguf, folder, found.programs, asked.peerload, asked.threads, asked.rounds)
    with ExitStack() as stack:
        if asked.by_itself:
            lab = replace(lab, cache=stack.enter_context(first_start.cache()))
            _say(f"first start: {first_start.until_ready(lab.headrace(*more)):.1f} s until it was ready")
        lab = replace(lab, peers_model=_theirs(asked, lab))
        peers = {name: start for name, start in lab.peers().items() if name in found.versions}
        servers: dict[str, busy.START] = {HEADRACE: lambda: lab.headrace(*more)}
        if asked.everything_off:
            off = standing.off(HEADRACE)
            servers[off] = lambda: lab.headrace(*exhibits.everything_off(), *more, name=off)
        servers |= peers
        rounds = busy.measure(lab, servers, scenarios, asked.seconds, beside.client(asked.peerload, scenarios))
        made = _table(asked, lab, found, rounds, list(servers), scenarios, wall)
    tables.write(folder, made)
    busy.keep(folder / "bars", made, rounds, scenarios)
    print(tables.markdown(made), "", busy.report(rounds, scenarios), sep="\n")
    _say(f"in {folder}")
    if all("failed" in result for round_ in rounds for result in round_.values()):
        raise Fault(f"no server finished a round: their logs are in {folder}")
    return 0


def _theirs(asked: argparse.Namespace, lab: Lab) -> Path | None:
    """Another file for the peers; None: the same. Raises Fault: ours chose no other."""
    if asked.peers_gguf != CHOSEN or lab.cache is None:
        return Path(asked.peers_gguf) if asked.peers_gguf else None
    file = first_start.chosen(lab.cache, asked.gguf)
    if file == asked.gguf:
        raise Fault(f"--peers-gguf {CHOSEN}: ours serves the file as it is: the table without that flag is this one")
    _say(f"the peers serve {file.name}, which ours chose")
    return file


def _table(
    asked: argparse.Namespace,
    lab: Lab,
    found: Found,
    rounds: list[dict[str, Any]],
    servers: list[str],
    scenarios: list[str],
    wall: str,
) -> Table:
    installed, ours = versions(), [name for name in servers if name in (HEADRACE, standing.off(HEADRACE))]
    names = {
        str(asked.gguf): "MODEL",
        str(lab.theirs): "MODEL" if lab.theirs == asked.gguf else "OTHER",
        str(lab.folder): "DIR",
        str(asked.peerload): asked.peerload.name,
        str(found.programs.vllm_weights): "WEIGHTS",
        str(lab.cache): "CACHE",
    }
    return Table(
        verb="peers",
        wall=wall,
        command=shown(asked.command, names),
        machine=machine(),
        versions={**dict.fromkeys(ours, installed.get(HEADRACE, "–")), "python": installed["python"], **found.versions},
        columns=standing.columns(servers, HEADRACE),
        rows=tuple(standing.rows(rounds, servers, HEADRACE, scenarios)),
        commands=commands(lab.folder, servers, names),
        notes=tuple(notes(lab, found, rounds, scenarios)),
        figures={"rounds": standing.figures(rounds), "model": asked.gguf.name, "left_out": dict(found.left_out)},
    )


def _more(asked: argparse.Namespace) -> list[str]:
    try:
        return shlex.split(asked.headrace_args)
    except ValueError as error:
        raise Misuse(f"--headrace-args: {error}") from None


def commands(folder: Path, servers: list[str], names: Mapping[str, str]) -> dict[str, str]:
    """How each server was started in the first round, as its file there says."""
    found = {}
    for name in servers:
        record: dict[str, Any] = json.loads(busy.path(folder, name, 1).read_text())
        words = [f"{key}={value}" for key, value in record["environment"].items() if not key.endswith("_PATH")]
        known = dict(names)
        for flag, value in zip(record["command"], record["command"][1:], strict=False):
            if flag == "--port":
                known[value] = "PORT"
            if value.startswith("tiers.ssd_path="):
                known[value.partition("=")[2]] = "DIR"
        found[name] = shown([*words, *record["command"]], known)
    return found


def notes(lab: Lab, found: Found, rounds: list[dict[str, Any]], scenarios: list[str]) -> list[str]:
    """What a reader of the table has to know."""
    lines = [
        f"MODEL is {lab.model.name}; a cell is the median over rounds ({lab.rounds}), a ratio is taken within a round.",
    ]
    if lab.cache is not None:
        served = first_start.chosen(lab.cache, lab.model)
        what = "the file as it is" if served == lab.model else f"{served.name}, which it made of it"
        lines.append(
            f"`{HEADRACE}` starts by itself: with what its first start, before round 1 and in no figure, measured and "
            f"chose. It serves {what}; CACHE is a folder of this run's own."
        )
    if lab.peers_model is not None:
        lines.append(f"OTHER, which the peers serve, is {lab.peers_model.name}; `vllm` has the weights of MODEL.")
    settings = lab.folder / "server.py.json"
    if settings.is_file():
        model = json.loads(settings.read_text())["model"]
        lines.append(
            "`server.py` reads a file: "
            + ", ".join(f"{key} {value}" for key, value in model.items() if key.startswith(("n_", "threads")))
        )
    if found.programs.vllm_weights is not None:
        lines.append(
            "WEIGHTS are the file's, unpacked into bfloat16, with tokenizer and template: vLLM does not read the file."
        )
    lines += [f"`{name}` was left out: {scrubbed(reason)}" for name, reason in found.left_out.items()]
    return lines + busy_machine(lab.folder) + standing.failures(rounds, scenarios)


def busy_machine(folder: Path) -> list[str]:
    """Which servers began while the machine had far more to do than the server before them leaves behind."""
    lines = []
    for file in sorted(folder.glob("*.json")):
        record: Any = json.loads(file.read_text())
        load = record.get("load_average_before", [0.0])[0]
        if load > CROWDED * len(os.sched_getaffinity(0)):
            lines.append(
                f"round {record['round']}: `{record['server']}`: the load average was {load:.1f} when it began"
            )
    return lines


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
