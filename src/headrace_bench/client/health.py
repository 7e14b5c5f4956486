"""The client's own health during a load, and whether what it measured counts.

Rules: only signals of the client and its machine decide, never a result of the server's; a run past the gate is kept
and marked, not hidden. The gate: the load is sent late, the event loop wakes late, requests were not sent at the rate
asked for, or the client has used most of its core. Each of them ends up in the server's figures. All four are of the
window: what the loop and the CPU did while it warmed up and drained would only thin them.
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
import numpy as np

from headrace_bench.figures.stats import percentile
from headrace_bench.load.schedule import Schedule
from headrace_bench.record import Health, Record

LAG_S = 0.005
LAG_SHARE = 0.05
"""Of the median TTFT: a lag of 5 ms is much beside 20 and little beside 2,000."""
RATE_SHARE = 0.005
CPU = 0.7
"""Of one core: the client is one thread, and from there on its requests wait for each other."""
EVERY_S = 0.02
"""Between two samples of the loop's lag."""
_STAT = Path("/proc/stat")
_STEAL = 7
"""Its column among the times of all CPUs: user, nice, system, idle, iowait, irq, softirq, steal."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the client. Seconds."""

    at: float
    """Since the monitor was entered, which is when the load starts."""
    lag: float | None
    """How late the loop's timer fired; None for the looks at the beginning and at the end, which no timer made."""
    cpu: float
    """Used since then."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What `Monitor` saw. Seconds."""

    samples: tuple[Sample, ...]
    """In order of time."""
    gc_pauses: tuple[float, ...]
    load_average: float
    steal: float | None


class Monitor:
    """Watches the event loop, the process and the machine while it is entered."""

    def __init__(self, every_s: float = EVERY_S, stat: Callable[[], str] = _STAT.read_text) -> None:
        self._every = every_s
        self._stat = stat
        self._samples: list[Sample] = []
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
        self._look(time.monotonic(), None)
        if self._handle is not None:
            self._handle.cancel()
        gc.callbacks.remove(self._collected)
        gc.set_threshold(*self._threshold)
        gc.unfreeze()

    def machine(self) -> Machine:
        """Once it was left."""
        return Machine(
            samples=tuple(self._samples),
            gc_pauses=tuple(self._pauses),
            load_average=os.getloadavg()[0],
            steal=_share_stolen(self._before, _cpu_times(self._stat)),
        )

    def _sample(self, due: float | None) -> None:
        now = time.monotonic()
        self._look(now, None if due is None else max(0.0, now - due))
        self._handle = self._loop.call_later(self._every, self._sample, now + self._every)

    def _look(self, now: float, lag: float | None) -> None:
        self._samples.append(Sample(now - self._wall, lag, time.process_time() - self._cpu))

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.monotonic()
        elif self._collecting is not None:
            self._pauses.append(time.monotonic() - self._collecting)


def judge(schedule: Schedule, records: Sequence[Record], machine: Machine, until: float | None = None) -> Health:
    """How the client did. `until`: seconds at which the load was interrupted; what was due later was not asked for."""
    begin, end = schedule.warmup, schedule.warmup + schedule.duration
    end = end if until is None else min(end, until)
    window = end - begin
    late = _limit(_median_ttft(records))
    timed = [record for record in records if record.scheduled is not None and record.phase == "measure"]
    lags = [dispatched - scheduled for scheduled, dispatched in _times(timed)]
    asked = sent = None
    if schedule.users is None and window > 0:
        due = [planned.at for planned in schedule.requests if planned.at is not None and planned.phase == "measure"]
        # What is due at the very end may be as late as any other; at an interrupt, there was no time for it.
        last = end if until is None else min(end, until - late)
        asked = sum(at < last for at in due) / window
        sent = sum(scheduled < last and at < last + late for scheduled, at in _times(timed)) / window
    loop = _loop_lags(machine.samples, begin, end) or (0.0,)
    health = Health(
        lag_p50=percentile(lags, 50),
        lag_p99=percentile(lags, 99),
        lag_max=max(lags, default=None),
        loop_lag_p99=percentile(loop, 99) or 0.0,
        loop_lag_max=max(loop),
        cpu=_cores(machine.samples, begin, end),
        gc_pauses=len(machine.gc_pauses),
        gc_longest=max(machine.gc_pauses, default=0.0),
        load_average=machine.load_average,
        steal=machine.steal,
        asked_rate=asked,
        sent_rate=sent,
    )
    return _gated(health, late)


def with_reasons(health: Health, *reasons: str) -> Health:
    """The same, and more reasons why the run does not count."""
    return _replaced(health, (*health.invalid, *reasons))


def _times(records: Sequence[Record]) -> list[tuple[float, float]]:
    """When each was due, and when it was begun."""
    return [(record.scheduled, record.dispatched) for record in records if record.scheduled is not None]


def _limit(ttft: float | None) -> float:
    """How late the client may be."""
    return max(LAG_S, LAG_SHARE * (ttft or 0.0))


def _loop_lags(samples: Sequence[Sample], begin: float, end: float) -> tuple[float, ...]:
    """Of timers that were due, or fired, in the window."""
    return tuple(one.lag for one in samples if one.lag is not None and one.at >= begin and one.at - one.lag < end)


def _cores(samples: Sequence[Sample], begin: float, end: float) -> float:
    """CPU seconds per second of the window, as far as it was watched; of the whole watch if it did not reach that."""
    if not samples:
        return 0.0
    at, used = [one.at for one in samples], [one.cpu for one in samples]
    begin, end = max(begin, at[0]), min(end, at[-1])
    if end <= begin:
        begin, end = at[0], at[-1]
    low, high = np.interp([begin, end], at, used)
    return float(high - low) / (end - begin) if end > begin else 0.0


def _gated(health: Health, limit: float) -> Health:
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
