"""An engine of ours that is loaded when it is wanted, and gives all its memory back when it is closed.

    start: Kit ─▶ engine ─ started ─▶ model         warm: pins, and one token after each of them
    close: both are gone, with the engine's process

Rules: what takes long runs on a thread or in the engine's process, since other engines answer meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from headrace.core.errors import EngineUnavailable, HeadraceError, StartupError
from headrace.core.events import Event, Failed, Finished
from headrace.core.kv import Pin
from headrace.core.request import Ask, Call, Generation, Sampling
from headrace.engines.base import EngineStats, Lives, StreamEngine
from headrace.engines.supervisor import WorkerEngine
from headrace.gateway.backend import Kind, Sink, Work
from headrace.gateway.model import ServedModel

WARM_TOKENS = 16
"""Of a prompt that only warms."""
WARM_RIDS = itertools.count(-1, -1)
"""Below those of requests."""


class Kit(Protocol):
    """What an engine is made from."""

    def engine(self) -> StreamEngine:
        """Not started. On the event loop."""
        ...

    def model(self, engine: StreamEngine) -> ServedModel:
        """Of the started engine. Any thread; raises StartupError."""
        ...

    def pins(self, model: ServedModel) -> Sequence[Pin]:
        """What to keep warm. Any thread; raises StartupError."""
        ...


class OwnEngine:
    """`unpack` finds what the engine is made from, on a thread, and may take minutes; raises StartupError.

    `exercise`: before it is used it computes every pinned prefix and draws a token.
    """

    kind: Kind = "llama"

    def __init__(self, unpack: Callable[[], Kit], *, exercise: bool) -> None:
        self._unpack = unpack
        self._exercise = exercise
        self._kit: Kit | None = None
        self._engine: StreamEngine | None = None
        self._model: ServedModel | None = None
        self._closed = False

    async def start(self) -> None:
        """Raises StartupError."""
        self._kit = kit = await asyncio.to_thread(self._unpack)
        if self._closed:
            raise StartupError("stopped while the model was loading")
        self._engine = engine = kit.engine()
        await engine.start()
        self._model = await asyncio.to_thread(kit.model, engine)

    async def warm(self) -> None:
        """Raises StartupError."""
        assert self._kit is not None
        model = self.served
        pins = await asyncio.to_thread(self._kit.pins, model)
        model.engine.pin(pins)
        if not self._exercise:
            return
        info = model.engine.info
        first = [0 if info.bos is None else info.bos] * min(WARM_TOKENS, info.n_ctx - 1)
        for prompt in (first, *(list(pin.tokens) for pin in pins)):
            await self._draw(model.engine, prompt)

    async def close(self) -> None:
        self._closed = True
        if self._model is not None:
            await self._model.close()
        elif self._engine is not None:
            await self._engine.close()

    @property
    def ready(self) -> bool:
        return self._model is not None and self._model.ready

    @property
    def restarting(self) -> bool:
        """Its process died; requests wait for the next one."""
        return isinstance(self._engine, WorkerEngine) and self._engine.restarting

    @property
    def pid(self) -> int | None:
        """Of the engine's process, if it has one of its own."""
        return self._engine.pid if isinstance(self._engine, WorkerEngine) else None

    @property
    def served(self) -> ServedModel:
        """Raises EngineUnavailable until it is loaded."""
        if self._model is None:
            raise EngineUnavailable("the model is still loading; try again soon")
        return self._model

    @property
    def created(self) -> int:
        return 0 if self._model is None else self._model.created

    @property
    def clock_offset(self) -> float:
        return 0.0 if self._model is None else self._model.clock_offset

    @property
    def stats(self) -> EngineStats:
        return EngineStats() if self._model is None else self._model.stats

    @property
    def lives(self) -> Lives:
        return Lives() if self._model is None else self._model.lives

    def parse(self, ask: Ask) -> Any:
        return self.served.parse(ask)

    async def prepare(self, ask: Ask, parsed: Any, rids: Iterator[int]) -> Work:
        return await self.served.prepare(ask, parsed, rids)

    def submit(self, part: Generation | Call, sink: Sink) -> None:
        self.served.submit(part, sink)

    def cancel(self, rid: int) -> None:
        if self._model is not None:
            self._model.cancel(rid)

    def pause(self, rid: int) -> None:
        if self._model is not None:
            self._model.pause(rid)

    def resume(self, rid: int) -> None:
        if self._model is not None:
            self._model.resume(rid)

    def predict(self, size: int, shared: float, priority: int) -> float:
        return 0.0 if self._model is None else self._model.predict(size, shared, priority)

    async def _draw(self, engine: StreamEngine, prompt: list[int]) -> None:
        """Compute a prompt and draw one token after it. Raises StartupError."""
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def hear(event: Event) -> None:
            if isinstance(event, Finished | Failed) and not done.done():
                done.set_result(event.message if isinstance(event, Failed) else "")

        rid = next(WARM_RIDS)
        try:
            engine.submit(Generation(rid, prompt, 1, sampling=Sampling(temperature=0.0)), hear)
            failure = await done
        except HeadraceError as error:
            failure = error.message
        except asyncio.CancelledError:
            engine.cancel(rid)
            raise
        if failure:
            raise StartupError(f"the engine is loaded and does not answer: {failure}")
