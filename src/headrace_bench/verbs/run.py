"""`run`: one load on one server, measured, and a folder with all of it.

    flags ─▶ server there? ─▶ schedule ─▶ load, written down as it goes ─▶ summary, table, page

Rules: what is wrong with the flags is said before a server is asked, what is wrong with the server before a folder is
made; whatever ends the load, what was measured up to then is in the folder.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from headrace_bench.client import run as running
from headrace_bench.figures.summary import Summary, summarise
from headrace_bench.record import Record
from headrace_bench.report import console, folder, page
from headrace_bench.verbs import flags

FAIL_ABOVE = 0.01
INTERRUPTED = 130


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    flags.add_target(parser)
    flags.add_load(parser)
    flags.add_slo(parser)
    flags.add_out(parser)
    parser.add_argument(
        "--fail-above", type=flags.number(0, 1), default=FAIL_ABOVE, metavar="SHARE",
        help=f"exit with 1 when more of the requests fail ({FAIL_ABOVE:g})",
    )  # fmt: skip


def run(asked: argparse.Namespace) -> int:
    """0 measured; 1 the run does not count, or too many requests failed; 130 interrupted. Raises Fault."""
    slo = flags.slo_of(asked)
    plan = flags.schedule_of(asked)
    target = flags.target_of(asked)
    wall, path = running.now(), flags.out_of(asked)
    config = folder.config(
        verb="run", command=asked.command, url=target.url, model=target.model, seed=plan.seed, wall=wall,
        flags={name: value for name, value in vars(asked).items() if name not in ("verb", "command")},
        notes=plan.notes, server="Headrace" if target.headrace else None,
    )  # fmt: skip
    with folder.Journal(path, config, plan) as journal, console.Progress(plan) as progress:

        def keep(record: Record) -> None:
            journal(record)
            progress(record)

        done = running.run(target, plan, drain_s=asked.drain, on_record=keep, wall=wall)
    summary = summarise(plan, done.records, done.health, slo)
    journal.finish(done.records, done.health, summary)
    show = Console(highlight=False)
    show.print(console.final(summary))
    try:
        show.print(str(page.make(path)), soft_wrap=True)
    except ModuleNotFoundError as missing:
        # The measurement is done and kept; `report` makes its page once the library is there.
        print(f"headrace-bench: no page: it needs {missing.name}: pip install 'headrace[bench]'", file=sys.stderr)
    return status(done, summary, asked.fail_above)


def status(done: running.Run, summary: Summary, fail_above: float) -> int:
    """What a script learns from it."""
    if done.interrupted:
        return INTERRUPTED
    return 1 if done.health.invalid or failed_share(summary) > fail_above else 0


def failed_share(summary: Summary) -> float:
    """Of the window's requests, those that failed; who hung up as planned did not. All of none is a failure."""
    counts = summary.counts
    left = counts.by_outcome.get("hung_up", 0)
    asked = counts.scheduled - left
    return (counts.failed - left) / asked if asked else 0.0 if left else 1.0
