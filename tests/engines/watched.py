"""WorkerEngines with real child processes, and streams that can be looked at."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from headrace.core.clock import Clock
from headrace.core.events import Admitted, Delta, Event, Failed, Finished
from headrace.core.request import Generation
from headrace.engines import frames
from headrace.engines.supervisor import WorkerEngine
from headrace.engines.worker import Blueprint
from headrace.testing import ManualClock

PATIENCE = 20.0
LETTERS = [[c] for c in "abcdefghijklmnopqrstuvwxyz"] * 100


class Watched(WorkerEngine):
    """Says when its worker comes up and when it is lost."""

    def __init__(self, blueprint: Blueprint, clock: Clock, **options: Any) -> None:
        super().__init__(blueprint, clock, **options)
        self.up: asyncio.Queue[int] = asyncio.Queue()
        self.down: asyncio.Queue[int] = asyncio.Queue()

    def _on_report(self, report: frames.Report) -> None:
        super()._on_report(report)
        if isinstance(report, frames.Pong):
            self.up.put_nowait(self.pid or 0)

    def _on_lost(self) -> None:
        super()._on_lost()
        self.down.put_nowait(self.pid or 0)

    async def kill(self) -> None:
        """Kill the worker as the kernel would, and wait until that is noticed."""
        assert self.pid is not None
        os.kill(self.pid, signal.SIGKILL)
        await soon(self.down.get())


async def soon(what: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(what, PATIENCE)


def scripted(**settings: Any) -> Blueprint:
    return Blueprint("headrace.testing:scripted_worker", {"script": LETTERS, **settings}, {"prefill_chunk": 64})


@asynccontextmanager
async def serving(blueprint: Blueprint, clock: Clock | None = None, **options: Any) -> AsyncIterator[Watched]:
    engine = Watched(blueprint, clock or ManualClock(), **options)
    await soon(engine.start())
    await soon(engine.up.get())
    try:
        yield engine
    finally:
        await soon(engine.close())
        assert engine._child is not None
        assert engine._child.returncode is not None, "a zombie"


class Stream(list[Event]):
    """A live generation's events; `begun` when the first text came, `over` when it ended."""

    def __init__(self, engine: WorkerEngine, generation: Generation) -> None:
        super().__init__()
        loop = asyncio.get_running_loop()
        self.generation = generation
        self.left = generation.n
        self.begun: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        engine.submit(generation, self)

    def __call__(self, event: Event) -> None:
        self.append(event)
        if isinstance(event, Delta) and not self.begun.done():
            self.begun.set_result(None)
        self.left -= isinstance(event, Finished)
        if (isinstance(event, Failed) or not self.left) and not self.over.done():
            self.over.set_result(None)

    @property
    def failure(self) -> Failed | None:
        return next((e for e in self if isinstance(e, Failed)), None)

    def answer(self) -> list[Any]:
        """All that a reader has of a stream that ended well, and nothing that depends on when its tokens came.

        Each choice: (text, tokens told, logprobs, end). It also holds the events to their contract.
        """
        assert self.failure is None, self.failure
        return [self._choice(index) for index in range(self.generation.n)]

    def _choice(self, index: int) -> Any:
        mine = [e for e in self if not isinstance(e, Failed) and e.index == index]
        assert isinstance(mine[0], Admitted)
        assert isinstance(mine[-1], Finished)
        deltas = [e for e in mine[1:-1] if isinstance(e, Delta)]
        assert len(deltas) == len(mine) - 2, "one admission, one end"
        assert [i for i, e in enumerate(deltas) if e.marks] == [i for i, e in enumerate(deltas) if e.text][:1]
        assert all(e.tokens == len(e.ids) for e in deltas)
        ids = [token for e in deltas for token in e.ids]
        return "".join(e.text for e in deltas), ids, [e.logprobs for e in deltas], mine[-1].reason


def run(main: Callable[[], Any]) -> None:
    asyncio.run(main())


async def next_turn() -> None:
    """Let the loop go round once."""
    turned = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turned.set_result, None)
    await turned
