from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace.core.admission import Bounds
from headrace.core.errors import EngineUnavailable, Overloaded, StartupError
from headrace.core.events import Delta, Event, Failed, Finished
from headrace.core.limits import Limits
from headrace.core.plan import Chunk, StepResult
from headrace.core.request import Generation
from headrace.engines.base import StepEngine
from headrace.engines.local import LocalEngine
from headrace.testing import ManualClock, ScriptedEngine, check_stream_engine, collect
from rig import GREEDY

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SCRIPT = [[c.encode()] for c in LETTERS]


@asynccontextmanager
async def serving(make: Callable[[], StepEngine], **options: Any) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(make, Limits(), ManualClock(), **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


class Blocked(ScriptedEngine):
    """Steps wait until the test releases them or they are aborted; on the engine thread."""

    def __init__(self) -> None:
        super().__init__(SCRIPT, step_s=1, prefill_s=1, wait=self._hold)
        self.entered = threading.Event()
        self.go = threading.Event()
        self.thread: threading.Thread | None = None

    def _hold(self, seconds: float) -> bool:
        self.thread = threading.current_thread()
        self.entered.set()
        assert self.go.wait(10)
        return self._aborted.is_set()

    def abort(self) -> None:
        super().abort()
        self.go.set()


async def entered(engine: Blocked) -> None:
    assert await asyncio.to_thread(engine.entered.wait, 10)


def test_it_keeps_the_contract() -> None:
    async def main() -> None:
        async with serving(lambda: ScriptedEngine(SCRIPT)) as engine:
            await check_stream_engine(engine, list(range(40)))
            assert engine.info.name == "scripted"
            assert engine.stats.completion_tokens > 0
            assert engine.clock_offset == 0.0

    asyncio.run(main())


def test_before_start_and_after_close_it_is_unavailable() -> None:
    async def main() -> None:
        scripted = ScriptedEngine(SCRIPT)
        engine = LocalEngine(lambda: scripted, Limits(), ManualClock())
        with pytest.raises(EngineUnavailable):
            _ = engine.info
        with pytest.raises(EngineUnavailable):
            engine.submit(Generation(1, [1], 1), lambda event: None)
        assert not engine.ready
        await engine.start()
        assert engine.ready
        await engine.close()
        assert scripted.closed
        assert not engine.ready
        with pytest.raises(EngineUnavailable):
            engine.submit(Generation(1, [1], 1), lambda event: None)
        engine.cancel(1)
        engine.pause(1)
        engine.resume(1)
        await engine.close()

    asyncio.run(main())


def test_a_model_that_cannot_be_loaded_is_a_startup_error() -> None:
    def make() -> StepEngine:
        raise StartupError("no such model")

    async def main() -> None:
        engine = LocalEngine(make, Limits(), ManualClock())
        with pytest.raises(StartupError, match="no such model"):
            await engine.start()
        assert not engine.ready
        await engine.close()

    asyncio.run(main())


def test_the_engine_is_made_on_the_thread_that_computes() -> None:
    made_on: list[threading.Thread] = []
    blocked = Blocked()

    def make() -> StepEngine:
        made_on.append(threading.current_thread())
        return blocked

    async def main() -> None:
        async with serving(make) as engine:
            engine.submit(Generation(1, [1, 2], 1), lambda event: None)
            await entered(blocked)

    asyncio.run(main())
    assert made_on == [blocked.thread]
    assert blocked.thread is not threading.main_thread()


def test_a_start_that_is_given_up_closes_what_it_made() -> None:
    loading, may_load, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(ScriptedEngine):
        def close(self) -> None:
            super().close()
            closed.set()

    def make() -> StepEngine:
        loading.set()
        assert may_load.wait(10)
        return Slow(SCRIPT)

    async def main() -> None:
        engine = LocalEngine(make, Limits(), ManualClock())
        task = asyncio.create_task(engine.start())
        assert await asyncio.to_thread(loading.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_load.set()
        assert await asyncio.to_thread(closed.wait, 10)
        assert not engine.ready

    asyncio.run(main())


def test_close_fails_what_is_live_and_gives_up_the_step() -> None:
    blocked = Blocked()
    events: list[Event] = []

    async def main() -> None:
        async with serving(lambda: blocked) as engine:
            engine.submit(Generation(1, [1, 2], 1, n=2), events.append)
            await entered(blocked)

    asyncio.run(main())
    assert events[-1] == Failed(1, "engine_unavailable", "the engine was shut down before it had finished this answer")
    assert sum(isinstance(e, Failed) for e in events) == 1
    assert blocked.aborts == 1
    assert blocked.closed


def test_a_full_queue_refuses() -> None:
    blocked = Blocked()

    async def main() -> None:
        async with serving(lambda: blocked, bounds=Bounds(max_waiting=0)) as engine:
            with pytest.raises(Overloaded):
                engine.submit(Generation(1, [1], 1), lambda event: None)
            assert repr(engine) == "<LocalEngine [ready, <Streams [0 live, 0 waiting]>]>"

    asyncio.run(main())


def test_pause_and_resume() -> None:
    async def main() -> None:
        async with serving(lambda: ScriptedEngine(SCRIPT * 120)) as engine:
            told: list[Event] = []
            over = asyncio.get_running_loop().create_future()

            def sink(event: Event) -> None:
                told.append(event)
                if isinstance(event, Finished):
                    over.set_result(None)

            engine.submit(Generation(1, [1, 2], 3000, sampling=GREEDY), sink)
            engine.pause(1)
            await collect(engine, Generation(2, [2, 2], 20))
            before = len(told)
            await collect(engine, Generation(3, [3, 2], 20))
            assert len(told) == before < 3000
            engine.resume(1)
            await over
            assert "".join(e.text for e in told if isinstance(e, Delta)) == (LETTERS * 120)[:3000]

    asyncio.run(main())


def test_a_cancel_gives_up_the_running_step() -> None:
    blocked = Blocked()

    async def main() -> None:
        async with serving(lambda: blocked) as engine:
            events: list[Event] = []
            engine.submit(Generation(1, [1, 2], 9), events.append)
            await entered(blocked)
            engine.cancel(1)
            assert blocked.aborts == 1
            await collect(engine, Generation(2, [2, 2], 1))
            assert not any(isinstance(e, Delta | Finished | Failed) for e in events)

    asyncio.run(main())


class Fragile(ScriptedEngine):
    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        if self.steps == 2:
            raise ZeroDivisionError
        return super().step(chunks)


def test_an_engine_that_breaks_fails_its_streams_and_is_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        fragile = Fragile(SCRIPT)
        async with serving(lambda: fragile) as engine:
            events = await collect(engine, Generation(1, [1, 2], 9, n=2))
            assert isinstance(events[-1], Failed)
            assert events[-1].code == "engine_failed"
            assert not engine.ready
            with pytest.raises(EngineUnavailable):
                engine.submit(Generation(2, [1], 1), lambda event: None)
        assert fragile.closed

    asyncio.run(main())
    assert "ZeroDivisionError" in caplog.text
