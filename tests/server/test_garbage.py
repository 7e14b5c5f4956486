"""A request that is over is gone at once: it leaves no cycles for the garbage collector, whose full runs are rare."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
from collections.abc import Iterator

import pytest

from headrace.server.app import App
from server.hand_engine import HandEngine, server
from server.socket_client import Connection, Running, on_uvloop, serving, until

TIMES = 10


@contextlib.contextmanager
def kept() -> Iterator[collections.Counter[str]]:
    """What only the collector could free of what is made inside, by type."""
    found: collections.Counter[str] = collections.Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(type(one).__name__ for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


class Case:
    """Requests of one kind."""

    def __init__(self, kind: str, running: Running, app: App, engine: HandEngine, connection: Connection) -> None:
        self.kind = kind
        self.running = running
        self.app = app
        self.engine = engine
        self.connection = connection

    async def once(self) -> None:
        match self.kind:
            case "refused":
                await self.connection.chat(temperature="hot")
                assert (await self.connection.answer())[0] == 400
            case "no route":
                await self.connection.request("GET", "/nothing")
                assert (await self.connection.answer())[0] == 404
            case "gone":
                await self._leave()
            case _:
                await self._answered()

    async def _begin(self, connection: Connection, *, stream: bool) -> None:
        before = len(self.engine.generations)
        await connection.chat(stream=stream)
        await until(lambda: len(self.engine.generations) > before)
        self.engine.admit()

    async def _leave(self) -> None:
        connection = await self.running.connect()
        self.running.connections.pop()
        await self._begin(connection, stream=True)
        connection.close()
        await until(lambda: self.app.running == 0)
        await connection.writer.wait_closed()

    async def _answered(self) -> None:
        connection, engine = self.connection, self.engine
        stream = self.kind != "whole"
        await self._begin(connection, stream=stream)
        if self.kind == "failed":
            engine.fail()
            assert (await connection.answer())[0] == 500
            return
        engine.say("x")
        if stream:
            await connection.head()
            await connection.chunk()
        if self.kind == "broken off":
            engine.fail()
        else:
            engine.say("y")
            engine.finish()
        if stream:
            while await connection.chunk():
                pass
        else:
            await connection.answer()


@pytest.mark.parametrize("kind", ["stream", "whole", "refused", "no route", "gone", "failed", "broken off"])
def test_nothing_is_left_for_the_collector(kind: str) -> None:
    @on_uvloop
    async def run() -> None:
        engine = HandEngine()
        app = server(engine)
        async with serving(app) as running:
            case = Case(kind, running, app, engine, await running.connect())
            await case.once()
            with kept() as found:
                for _ in range(TIMES):
                    await case.once()
                for _ in range(20):
                    await asyncio.sleep(0)
        # A stray object of the test's own is not one a request.
        assert sum(found.values()) < TIMES, found

    run()
