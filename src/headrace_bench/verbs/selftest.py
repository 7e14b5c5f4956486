"""`headrace-bench selftest`: is what this client says true on this machine, and up to which load?

Golden cases first: scripted answers whose figures are known, through the real client. Then the client's own ceiling,
against the same server. Exit status 1 if a case differs.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from typing import Any

import uvloop

from headrace_bench.client import ceiling
from headrace_bench.client.golden import CASES, Case
from headrace_bench.client.rehearsal import NOISE_S, TOLERANCE_S, TRIES, Played, rehearse, server
from headrace_bench.client.target import Target
from headrace_bench.fault import Misuse

MOST_S = 600.0
"""Of a step: its requests are drawn beforehand."""
TIMES_SHOWN = 3
"""Of a long row of times."""


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.add_argument("--only", default="", metavar="CASES", help="golden cases, comma separated: a,b,OC-59")
    parser.add_argument("--quick", action="store_true", help="leave the client's ceiling out")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each step of the ceiling")


def run(asked: argparse.Namespace) -> int:
    """0: every case is as it should be. Raises Misuse, Fault."""
    cases = _chosen(asked.only)
    if not 0 < asked.seconds <= MOST_S:
        raise Misuse(f"--seconds {asked.seconds:g}: give a number above 0, and at most {MOST_S:g}")
    with server() as url:
        print(_preface(), flush=True)
        target = Target(url, "scripted")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            failed = sum(not runner.run(_case(case, target)) for case in cases)
        print(f"{len(cases) - failed} of {len(cases)} cases are as they should be", flush=True)
        if not asked.quick:
            print(ceiling.measure(target, asked.seconds, lambda line: print(line, flush=True)))
    return 1 if failed else 0


def _chosen(only: str) -> tuple[Case, ...]:
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    known = {case.name.lower(): case for case in CASES}
    for name in wanted:
        if name.lower() not in known:
            raise Misuse(f"--only {name}: there are {', '.join(case.name for case in CASES)}")
    return tuple(known[name.lower()] for name in wanted) or CASES


def _preface() -> str:
    return (
        f"Each time is compared with when the scripted server really wrote, by its own stamps: ±{TOLERANCE_S * 1e3:g} "
        f"ms.\nA case that differs is played again, {TRIES} times at most, only if a write was over {NOISE_S * 1e3:g} "
        f"ms late or this thread waited over {NOISE_S * 1e3:g} ms for a processor."
    )


async def _case(case: Case, target: Target) -> bool:
    tries = await rehearse(case, target)
    for played in tries:
        print(line(played), flush=True)
    return not tries[-1].differences


def line(played: Played) -> str:
    """The case, what was found, and beside it what was wanted where that is not the same."""
    case, wrong = played.case, played.differences
    parts = [f"{name} {shown(played.found.get(name))} ({shown(value)})" for name, value in played.wanted.items()]
    noise = f"; server late {played.server_late * 1e3:.2f} ms" if played.server_late > NOISE_S else ""
    if played.waited is not None and played.waited > NOISE_S:
        noise += f"; waited {played.waited * 1e3:.2f} ms for a processor"
    verdict = f"DIFFERS in {', '.join(wrong)}{noise}" if wrong else "ok"
    return f"{case.name:7} {case.what:40} {verdict}\n        found (wanted): {'; '.join(parts)}"


def shown(value: Any) -> str:
    """Times in ms."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value * 1e3:.2f} ms"
    if isinstance(value, tuple):
        more = f", … {len(value)} in all" if len(value) > TIMES_SHOWN + 2 else ""
        return "[" + ", ".join(map(shown, value[:TIMES_SHOWN] if more else value)) + more + "]"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {count}" for name, count in value.items()) or "none"
    return str(value)
