"""`peers --gateways`: what Headrace adds as a gateway, beside LiteLLM and beside nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from headrace_bench import gateways
from headrace_bench.fault import Fault, Misuse
from headrace_bench.gateways import Load
from headrace_bench.lab import HEADRACE
from headrace_bench.peers import catalogue, kept, litellm, relaying
from headrace_bench.peers.catalogue import Found
from headrace_bench.peers.relaying import DIRECT
from headrace_bench.report import table as tables
from headrace_bench.report.folder import claim
from headrace_bench.report.machine import machine, versions
from headrace_bench.report.table import Table, scrubbed, shown
from headrace_bench.verbs import flags

ROUNDS, SECONDS = 5, 10.0


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of its own, beside those of `peers`."""
    group = parser.add_argument_group("gateways")
    group.add_argument("--gateways", action="store_true", help="gateways before a scripted upstream, not servers")
    group.add_argument("--streams", default="1,20,100", metavar="N,…", help="streams at once")
    group.add_argument("--rate", type=flags.number(0, above=True), default=30.0, help="tokens a second, of a stream")
    group.add_argument("--tokens", type=flags.count, default=150, help="of a stream")
    group.add_argument("--first", type=flags.number(0), default=200.0, metavar="MS", help="until the first token")
    group.add_argument("--no-pin", action="store_true", help="do not give the gateway a core of its own")
    group.add_argument("--without-headrace", action="store_true", help="only the others")


def run(asked: argparse.Namespace) -> int:
    """Prints the table, and leaves it in the folder. 1: a figure that has a bar was not measured. Raises Fault."""
    for flag, file in (("--gguf", asked.gguf), ("--peerload", asked.peerload)):
        if file is not None:
            raise Misuse(f"{flag}: gateways are measured before a scripted upstream: leave it out")
    names = catalogue.named(asked.only, catalogue.GATEWAYS)
    loads = loads_of(asked)
    found = catalogue.find(names, kept.home(), None, _say, install=asked.install)
    for name, reason in found.left_out.items():
        _say(f"{name}: left out: {reason}")
    return _measure(asked, found, loads)


def loads_of(asked: argparse.Namespace) -> list[Load]:
    """Raises Misuse."""
    words = [word.strip() for word in asked.streams.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and 0 < int(word) <= 5000 for word in words):
        raise Misuse(f"--streams {asked.streams}: numbers from 1 to 5000, as in 1,100")
    seconds = SECONDS if asked.seconds is None else asked.seconds
    return [Load(int(word), asked.rate, asked.tokens, asked.first / 1e3, seconds) for word in words]


def _measure(asked: argparse.Namespace, found: Found, loads: Sequence[Load]) -> int:
    wall = datetime.now(UTC).isoformat(timespec="seconds")
    folder = flags.out_of(asked)
    claim(folder)
    folder = folder.resolve()
    starts: dict[str, gateways.Start] = {}
    if not asked.without_headrace:
        starts[HEADRACE] = gateways.headrace(folder, *asked.headrace_args.split())
    if litellm.NAME in found.places:
        starts[litellm.NAME] = gateways.proxy(folder, found.places[litellm.NAME])
    if not starts:
        raise Fault("no gateway to measure: --install brings LiteLLM")
    names = {str(folder): "DIR", str(asked.out): "DIR"}
    told = commands(folder, starts, names)  # before, for it writes their files
    rounds = gateways.measure(folder, starts, loads, asked.rounds or ROUNDS, pin=not asked.no_pin, say=_say)
    (folder / "rounds.json").write_text(json.dumps(rounds, indent=1))
    servers = [DIRECT, *starts]
    installed = versions()
    made = Table(
        verb="gateways",
        wall=wall,
        command=shown(asked.command, names),
        machine=machine(),
        versions={"python": installed["python"], HEADRACE: installed.get(HEADRACE, "–"), **found.versions},
        columns=relaying.columns(servers, HEADRACE),
        rows=tuple(relaying.rows(rounds, [load.name for load in loads], servers, HEADRACE)),
        commands=told,
        notes=(*notes(asked, loads, found, list(starts)), *relaying.notes(rounds)),
        figures={"rounds": rounds, "left_out": dict(found.left_out)},
    )
    tables.write(folder, made)
    print(tables.markdown(made))
    _say(f"in {folder}")
    return int(any(row[-1].endswith("not measured") for row in made.rows))


def commands(folder: Path, starts: Mapping[str, gateways.Start], names: Mapping[str, str]) -> dict[str, str]:
    """How each is started; the upstream's address is only in its file."""
    found = {}
    for name, start in starts.items():
        server = start("http://127.0.0.1:1")
        known = {**names, server.url.rpartition(":")[2]: "PORT"}
        words = [
            word for word in server.command if word not in ("env", "-i") and not word.startswith(("PATH=", "HOME="))
        ]
        found[name] = shown(words, known)
    return found


def notes(asked: argparse.Namespace, loads: Sequence[Load], found: Found, starts: Sequence[str]) -> list[str]:
    """What was asked of whom."""
    last = loads[-1]
    pinned = all(gateways.cores(not asked.no_pin))
    lines = [
        f"Each stream: the first token after {last.first_s * 1e3:g} ms, then {last.rate:g} a second, {last.tokens} "
        f"tokens (of one stream alone: {min(last.tokens, gateways.ALONE_TOKENS)}), a chunk each; "
        f"{last.seconds:g} s a block, {asked.rounds or ROUNDS} rounds.",
        "`direct` is no gateway: its cells are what client, kernel and loopback take; the others' are what is added to "
        "that, within a round; a cell is the median over rounds. The upstream writes the time of each write into the "
        "text, so that what it did late is in no cell.",
        "Client and upstream share what cores there are beside the gateway's own."
        if pinned
        else "Client, upstream and gateway share all cores.",
    ]
    if litellm.NAME in starts:
        lines.append(
            "`litellm` has one worker, one model and nothing else: no database, no keys, no logging, no callbacks, no "
            "retries; its price list is the one in the package, and it is told of no network."
        )
    if HEADRACE in starts:
        lines.append(f"`{HEADRACE}` has one alias with one engine of kind `openai`, and its defaults.")
    return lines + [f"`{name}` was left out: {scrubbed(reason)}" for name, reason in found.left_out.items()]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
