"""`peers --gateways`: what a gateway adds to the answers of a server whose times are known.

    client ──────────────────────────────► scripted server      direct
    client ──► headrace ─────────────────►      ″               the same streams, in turn, in one round
    client ──► litellm ──────────────────►      ″

Rules: the upstream writes its times into its text, so what it did late is no gateway's; in each round every gateway is
started afresh, and each load goes to all in turn, the order turned by one a round; what is added is a gateway's figure
less that of `direct` in the same round, for client and kernel are in both; a block in which the client was not in
order is asked once more, and then does not count; the gateway has a core of its own where there are two.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_bench.busy import rotate
from headrace_bench.client import runqueue, stamps
from headrace_bench.client.run import Run
from headrace_bench.client.run import run as run_load
from headrace_bench.client.stamps import Heard
from headrace_bench.client.target import Target
from headrace_bench.figures.stats import percentile
from headrace_bench.lab import HEADRACE
from headrace_bench.load.schedule import Planned, Schedule
from headrace_bench.peers import litellm
from headrace_bench.peers.relaying import ALONE, DIRECT, Round
from headrace_bench.server import NotReady, Server, free_port, resident
from headrace_bench.wire import Refused, chat

UPSTREAM = "scripted"
"""The model that a gateway asks its upstream for: no script's name, so the message says which."""
ALIAS = litellm.ALIAS
ALONE_TOKENS = 12
"""A single stream is short, so that there are many first tokens."""
RAMP_S = 1.0
SETTLED_S = 0.5
DRAIN_S = 30.0
WARM_UP = 8
"""Requests before anything is measured: a gateway's first ones load what it had left for later."""
CONFIG = """[engines.up]
kind = "openai"
url = "{url}/v1"
model = "{model}"
flavour = "openai"

[aliases.{alias}]
engines = {{ up = 1 }}
"""
Start = Callable[[str], Server]
"""The upstream's URL → a gateway before it."""


@dataclass(frozen=True, slots=True)
class Load:
    """Streams that are open at any time of a block."""

    streams: int
    rate: float
    """Tokens a second, of each."""
    tokens: int
    """Of a stream."""
    first_s: float
    seconds: float
    """Of the window; before it the streams begin one by one."""

    @property
    def name(self) -> str:
        return ALONE if self.streams == 1 else f"{self.streams} streams"

    @property
    def length(self) -> int:
        """Tokens of a whole stream."""
        return min(self.tokens, ALONE_TOKENS) if self.streams == 1 else self.tokens

    @property
    def period(self) -> float:
        """Seconds that a stream takes upstream."""
        return self.first_s + (self.length - 1) / self.rate

    def script(self, tokens: int) -> str:
        return f"stamped:{self.first_s * 1e3:g}:{1e3 / self.rate:.6g}:{tokens}"


def schedule(load: Load, seed: int) -> Schedule:
    """As many users as streams, each with the next stream as soon as its last has ended.

    The first streams are of all lengths, so that their ends, and with them the beginnings of all that follow, lie
    evenly in time: a hundred streams in step would queue behind each other, which no hundred people do.
    """
    rng = random.Random(seed)
    lengths = [max(1, math.ceil(load.length * (n + 1) / load.streams)) for n in range(load.streams)]
    rng.shuffle(lengths)
    ramp = RAMP_S if load.streams > 1 else 0.0
    warmup = ramp + load.first_s + SETTLED_S
    again = load.streams * (1 + math.ceil(warmup / load.first_s if load.first_s else 1))
    plan = [("warmup", length, ramp * n / load.streams) for n, length in enumerate(lengths)]
    plan += [("warmup", load.length, 0.0)] * again
    plan += [("measure", load.length, 0.0)] * (load.streams * (2 + math.ceil(load.seconds / load.period)))
    requests = tuple(
        Planned(
            index=n,
            at=None,
            messages=({"role": "user", "content": load.script(length)},),
            max_tokens=length,
            prompt_tokens=1,
            phase="warmup" if phase == "warmup" else "measure",
            think=think,
        )
        for n, (phase, length, think) in enumerate(plan)
    )
    return Schedule(
        seed=seed, kind=f"closed {load.streams} users", users=load.streams, duration=load.seconds, warmup=warmup,
        requests=requests,
    )  # fmt: skip


def figures(load: Load, run: Run) -> dict[str, Any]:
    """Of one block, as the client saw it: ms."""
    begin = run.began + run.schedule.warmup
    end = begin + load.seconds
    asked = {planned.index: planned.max_tokens for planned in run.schedule.requests}
    heard = [stamps.heard(record, run.began, asked[record.index]) for record in run.records]
    ttfts = [h.ttft_added for h in heard if h.phase == "measure" and h.ok]
    gaps = [gap for h in heard for gap in h.gaps_added(begin, end)]
    delays = [token.delay for h in heard for token in h.tokens if begin <= token.wrote < end]
    return {
        "ttft": _spread([value for value in ttfts if value is not None], 50, 95),
        "gap": _spread(gaps, 50, 99),
        "delay": _spread(delays, 50, 99),
        "chunks": sum(len(h.tokens) for h in heard),
        "streams": len(heard),
        **_wrong(heard),
        "client": {"cpu": run.health.cpu, "loop_lag_p99_ms": run.health.loop_lag_p99 * 1e3},
        "load_average": run.health.load_average,
        "invalid": list(run.health.invalid),
    }


def _spread(values: Sequence[float], *ps: float) -> dict[str, float | None]:
    found: dict[str, float | None] = {"n": float(len(values))}
    for p in ps:
        value = percentile(values, p)
        found[f"p{p:g}"] = None if value is None else value * 1e3
    found["max"] = max(values) * 1e3 if values else None
    return found


def _wrong(heard: Sequence[Heard]) -> dict[str, int]:
    return {
        "failed": sum(not h.ok for h in heard),
        "lost": sum(h.lost for h in heard),
        "doubled": sum(h.doubled for h in heard),
        "foreign": sum(h.foreign for h in heard),
    }


def block(load: Load, target: Target, seed: int, server: Server | None) -> dict[str, Any]:
    """One load on one server. `server`: the gateway's processes; None: there is none in between."""
    before, waited, began = (server.cpu() if server else 0.0), _waited(server), time.monotonic()
    ran = run_load(target, schedule(load, seed), drain_s=load.period + DRAIN_S, keep_text=True)
    if ran.interrupted:
        raise KeyboardInterrupt
    found = figures(load, ran)
    if server is not None:
        used = server.cpu() - before
        seconds = time.monotonic() - began
        found["cores"] = used / seconds
        without = runqueue.between(waited, _waited(server))
        found["waited"] = None if without is None else without / seconds
        found["cpu_us"] = used / found["chunks"] * 1e6 if found["chunks"] else None
        found["rss_mb"] = sum(map(resident, server.pids())) / 1e6
    return found


def _waited(server: Server | None) -> float | None:
    """Seconds for which its thread could have run and had no core, because others of this machine had it."""
    return None if server is None else runqueue.waited(Path(f"/proc/{server.pids()[0]}/schedstat"))


def upstream(folder: Path, name: str = "upstream") -> Server:
    """The scripted server, with timers alone: it leaves the cores to those who are measured."""
    port = free_port()
    program = [sys.executable, "-m", "headrace_bench.client.scripted", "--port", str(port), "--spin", "0"]
    log = folder / f"{name}.log"
    return Server(name, program, url=f"http://127.0.0.1:{port}", ready="/v1/models", log=log)


def headrace(folder: Path, *flags: str, name: str = HEADRACE) -> Start:
    """Ours, as a gateway: no model of its own."""

    def start(url: str) -> Server:
        port, file = free_port(), folder / f"{name}.toml"
        file.write_text(CONFIG.format(url=url, model=UPSTREAM, alias=ALIAS))
        program = [sys.executable, "-m", "headrace", "serve", "--config", str(file), "--port", str(port), *flags]
        log = folder / f"{name}.log"
        return Server(name, program, url=f"http://127.0.0.1:{port}", ready="/readyz", log=log)

    return start


def proxy(folder: Path, program: Path) -> Start:
    """LiteLLM's."""

    def start(url: str) -> Server:
        port, file = free_port(), folder / "litellm.yaml"
        file.write_text(litellm.config(url, UPSTREAM))
        words = litellm.command(program, file, port)
        log = folder / f"{litellm.NAME}.log"
        return Server(litellm.NAME, words, url=f"http://127.0.0.1:{port}", ready=litellm.READY, log=log)

    return start


@contextlib.contextmanager
def placed(cpus: Sequence[int]) -> Iterator[None]:
    """What is started in here runs on `cpus`; where it ran before afterwards."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cores(pin: bool) -> tuple[list[int], list[int]]:
    """Of the client with the upstream, and of a gateway; both empty: nobody is put anywhere."""
    there = sorted(os.sched_getaffinity(0))
    return (there[:-1], there[-1:]) if pin and len(there) > 1 else ([], [])


def measure(
    folder: Path,
    gateways: Mapping[str, Start],
    loads: Sequence[Load],
    rounds: int,
    *,
    pin: bool = True,
    say: Callable[[str], None] = lambda _: None,
    once: Callable[[Load, Target, int, Server | None], dict[str, Any]] = block,
) -> list[Round]:
    """All rounds: load's name → server → figures; `failed` in place of those of one that did not start."""
    ours, theirs = cores(pin)
    found: list[Round] = []
    for turn in range(rounds):
        with contextlib.ExitStack() as stack:
            stack.enter_context(placed(ours))
            source = stack.enter_context(upstream(folder))
            targets: dict[str, tuple[Target, Server | None]] = {DIRECT: (Target(source.url, UPSTREAM), None)}
            failed: dict[str, str] = {}
            for name in rotate(list(gateways), turn):
                try:
                    with placed(theirs):
                        server = stack.enter_context(gateways[name](source.url))
                    targets[name] = (Target(server.url, ALIAS), server)
                    asyncio.run(warm(server.url))
                except (NotReady, Refused, OSError) as error:
                    failed[name] = f"{type(error).__name__}: {error}"
                    targets.pop(name, None)
            found.append(_round(targets, failed, loads, turn, once, say))
    return found


def _round(
    targets: Mapping[str, tuple[Target, Server | None]],
    failed: Mapping[str, str],
    loads: Sequence[Load],
    turn: int,
    once: Callable[[Load, Target, int, Server | None], dict[str, Any]],
    say: Callable[[str], None],
) -> Round:
    found: dict[str, dict[str, Any]] = {}
    for place, load in enumerate(loads):
        seed = turn * len(loads) + place + 1
        results: dict[str, Any] = {name: {"failed": why} for name, why in failed.items()}
        for name in rotate(list(targets), turn + place):
            result = once(load, *_of(targets[name], seed))
            if result["invalid"]:
                result = once(load, *_of(targets[name], seed))
            results[name] = result
            say(f"round {turn + 1}: {load.name}: {name}: {result['chunks']} chunks")
        found[load.name] = results
    return found


def _of(pair: tuple[Target, Server | None], seed: int) -> tuple[Target, int, Server | None]:
    return pair[0], seed, pair[1]


async def warm(url: str) -> None:
    """Raises Refused: it does not relay."""
    message = [{"role": "user", "content": "stamped:1:1:4"}]
    for _ in range(WARM_UP):
        await chat(url, {"model": ALIAS, "messages": message, "max_tokens": 4}, timeout_s=60.0)
