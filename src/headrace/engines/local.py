"""A StreamEngine whose engine thread lives in this process: for tests and for embedding.

A fault inside llama.cpp takes the whole process with it; `supervisor.WorkerEngine` is the one for serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from headrace.core.admission import Backlog, Bounds
from headrace.core.clock import Clock
from headrace.core.errors import EngineUnavailable
from headrace.core.events import Event
from headrace.core.kv import Pin
from headrace.core.limits import Limits
from headrace.core.request import Generation
from headrace.engines.base import EngineStats, Lives, ModelInfo, Sink, StepEngine
from headrace.engines.stepper import Stepper
from headrace.engines.streams import Streams
from headrace.engines.telling import Deliver

log = logging.getLogger(__name__)


class LocalEngine:
    """`make` loads the engine, on the thread that will run it.

    It has to be that one: OpenMP keeps a team of threads for each thread that computes. With a second team there are
    more threads than cores, its barriers then sleep instead of spinning, and a decode takes half as long again
    (measured: 8.0 ms, then 11.7 ms).
    """

    def __init__(
        self,
        make: Callable[[], StepEngine],
        limits: Limits,
        clock: Clock,
        *,
        bounds: Bounds = Bounds(),  # noqa: B008 - frozen
        begin: Callable[[StepEngine, Deliver], Stepper] | None = None,
    ) -> None:
        """`begin` makes the stepper, on the engine's thread; by default one that keeps nothing outside the pool."""
        self._make = make
        self._begin = begin or (lambda engine, deliver: Stepper(engine, limits, clock, deliver))
        self._clock = clock
        self._streams = Streams(Backlog(bounds), clock)
        self._stepper: Stepper | None = None
        self._info: ModelInfo | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.clock_offset = 0.0
        self.stats = EngineStats()
        self.lives = Lives()

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
        loaded: asyncio.Future[Stepper] = self._loop.create_future()
        threading.Thread(target=self._run, args=(self._loop, loaded), name="engine", daemon=True).start()
        self._stepper = await loaded

    async def close(self) -> None:
        stepper, self._stepper = self._stepper, None
        self._streams.fail_all("engine_unavailable", "the engine was shut down before it had finished this answer")
        if stepper is not None:
            await asyncio.get_running_loop().run_in_executor(None, stepper.close)

    def submit(self, generation: Generation, sink: Sink) -> None:
        """Raises EngineUnavailable, Overloaded."""
        if self._stepper is None:
            raise EngineUnavailable("the engine is not running; try again soon")
        self._streams.open(generation, sink)
        self._stepper.submit(generation)

    def predict(self, tokens: int, priority: int) -> float:
        return self._streams.predict(tokens, priority)

    def pin(self, pins: Sequence[Pin]) -> None:
        if self._stepper is not None:
            self._stepper.pin(pins)

    def cancel(self, rid: int) -> None:
        if self._streams.close(rid) and self._stepper is not None:
            self._stepper.cancel(rid)

    def pause(self, rid: int) -> None:
        if rid in self._streams and self._stepper is not None:
            self._stepper.pause(rid, True)

    def resume(self, rid: int) -> None:
        if rid in self._streams and self._stepper is not None:
            self._stepper.pause(rid, False)

    def _run(self, loop: asyncio.AbstractEventLoop, loaded: asyncio.Future[Stepper]) -> None:
        """The engine thread."""
        try:
            engine = self._make()
        except BaseException as error:
            loop.call_soon_threadsafe(_settle, loaded, None, error)
            return
        self._info = engine.info
        try:
            stepper = self._begin(engine, self._from_thread)
        except BaseException as error:
            engine.close()
            loop.call_soon_threadsafe(_settle, loaded, None, error)
            return
        loop.call_soon_threadsafe(_settle, loaded, stepper, None)
        try:
            stepper.run()
        except Exception:
            log.exception("engine: it broke and stays down")
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._on_broken)

    def _from_thread(self, events: list[Event], stats: EngineStats) -> None:
        loop = self._loop
        assert loop is not None
        try:
            loop.call_soon_threadsafe(self._on_loop, events, stats)
        except RuntimeError:
            pass  # the loop is gone: nobody is left to read this

    def _on_loop(self, events: list[Event], stats: EngineStats) -> None:
        self.stats = stats
        self._streams.learn(stats)
        self._streams.deliver(events)

    def _on_broken(self) -> None:
        self._stepper = None
        self._streams.fail_all("engine_failed", "the engine stopped while it worked on this request")


def _settle(loaded: asyncio.Future[Stepper], stepper: Stepper | None, error: BaseException | None) -> None:
    if loaded.done():
        if stepper is not None:  # nobody waits for it any more
            threading.Thread(target=stepper.close, daemon=True).start()
    elif stepper is not None:
        loaded.set_result(stepper)
    elif error is not None:
        loaded.set_exception(error)
