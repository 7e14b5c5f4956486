"""Readers are told of a step while the engine computes the next one.

    engine thread     book k │ plan, begin │ start ► step k+1 ──────────────── │ book k+1 │ …
                                               └─► detokenise, frame, write k
    telling thread                                 while the engine thread is outside of Python

Rules: what waits is handed over only when a step begins, for the thread would wait for the interpreter lock until then
anyway; whoever cannot wait for that (`drain`) tells it at once, on the engine thread. One thread at a time tells: the
engine thread only after `drain` has waited for the other. So the other owns what `core.teller` calls `tell`'s, and the
one call to `deliver`, from `start` to the end of `drain`; at all other times the engine thread does. Order is that of
the booking, always.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from headrace.core.events import Event
from headrace.core.teller import Taken
from headrace.engines.base import EngineStats

Deliver = Callable[[list[Event], EngineStats], None]

BEHIND = 4
"""Steps that may be untold; then the engine waits."""

_Step = tuple[Sequence[Taken], EngineStats]


class Telling:
    """Everything but the inside of its thread is for the engine thread.

    What `tell` or `deliver` raises there comes out of the next call here.
    """

    def __init__(self, tell: Callable[[Sequence[Taken]], list[Event]], deliver: Deliver, *, overlap: bool) -> None:
        """Without `overlap` everything is told at once, and there is no thread."""
        self._tell = tell
        self._deliver = deliver
        self._overlap = overlap
        self._held: _Step | None = None
        self._handed: SimpleQueue[_Step | threading.Event | None] = SimpleQueue()
        self._queued = 0
        self._told = 0
        """Of those queued; only the thread changes it."""
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Telling [{self._queued - self._told} handed over, {int(self._held is not None)} held]>"

    def deliver(self, events: list[Event], stats: EngineStats) -> None:
        """Events that no token is behind: at once, after all that came before them."""
        self.drain()
        self._deliver(events, stats)

    def tell(self, taken: Sequence[Taken], stats: EngineStats, *, now: bool) -> None:
        """What a step gave: at once, or beside the next step."""
        if now or not self._overlap:
            self.drain()
            self._deliver(self._tell(taken), stats)
        else:
            if self._held is not None:  # no step has begun since: it was given up before
                self.drain()
            self._held = taken, stats

    def start(self) -> None:
        """A step begins."""
        held = self._held
        if held is None:
            return
        if self._queued - self._told >= BEHIND or self._error is not None:
            self.drain()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="telling", daemon=True)
            self._thread.start()
        self._held = None
        self._queued += 1
        self._handed.put(held)

    def drain(self) -> None:
        """Everything is told when this returns."""
        if self._queued != self._told:
            done = threading.Event()
            self._handed.put(done)
            done.wait()
        if self._error is not None:
            error, self._error, self._held = self._error, None, None
            raise error
        held, self._held = self._held, None
        if held is not None:
            self._deliver(self._tell(held[0]), held[1])

    def close(self) -> None:
        """Everything is told and the thread has ended when this returns."""
        try:
            self.drain()
        finally:
            if self._thread is not None:
                self._handed.put(None)
                self._thread.join()
                self._thread = None

    def _run(self) -> None:
        while (handed := self._handed.get()) is not None:
            if isinstance(handed, threading.Event):
                handed.set()
                continue
            if self._error is None:
                try:
                    self._deliver(self._tell(handed[0]), handed[1])
                except BaseException as error:
                    self._error = error
            self._told += 1
