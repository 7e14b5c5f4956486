"""A StreamEngine whose engine thread lives in this process: for tests and for embedding.

A fault inside llama.cpp takes the whole process with it; `supervisor.WorkerEngine` is the one for serving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.core.clock import Clock
from headrace.core.errors import EngineUnavailable
from headrace.core.events import Event
from headrace.core.request import Generation
from headrace.core.scheduler import Limits
from headrace.engines.base import EngineStats, ModelInfo, Sink, StepEngine
from headrace.engines.stepper import Stepper
from headrace.engines.streams import Streams


class LocalEngine:
    """`make` loads the engine; it runs in a thread, so that a slow load does not block the loop."""

    def __init__(self, make: Callable[[], StepEngine], limits: Limits, clock: Clock, *, max_waiting: int = 256) -> None:
        self._make = make
        self._limits = limits
        self._clock = clock
        self._streams = Streams(max_waiting)
        self._stepper: Stepper | None = None
        self._info: ModelInfo | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.clock_offset = 0.0
        self.stats = EngineStats()

    def __repr__(self) -> str:
        return f"<LocalEngine [{'ready' if self.ready else 'closed'}, {self._streams!r}]>"

    @property
    def info(self) -> ModelInfo:
        """Raises EngineUnavailable before `start`."""
        if self._info is None:
            raise EngineUnavailable("the model is still loading; try again soon")
        return self._info

    @property
    def ready(self) -> bool:
        return self._stepper is not None

    async def start(self) -> None:
        """Load. Raises StartupError."""
        self._loop = asyncio.get_running_loop()
        engine = await self._loop.run_in_executor(None, self._make)
        self._info = engine.info
        self._stepper = Stepper(engine, self._limits, self._clock, self._from_thread)
        self._stepper.start()

    async def close(self) -> None:
        stepper, self._stepper = self._stepper, None
        self._streams.fail_all("engine_unavailable", "the server is shutting down")
        if stepper is not None:
            await asyncio.get_running_loop().run_in_executor(None, stepper.close)

    def submit(self, generation: Generation, sink: Sink) -> None:
        """Raises EngineUnavailable, Overloaded."""
        if self._stepper is None:
            raise EngineUnavailable("the engine is not running; try again soon")
        self._streams.open(generation, sink)
        self._stepper.submit(generation)

    def cancel(self, rid: int) -> None:
        if self._streams.close(rid) and self._stepper is not None:
            self._stepper.cancel(rid)

    def pause(self, rid: int) -> None:
        if rid in self._streams and self._stepper is not None:
            self._stepper.pause(rid, True)

    def resume(self, rid: int) -> None:
        if rid in self._streams and self._stepper is not None:
            self._stepper.pause(rid, False)

    def _from_thread(self, events: list[Event], stats: EngineStats) -> None:
        loop = self._loop
        assert loop is not None
        try:
            loop.call_soon_threadsafe(self._on_loop, events, stats)
        except RuntimeError:
            pass  # the loop is gone: nobody is left to read this

    def _on_loop(self, events: list[Event], stats: EngineStats) -> None:
        self.stats = stats
        self._streams.deliver(events)
