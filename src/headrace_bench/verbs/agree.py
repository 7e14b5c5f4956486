"""`headrace-bench agree`: the same figures as another client, of the same server, in one run.

Without `--url` both ask a scripted server, whose truth is known; with it, whatever answers there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from pathlib import Path

from headrace_bench import agreement
from headrace_bench.agreement import Agreement
from headrace_bench.client.rehearsal import server
from headrace_bench.client.target import Target
from headrace_bench.fault import Misuse
from headrace_bench.verbs import flags

SCRIPT = "even:120:15:48:150"
"""First token after 120 ms, one every 15 ms, 48 in all, with one gap of 150 ms: a longest gap that is no jitter."""


def add(parser: argparse.ArgumentParser) -> None:
    """The verb's flags."""
    parser.add_argument("--peerload", type=Path, required=True, metavar="FILE", help="the other client, a program")
    parser.add_argument("--url", help="a server; without it a scripted one")
    parser.add_argument("--rounds", type=flags.count, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of each round here")
    flags.add_target(parser, url=False)


def run(asked: argparse.Namespace) -> int:
    """0: both say the same within 3 %; 1: they do not, or one measured nothing."""
    if not asked.peerload.is_file():
        raise Misuse(f"--peerload {asked.peerload}: there is no such file")
    if asked.url is None and (asked.model or asked.key or asked.http2):
        raise Misuse("--model, --key and --http2 are of the server at --url: the scripted one has none of them")
    with contextlib.nullcontext(asked.url) if asked.url else server() as url:
        target = flags.target_of(asked, url) if asked.url else Target(url, SCRIPT)
        target = dataclasses.replace(target, keep_alive=False)  # the other client opens a connection a request
        found = agreement.agree(target, asked.peerload, asked.rounds)
    for name, ratio in (("TTFT p50", found.ttft_ratio), ("longest gap", found.gap_ratio)):
        print(f"{name:12} ours ÷ {asked.peerload.stem}: {ratio:.4f}  (within {agreement.TOLERANCE:.0%})")
    print("they agree" if found.agrees else "they do NOT agree")
    if asked.json is not None:
        _write(asked.json, found)
    return 0 if found.agrees else 1


def _write(file: Path, found: Agreement) -> None:
    rounds = [
        {"ours": dataclasses.asdict(a), "theirs": dataclasses.asdict(b)}
        for a, b in zip(found.ours, found.theirs, strict=True)
    ]
    try:
        file.write_text(json.dumps(rounds, indent=1) + "\n")
    except OSError as error:
        raise Misuse(f"--json {file}: {error.strerror}") from None
