"""The client's own health during a load, and whether what it measured counts.

Rules: only signals of the client and its machine decide, never a result of the server's; a run past the gate is kept
and marked, not hidden. The gate: the load is sent late, the event loop wakes late, requests were not sent at the rate
asked for, or the client has used up its core. Each of them ends up in the server's figures.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from headrace_bench.figures.stats import percentile
from headrace_bench.load.schedule import Schedule
from headrace_bench.record import Health, Record

LAG_S = 0.005
LAG_SHARE = 0.05
"""Of the median TTFT: a lag of 5 ms is much beside 20 and little beside 2,000."""
RATE_SHARE = 0.005
CPU = 0.9
"""Of one core: the client is one thread."""
EVERY_S = 0.02
"""Between two samples of the loop's lag."""
_STAT = Path("/proc/stat")
_STEAL = 7
"""Its column among the times of all CPUs: user, nice, system, idle, iowait, irq, softirq, steal."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What `Monitor` saw. Seconds."""

    loop_lags: tuple[float, ...]
    cpu: float
    gc_pauses: tuple[float, ...]
    load_average: float
    steal: float | None


class Monitor:
    """Watches the event loop, the process and the machine while it is entered."""

    def __init__(self, every_s: float = EVERY_S, stat: Callable[[], str] = _STAT.read_text) -> None:
        self._every = every_s
        self._stat = stat
        self._lags: list[float] = []
        self._pauses: list[float] = []
        self._collecting: float | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._threshold = gc.get_threshold()

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._before = _cpu_times(self._stat)
        # What is there now, the schedule first, will not become garbage: no collection needs to walk through it.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        gc.callbacks.append(self._collected)
        self._cpu, self._wall = time.process_time(), time.monotonic()
        self._sample(None)
        return self

    def __exit__(self, *_: object) -> None:
        self._cpu, self._wall = time.process_time() - self._cpu, time.monotonic() - self._wall
        if self._handle is not None:
            self._handle.cancel()
        gc.callbacks.remove(self._collected)
        gc.set_threshold(*self._threshold)
        gc.unfreeze()

    def machine(self) -> Machine:
        """Once it was left."""
        return Machine(
            loop_lags=tuple(self._lags),
            cpu=self._cpu / self._wall if self._wall > 0 else 0.0,
            gc_pauses=tuple(self._pauses),
            load_average=os.getloadavg()[0],
            steal=_share_stolen(self._before, _cpu_times(self._stat)),
        )

    def _sample(self, due: float | None) -> None:
        now = time.monotonic()
        if due is not None:
            self._lags.append(max(0.0, now - due))
        self._handle = self._loop.call_later(self._every, self._sample, now + self._every)

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.monotonic()
        elif self._collecting is not None:
            self._pauses.append(time.monotonic() - self._collecting)


def judge(schedule: Schedule, records: Sequence[Record], machine: Machine, until: float | None = None) -> Health:
    """How the client did. `until`: seconds at which the load was interrupted; what was due later was not asked for."""
    begin, end = schedule.warmup, schedule.warmup + schedule.duration
    window = (end if until is None else min(end, until)) - begin
    timed = [record for record in records if record.scheduled is not None and record.phase == "measure"]
    lags = [record.dispatched - record.scheduled for record in timed if record.scheduled is not None]
    asked = sent = None
    if schedule.users is None and window > 0:
        due = [planned.at for planned in schedule.requests if planned.at is not None and planned.phase == "measure"]
        asked = sum(at < begin + window for at in due) / window
        sent = sum(record.dispatched < begin + window for record in timed) / window
    loop = machine.loop_lags or (0.0,)
    health = Health(
        lag_p50=percentile(lags, 50),
        lag_p99=percentile(lags, 99),
        lag_max=max(lags, default=None),
        loop_lag_p99=percentile(loop, 99) or 0.0,
        loop_lag_max=max(loop),
        cpu=machine.cpu,
        gc_pauses=len(machine.gc_pauses),
        gc_longest=max(machine.gc_pauses, default=0.0),
        load_average=machine.load_average,
        steal=machine.steal,
        asked_rate=asked,
        sent_rate=sent,
    )
    return _gated(health, _median_ttft(records))


def with_reasons(health: Health, *reasons: str) -> Health:
    """The same, and more reasons why the run does not count."""
    return _replaced(health, (*health.invalid, *reasons))


def _gated(health: Health, ttft: float | None) -> Health:
    limit = max(LAG_S, LAG_SHARE * (ttft or 0.0))
    found = []
    if health.lag_p99 is not None and health.lag_p99 > limit:
        found.append(
            f"requests were sent late: p99 {_ms(health.lag_p99)} after their time, the limit is {_ms(limit)}; "
            "ask for a lower rate, or give the client a core of its own"
        )
    if health.loop_lag_p99 > limit:
        found.append(
            f"the client's event loop woke late: p99 {_ms(health.loop_lag_p99)}, the limit is {_ms(limit)}; "
            "its stamps are late by as much"
        )
    asked, sent = health.asked_rate, health.sent_rate
    if asked and sent is not None and abs(sent / asked - 1) > RATE_SHARE:
        found.append(f"{sent:.2f} requests/s were sent of {asked:.2f} asked for: more than {RATE_SHARE:.1%} apart")
    if health.cpu > CPU:
        found.append(f"the client used {health.cpu:.0%} of a core: it was measured too, not only the server")
    return _replaced(health, tuple(found))


def _replaced(health: Health, invalid: tuple[str, ...]) -> Health:
    return msgspec.structs.replace(health, invalid=invalid)


def _median_ttft(records: Sequence[Record]) -> float | None:
    """Of the measured, from the scheduled time where there is one."""
    found = [
        record.chunks[0].at - (record.dispatched if record.scheduled is None else record.scheduled)
        for record in records
        if record.chunks and record.phase == "measure"
    ]
    return percentile(found, 50)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _cpu_times(stat: Callable[[], str]) -> tuple[int, ...] | None:
    """Of all CPUs together, in ticks since the machine started; None where the system has no such file."""
    try:
        return tuple(int(field) for field in stat().partition("\n")[0].split()[1:])
    except (OSError, ValueError):
        return None


def _share_stolen(before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> float | None:
    if before is None or after is None or min(len(before), len(after)) <= _STEAL:
        return None
    passed = [late - early for early, late in zip(before, after, strict=True)][: _STEAL + 1]
    return passed[_STEAL] / sum(passed) if sum(passed) > 0 else None
