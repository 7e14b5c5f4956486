"""Flags that several verbs have, and what they mean.

Rules: a flag has one name and one default in all verbs; what it says is read here and nowhere else; a number that
cannot be is refused before anything is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from headrace_bench.client.target import Target, check
from headrace_bench.figures import slo
from headrace_bench.load import arrivals as arriving
from headrace_bench.load import workload as working
from headrace_bench.load.arrivals import Arrivals
from headrace_bench.load.draw import draw
from headrace_bench.load.schedule import Schedule
from headrace_bench.load.workload import Workload

KEY = "HEADRACE_BENCH_KEY"
"""A key in a command line is seen by everybody on the machine."""
SOAK_S = 600.0


def number(least: float, most: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """A flag's type: a number in a range."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not least <= value <= most or (above and value == least):
            wanted = f"{'above' if above else 'of at least'} {least:g}" + (f", at most {most:g}" if most < 1e9 else "")
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {wanted}")
        return value

    return read


def count(text: str) -> int:
    """A flag's type: a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def seed(text: str) -> int:
    """A flag's type: what a generator can be seeded with."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def add_target(parser: argparse.ArgumentParser, url: bool = True) -> None:
    """Where requests go, and how. `url` False: the verb has its own flags for that."""
    group = parser.add_argument_group("the server")
    if url:
        group.add_argument("--url", required=True, help="http://host:port of an OpenAI-compatible server")
    group.add_argument("--model", default="", help="a model's name; needless where there is one only")
    group.add_argument("--key", help=f"API key; better in {KEY}")
    group.add_argument("--http2", action="store_true", help="HTTP/2 instead of HTTP/1.1")
    group.add_argument("--new-connections", action="store_true", help="a new connection for each request")
    group.add_argument(
        "--timeout", type=number(0, above=True), default=60.0, metavar="S", help="give up after so much silence (60)"
    )
    group.add_argument("--no-timings", action="store_true", help="do not ask a Headrace for its own timeline")


def add_load(parser: argparse.ArgumentParser, arrivals: str = "poisson:2") -> None:
    """What is sent, and when."""
    group = parser.add_argument_group("the load")
    group.add_argument(
        "--arrivals", default=arrivals, metavar="KIND:…",
        help=f"{', '.join(arriving.KINDS)}; {arrivals} by default",
    )  # fmt: skip
    group.add_argument(
        "--workload", metavar="KIND:…",
        help=f"{', '.join(working.KINDS)}; chat by default, of a trace its own lengths",
    )  # fmt: skip
    group.add_argument(
        "--duration", type=number(0, above=True), metavar="S", help="the window (60; of a trace all of it)"
    )
    group.add_argument("--warmup", type=number(0), default=10.0, metavar="S", help="before the window (10)")
    group.add_argument("--drain", type=number(0), default=30.0, metavar="S", help="wait for answers after it (30)")
    group.add_argument("--seed", type=seed, default=1, help="another one draws another load (1)")
    group.add_argument(
        "--hang-ups", type=number(0, 1), default=0.0, metavar="SHARE", help="requests that leave before their answer"
    )
    group.add_argument("--ignore-eos", action="store_true", help="ask for answers of full length")
    group.add_argument("--requests", type=count, metavar="N", help="how many a closed loop may use")


def add_slo(parser: argparse.ArgumentParser) -> None:
    """What counts as good."""
    parser.add_argument(
        "--slo", default="chat", metavar="NAME|ttft=MS,…",
        help=f"{', '.join(slo.PROFILES)}, or limits in ms: ttft=500,tpot=50,stall=250,e2e=3000 (chat)",
    )  # fmt: skip


def add_out(parser: argparse.ArgumentParser) -> None:
    """Where the result goes."""
    parser.add_argument("--out", type=Path, metavar="DIR", help="a folder that is not there yet (results/TIME-VERB)")


def out_of(asked: argparse.Namespace) -> Path:
    """The folder, not made yet."""
    out: Path | None = asked.out
    return out or Path("results") / f"{time.strftime('%Y%m%d-%H%M%S')}-{asked.verb}"


def key_of(asked: argparse.Namespace) -> str | None:
    """The API key: of the flag, or of the environment."""
    return asked.key or os.environ.get(KEY) or None


def plain_target_of(asked: argparse.Namespace, url: str | None = None) -> Target:
    """As the flags say; nobody was asked. `url` stands for `--url`."""
    return Target(
        url=url or asked.url,
        model=asked.model,
        key=key_of(asked),
        http2=asked.http2,
        keep_alive=not asked.new_connections,
        timeout_s=asked.timeout,
        timings=not asked.no_timings,
    )


def target_of(asked: argparse.Namespace, url: str | None = None) -> Target:
    """The same, and the server was asked whether it is there and has the model. Fault where not."""
    return asyncio.run(check(plain_target_of(asked, url)))


def slo_of(asked: argparse.Namespace) -> slo.Slo:
    """What counts as good."""
    return slo.parse(asked.slo)


def arrivals_of(asked: argparse.Namespace) -> Arrivals:
    """When requests come."""
    return arriving.parse(asked.arrivals)


def workload_of(asked: argparse.Namespace, arrivals: Arrivals) -> Workload:
    """What they ask."""
    default = "trace" if isinstance(arrivals, arriving.Trace) else "chat"
    return working.parse(default if asked.workload is None else asked.workload)


def schedule_of(asked: argparse.Namespace, seed: int | None = None) -> Schedule:
    """As the flags say; drawn anew for another seed."""
    given = arrivals_of(asked)
    duration: float | None = asked.duration
    if duration is None and asked.arrivals.startswith("soak:"):
        duration = SOAK_S
    return draw(
        given,
        workload_of(asked, given),
        seed=asked.seed if seed is None else seed,
        duration=duration,
        warmup=asked.warmup,
        hang_ups=asked.hang_ups,
        ignore_eos=asked.ignore_eos,
        requests=asked.requests,
    )
