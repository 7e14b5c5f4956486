"""A stepper on a thread of its own, with an engine whose steps wait for the test, and what it delivers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from headrace.core.events import Delta, Event, Failed, Finished
from headrace.core.limits import Limits
from headrace.engines.base import EngineStats
from headrace.engines.stepper import Stepper
from headrace.testing import ManualClock, ScriptedEngine

SCRIPT = [[bytes([c])] for c in b"abcdefghijklmnopqrstuvwxyz" * 40]
PATIENCE = 10.0
"""Seconds until a wait for another thread counts as failed."""


class Held(ScriptedEngine):
    """Each step waits inside the engine until the test lets it pass or it is aborted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(SCRIPT, step_s=1.0, prefill_s=1.0, wait=self._hold, **options)
        self.entered: SimpleQueue[None] = SimpleQueue()
        self._verdict: SimpleQueue[bool] = SimpleQueue()

    def _hold(self, seconds: float) -> bool:
        self.entered.put(None)
        return self._verdict.get(timeout=PATIENCE)

    def wait_inside(self) -> None:
        self.entered.get(timeout=PATIENCE)

    def let_pass(self) -> None:
        self._verdict.put(False)

    def abort(self) -> None:
        super().abort()
        self._verdict.put(True)


class Desk:
    """A running stepper and what it delivered."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.delivered: SimpleQueue[tuple[list[Event], EngineStats]] = SimpleQueue()
        self.events: list[Event] = []
        self.stats = EngineStats()

    def until(self, true: Callable[[Desk], bool]) -> None:
        while not true(self):
            events, self.stats = self.delivered.get(timeout=PATIENCE)
            self.events += events

    def text(self, rid: int) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Delta) and e.rid == rid)

    def ended(self, *rids: int) -> Callable[[Desk], bool]:
        return lambda _: set(rids) <= {e.rid for e in self.events if isinstance(e, Finished | Failed)}


@contextmanager
def running(engine: ScriptedEngine, limits: Limits | None = None) -> Iterator[Desk]:
    desk: Desk
    stepper = Stepper(engine, limits or Limits(), ManualClock(), lambda *step: desk.delivered.put(step))
    desk = Desk(stepper)
    thread = threading.Thread(target=stepper.run, name="engine under test")
    thread.start()
    try:
        yield desk
    finally:
        stepper.close()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert engine.closed


def prompt(n: int, first: int = 1) -> list[int]:
    return [first, *range(2, n + 1)]


def drive(stepper: Stepper) -> None:
    while plan := stepper.scheduler.plan(0.0):
        stepper.step(plan)
