"""A golden case, played: the real client against the scripted server, and what both say of it.

    case ─► schedule ─► drive ─► records ─► figures, summary ─► found ─┐
                          └► /writes/ID of each ─► times ─► wanted ────┴─► differences

Rules: a time may differ by 2 ms from what the server's own stamps say, all else not at all; a case that differs is
played again only if the machine was to blame by a witness of its own: the server's log says that a write was over 1 ms
late, or the kernel's that this thread waited over 1 ms for a processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace_bench.client import runqueue
from headrace_bench.client.driver import drive
from headrace_bench.client.golden import SCRIPTS, Case, Times
from headrace_bench.client.health import Monitor, judge
from headrace_bench.client.pool import Pool
from headrace_bench.client.request import Client
from headrace_bench.client.scripted import Writes
from headrace_bench.client.target import Target, fetch
from headrace_bench.fault import Fault
from headrace_bench.figures.definitions import figures
from headrace_bench.figures.slo import Slo
from headrace_bench.figures.stats import percentile
from headrace_bench.figures.summary import encode, summarise
from headrace_bench.load.schedule import Planned, Schedule
from headrace_bench.record import Health, Record

TOLERANCE_S = 0.002
NOISE_S = 0.001
TRIES = 3
ANY = Slo("any")
_played = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Played:
    """One try of a case. Times in seconds."""

    case: Case
    wanted: Mapping[str, Any]
    found: Mapping[str, Any]
    server_late: float
    """The worst write of the server, against its script."""
    waited: float | None
    """The client's thread waited so long for a processor, in all; None where the kernel does not say."""

    @property
    def differences(self) -> list[str]:
        """What was not found as it was wanted; empty: the case is passed."""
        return [name for name, value in self.wanted.items() if not agrees(value, self.found.get(name))]

    @property
    def noisy(self) -> bool:
        """The machine was late by its own account."""
        return self.server_late > NOISE_S or (self.waited or 0.0) > NOISE_S


async def rehearse(case: Case, target: Target, tries: int = TRIES) -> list[Played]:
    """Plays `case`, and again while it differs on a noisy machine: all tries, the last one counts."""
    played: list[Played] = []
    while not played or (played[-1].differences and played[-1].noisy and len(played) < tries):
        played.append(await play(case, target))
    return played


async def play(case: Case, target: Target) -> Played:
    """Once. Raises Fault if the server's log is not there."""
    schedule = _schedule(case, next(_played))
    before = runqueue.waited()
    start = time.monotonic()

    def clock() -> float:
        return time.monotonic() - start

    client = Client(target, clock)
    try:
        with Monitor() as monitor:
            records = await drive(schedule, client, clock=clock, drain_s=5.0)
    finally:
        await client.close()
    waited = runqueue.between(before, runqueue.waited())
    logs = await _logs(records, target)
    # When it was due is the case's word, not the record's: a client that moves its schedule is to be found out.
    times = [
        Times(case.asks[record.index][0], log.asked - start, tuple(at - start for at in log.at))
        for record, log in zip(records, logs, strict=True)
    ]
    return Played(
        case=case,
        wanted=case.wants(times),
        found=facts(schedule, records, judge(schedule, records, monitor.machine())),
        server_late=_lateness(case, times),
        waited=waited,
    )


def facts(schedule: Schedule, records: Sequence[Record], health: Health) -> dict[str, Any]:
    """All that a case can want, by the names it has there. Seconds."""
    summary = summarise(schedule, records, health, ANY)
    share = summary.attainment.attainment
    each = [figures(record) for record in records]
    whole = [one for one in each if one.whole]
    ttfts = [one.ttft for one in whole if one.ttft is not None]
    ends = [one.e2e for one in whole if one.e2e is not None]
    tpots = [one.tpot for one in whole if one.tpot is not None]
    found: dict[str, Any] = {
        "requests": len(records),
        "lag": max((record.dispatched - (record.scheduled or 0.0) for record in records), default=0.0),
        "completed": summary.counts.completed,
        "failed": summary.counts.failed,
        "by_outcome": summary.counts.by_outcome,
        "by_status": summary.counts.by_status,
        "output_tokens": summary.counts.tokens,
        "attained_percent": None if share is None else round(share.value * 100),
        "counts": {"ttft": summary.figures.ttft_ms.count, "tpot": summary.figures.tpot_ms.count},
        "strict_json": strict(encode(summary)),
        "ttfts": tuple(ttfts),
        "late by 25 ms and more": sum(ttft >= 0.025 for ttft in ttfts),
        "ttft_p50": percentile(ttfts, 50),
        "ttft_p99": percentile(ttfts, 99),
        "tpot_p50": percentile(tpots, 50),
        "e2e_p50": percentile(ends, 50),
    }
    if len(each) == 1:
        one = each[0]
        mine = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
        gaps, itl = one.gaps, one.itl_est
        found |= mine | {
            "good": ANY.met(one),
            "ttft": one.ttft if one.whole else None,
            "partial_ttft": None if one.whole else one.ttft,
            "gap_mean": sum(gaps) / len(gaps) if gaps else None,
            "itl_mean": sum(itl) / len(itl) if itl else None,
        }
    return found


def agrees(wanted: Any, found: Any) -> bool:
    """A float is a time in seconds and has the tolerance."""
    if isinstance(wanted, float):
        return isinstance(found, float) and abs(found - wanted) <= TOLERANCE_S
    if isinstance(wanted, tuple):
        return isinstance(found, tuple) and len(wanted) == len(found) and all(map(agrees, wanted, found))
    return bool(wanted == found)


def strict(data: bytes) -> bool:
    """It is JSON without NaN and Infinity."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        json.loads(data, parse_constant=refuse)
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def server(limit_s: float = 600.0) -> Iterator[str]:
    """The scripted server in a process of its own: its URL. Raises Fault if it does not start."""
    command = [sys.executable, "-m", "headrace_bench.client.scripted", "--port", "0", "--limit", f"{limit_s:g}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise Fault("the scripted server did not start: its own words are above")
            yield url
        finally:
            process.terminate()
            process.wait(10)


def _schedule(case: Case, number: int) -> Schedule:
    """A script that stalls is asked for by a new name in each play: each play is a stall of its own."""
    requests = tuple(
        Planned(
            index=index,
            at=at,
            messages=({"role": "user", "content": case.what},),
            max_tokens=32,
            prompt_tokens=8,
            extra={"model": script if SCRIPTS[script].stalls is None else f"{script}#{number}"},
        )
        for index, (at, script) in enumerate(case.asks)
    )
    last = max((at for at, _ in case.asks), default=0.0)
    return Schedule(
        seed=0, kind=f"golden case {case.name}", users=None, duration=last + 0.001, warmup=0.0, requests=requests
    )


async def _logs(records: Sequence[Record], target: Target) -> list[Writes]:
    pool = Pool(target.place, time.monotonic)
    found = []
    try:
        async with asyncio.timeout(10.0):
            for record in records:
                status, body = await fetch(pool, target, "GET", f"/writes/{record.request_id}")
                if status != 200:
                    raise Fault(f"{target.place}: no log of request {record.request_id}: not the scripted server")
                found.append(msgspec.json.decode(body, type=Writes))
    finally:
        await pool.close()
    return found


def _lateness(case: Case, times: Sequence[Times]) -> float:
    """The worst write, against the script, in seconds."""
    late = 0.0
    for (_, name), time_ in zip(case.asks, times, strict=True):
        script = SCRIPTS[name]
        base = time_.asked if script.stalls is None else time_.wrote[0] - script.pieces[0][0]
        late = max(late, *(at - base - piece for at, (piece, _) in zip(time_.wrote, script.pieces, strict=False)))
    return late
