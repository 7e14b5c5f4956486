"""`idle`: what a stream costs a server while nothing comes on it.

    probes ─ open N ─ settle: memory, fds, CPU ─ probes ─ close ─ settle ─ open N again ─ settle ─ close ─ settle
    └──── with a second server beside it that has no streams, each probe of one next to a probe of the other ────┘

Rules: memory is the server's resident set once it no longer moves, so that what was only needed to open is not
counted; a stream counts if the server holds it, which its open files say; a probe is a whole short request on a
connection of its own; two servers are probed in pairs within milliseconds, in drawn order, before too, so that a
machine that is fast for a minute is fast for both; opening once more shows whether what was left behind is used again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace_bench import listener
from headrace_bench.client import holder
from headrace_bench.client.holder import CONNECTING, RATE
from headrace_bench.fault import Fault
from headrace_bench.figures.stats import median, percentile
from headrace_bench.server import resident
from headrace_bench.wire import chat

SILENT = "stamped:86400000:0:1"
"""A scripted upstream says nothing for a day."""
PROBE = "stamped:0:1:4"
"""It begins at once, so that nothing but the relay is in the time."""
SPARE = 512
"""Files that a process needs beside its streams."""
SETTLED = 0.005
"""Between two looks, of the resident set: it no longer moves."""
LOOK_S = 1.0
PATIENCE_S = 60.0
IDLE_S = 5.0
FILES_LEFT = 16
"""Connections that a server may keep for later."""
WARM_UP = 50


@dataclass(frozen=True, slots=True)
class Subject:
    """The server that holds streams."""

    url: str
    model: str
    pids: Sequence[int]
    """Its processes; of the first the open files are counted, of all the memory."""
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of it."""

    streams: int = 10_000
    probes: int = 200
    """0: none, for a server whose streams wait for a place would let a probe wait too."""
    files_each: int = 1
    """Of a stream in the server: 2 for a gateway, whose upstream has one too."""
    silent: str = SILENT
    probe: str = PROBE
    seed: int = 1


def raise_limit(files: int) -> int:
    """Lets this process and what it starts open `files` files, or as many as the system allows; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard) or soft >= files:
        return files
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, max(hard, files)))
    except (ValueError, OSError):  # only a privileged process raises the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, hard), hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def affordable(plan: Plan) -> Plan:
    """As many of its streams as this system's limit of open files leaves room for. Raises Fault: for none."""
    there = raise_limit(plan.streams * plan.files_each + SPARE)
    streams = min(plan.streams, (there - SPARE) // plan.files_each)
    if streams < 1:
        raise Fault(f"{there} open files are allowed, and {SPARE} are needed beside the streams: raise ulimit -Hn")
    return replace(plan, streams=streams)


def allowed(pid: int) -> int | None:
    """Files that a running process may open; None where that cannot be seen."""
    try:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("Max open files"):
            word = line.split()[3]
            return int(word) if word.isdecimal() else None
    return None


def files(pid: int) -> int:
    """Open files of a process; 0 once it is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


class Streams:
    """`count` silent streams in a process of their own; `opened` once all are asked for. End it with `close`."""

    def __init__(self, subject: Subject, plan: Plan) -> None:
        body = request(subject.model, plan.silent, 16)
        env = {**os.environ, holder.BODY: json.dumps({**body, "stream": True})}
        env.pop(holder.KEY, None)
        if subject.key:
            env[holder.KEY] = subject.key
        program = [sys.executable, "-m", "headrace_bench.client.holder", subject.url, str(plan.streams)]
        self._wanted = plan.streams
        self._process = subprocess.Popen(program, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def look(self) -> dict[str, Any]:
        """How many of what. Raises Fault: the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise Fault("the process that holds the streams has ended: its words are above")
        return dict(json.loads(line))

    def opened(self, patience_s: float) -> dict[str, Any]:
        """Waits until all have been sent or refused."""
        end = time.monotonic() + patience_s
        while True:
            seen = self.look()
            if seen["sent"] + seen["failed"] >= self._wanted or time.monotonic() > end:
                return seen
            time.sleep(0.1)

    def close(self) -> dict[str, Any]:
        """Closes all. The last count."""
        out, _ = self._process.communicate(timeout=PATIENCE_S)
        lines = out.splitlines()
        return dict(json.loads(lines[-1])) if lines else {}

    def kill(self) -> None:
        """Whatever happened."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


def request(model: str, message: str, tokens: int) -> dict[str, Any]:
    """A request's body."""
    return {"model": model, "messages": [{"role": "user", "content": message}], "max_tokens": tokens}


def memory(pids: Sequence[int]) -> int:
    """Resident bytes of all of them."""
    return sum(map(resident, pids))


def settled(pids: Sequence[int], sleep: Callable[[float], None] = time.sleep) -> int:
    """Resident bytes once neither they nor the number of open files move, after PATIENCE_S at the latest.

    A client may have sent everything while the server still takes one connection after another.
    """
    before, open_ = memory(pids), files(pids[0])
    for _ in range(int(PATIENCE_S / LOOK_S)):
        sleep(LOOK_S)
        now, still = memory(pids), files(pids[0])
        if abs(now - before) <= SETTLED * before and still == open_:
            return now
        before, open_ = now, still
    return before


def measure(subject: Subject, beside: Subject | None, plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """All figures. `beside`: the same server without streams. Raises Fault, Refused, OSError."""
    rng = random.Random(plan.seed)
    asyncio.run(_warm(subject, beside, plan))
    base = {"rss": settled(subject.pids), "files": files(subject.pids[0])}
    before = asyncio.run(probes(subject, beside, plan, rng))
    cycles = []
    probed: list[tuple[float, float | None]] = []
    for turn in range(2):
        began = time.monotonic()
        streams = Streams(subject, plan)
        try:
            seen = streams.opened(plan.streams / RATE * 5 + PATIENCE_S)
            _taken(subject, base["files"] + plan.files_each * (seen["sent"] - seen["refused"] - seen["ended"]))
            seconds = time.monotonic() - began
            rss, open_files = settled(subject.pids), files(subject.pids[0])
            cpu = _cpu(subject, IDLE_S)
            say(f"{seen['sent']} streams: {rss / 1e6:.0f} MB, {open_files} files, {cpu:.1%} of a core")
            if turn == 0:
                probed = asyncio.run(probes(subject, beside, plan, rng))
            seen = streams.look()
            streams.close()
        finally:
            streams.kill()
        left = _closed(subject, base["files"])
        cycles.append({"rss": rss, "files": open_files, "cpu": cpu, "streams": seen, "seconds": seconds, **left})
        say(f"closed: {left['rss_after'] / 1e6:.0f} MB, {left['files_after']} files")
    return summary(plan, base, cycles, before, probed)


def summary(
    plan: Plan,
    base: Mapping[str, int],
    cycles: Sequence[Mapping[str, Any]],
    before: Sequence[tuple[float, float | None]],
    probed: Sequence[tuple[float, float | None]],
) -> dict[str, Any]:
    """What is told of it. Sizes in bytes, times in ms."""
    first, again = cycles[0], cycles[-1]
    held = (first["files"] - base["files"]) / plan.files_each
    taken = first["rss"] - base["rss"]
    return {
        "streams": plan.streams,
        "held": round(held),
        "refused": first["streams"]["refused"] + first["streams"]["failed"],
        "ended": first["streams"]["ended"],
        "kb_each": taken / held / 1e3 if held > 0 else None,
        "cpu_open": first["cpu"],
        "opened_s": first["seconds"],
        "files_left": again["files_after"] - base["files"],
        "rss_base": base["rss"],
        "rss_open": first["rss"],
        "rss_closed": first["rss_after"],
        "given_back": (first["rss"] - first["rss_after"]) / taken if taken > 0 else None,
        "again_ratio": (again["rss"] - base["rss"]) / taken if taken > 0 else None,
        **_ttft(before, probed),
        "cycles": [dict(cycle) for cycle in cycles],
    }


def _ttft(
    before: Sequence[tuple[float, float | None]], probed: Sequence[tuple[float, float | None]]
) -> dict[str, float | None]:
    """With a server beside it: the median ratio of a pair, over the same from before; without: of two medians."""
    if not before or not probed:
        return {"ttft_ratio": None, "ttft_before_ms": None, "ttft_open_ms": None}
    if all(other for _, other in [*before, *probed]):
        was = median([own / other for own, other in before if other])
        ratio = median([own / other for own, other in probed if other]) / was
    else:
        ratio = median([own for own, _ in probed]) / median([own for own, _ in before])
    found: dict[str, float | None] = {"ttft_ratio": ratio}
    for name, pairs in (("before", before), ("open", probed)):
        times = [own * 1e3 for own, _ in pairs]
        found[f"ttft_{name}_ms"] = median(times)
        found[f"ttft_{name}_p95_ms"] = percentile(times, 95)
    return found


async def probes(
    subject: Subject, beside: Subject | None, plan: Plan, rng: random.Random
) -> list[tuple[float, float | None]]:
    """Pairs of TTFT, seconds: here, and at the server beside it."""
    found: list[tuple[float, float | None]] = []
    for _ in range(plan.probes):
        if beside is None:
            found.append((await ttft(subject, plan), None))
        elif rng.random() < 0.5:
            own = await ttft(subject, plan)
            found.append((own, await ttft(beside, plan)))
        else:
            other = await ttft(beside, plan)
            found.append((await ttft(subject, plan), other))
    return found


async def ttft(subject: Subject, plan: Plan) -> float:
    """Of one short request. Raises Refused, OSError."""
    answer = await chat(subject.url, request(subject.model, plan.probe, 4), timeout_s=PATIENCE_S, key=subject.key)
    if not answer.stamps:
        raise Fault("an answer without text: there is nothing to time")
    return answer.stamps[0]


async def _warm(subject: Subject, beside: Subject | None, plan: Plan) -> None:
    for _ in range(WARM_UP if plan.probes else 0):
        await ttft(subject, plan)
        if beside is not None:
            await ttft(beside, plan)


def _cpu(subject: Subject, seconds: float) -> float:
    """Cores."""
    before, began = listener.cpu(subject.pids[0]) or 0.0, time.monotonic()
    time.sleep(seconds)
    return ((listener.cpu(subject.pids[0]) or 0.0) - before) / (time.monotonic() - began)


def _taken(subject: Subject, wanted: int) -> None:
    """Waits until the server has as many files open: a client has sent everything while it still takes connections."""
    end = time.monotonic() + PATIENCE_S
    while files(subject.pids[0]) < wanted and time.monotonic() < end:
        time.sleep(0.05)


def _closed(subject: Subject, base: int) -> dict[str, int]:
    """Once the server has let go of the files, or PATIENCE_S have passed."""
    end = time.monotonic() + PATIENCE_S
    while files(subject.pids[0]) > base + FILES_LEFT and time.monotonic() < end:
        time.sleep(0.1)
    rss = settled(subject.pids)
    return {"rss_after": rss, "files_after": files(subject.pids[0])}


def pace() -> str:
    """How streams are opened, in words."""
    return f"{RATE:g} a second, {CONNECTING} at once at most"
