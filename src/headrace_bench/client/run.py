"""A whole load, from a program that knows nothing of event loops: send a schedule to a target, get what happened.

Rules: one event loop and one thread of its own a run; the clock of all stamps begins with the load; an interrupt
(Ctrl-C) ends the load, not the program: what was measured is returned, and marked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import uvloop

from headrace_bench.client.driver import drive
from headrace_bench.client.health import Machine, Monitor, judge, with_reasons
from headrace_bench.client.request import Client
from headrace_bench.client.target import Target
from headrace_bench.load.schedule import Schedule
from headrace_bench.record import Health, Record


@dataclass(frozen=True, slots=True)
class Run:
    """What was asked, of whom, and what happened."""

    schedule: Schedule
    records: tuple[Record, ...]
    """By index. Of what was due or begun; a closed loop and later turns leave the rest out."""
    health: Health
    target: Target
    wall: str
    """When the load began, in ISO 8601, UTC: to find it in a server's log; nothing is computed from it."""
    interrupted: bool = False
    """Ended by hand. Its health says so too."""
    began: float = 0.0
    """Zero of the records' stamps, in seconds of the machine's monotonic clock: other processes stamp with it too."""


def run(
    target: Target,
    schedule: Schedule,
    *,
    drain_s: float = 30.0,
    on_record: Callable[[Record], None] | None = None,
    keep_text: bool = False,
    wall: str | None = None,
) -> Run:
    """Sends `schedule` to `target`. Blocks until all is answered, or `drain_s` seconds after the window.

    `on_record` is called on the loop's thread as each request ends, so it has to be quick; what it raises ends the
    load. `wall`: what to call the moment of its start, if that was written down before.
    """
    load = _Load(schedule, on_record)
    wall = wall or now()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        until = runner.run(load.carry_out(target, drain_s, keep_text))
    records = tuple(sorted(load.records, key=lambda record: record.index))
    health = judge(schedule, records, load.machine(), until)
    health = with_reasons(health, *_remarks(schedule, load.ran_out, until))
    return Run(schedule, records, health, target, wall, until is not None, load.began)


def now() -> str:
    """The wall clock, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class _Load:
    def __init__(self, schedule: Schedule, on_record: Callable[[Record], None] | None) -> None:
        self._schedule = schedule
        self._on_record = on_record
        self._monitor = Monitor()
        self.records: list[Record] = []
        self.began = 0.0
        self.ran_out: float | None = None
        """When a user found nothing left to ask, with the window still open."""

    def machine(self) -> Machine:
        return self._monitor.machine()

    async def carry_out(self, target: Target, drain_s: float, keep_text: bool) -> float | None:
        """Seconds after which it was interrupted; None when it was not."""
        with self._monitor:
            start = self.began = time.monotonic()

            def clock() -> float:
                return time.monotonic() - start

            client = Client(target, clock)
            try:
                await drive(
                    self._schedule, client, clock=clock, drain_s=drain_s, on_record=self._keep, keep_text=keep_text,
                    on_ran_out=self._note,
                )  # fmt: skip
            except asyncio.CancelledError:
                return clock()
            finally:
                await client.close()
        return None

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        if self._on_record is not None:
            self._on_record(record)

    def _note(self, at: float) -> None:
        self.ran_out = at


def _remarks(schedule: Schedule, ran_out: float | None, until: float | None) -> list[str]:
    """Why a run does not count, beside its health."""
    found = []
    if until is not None:
        found.append(f"interrupted {until:.1f} s after its start, of {schedule.warmup + schedule.duration:.1f} s")
    elif ran_out is not None and not schedule.finite:
        count = sum(planned.phase == "measure" and planned.turn == 0 for planned in schedule.requests)
        found.append(f"all {count} requests were used up after {ran_out:.1f} s: draw more with --requests")
    return found
