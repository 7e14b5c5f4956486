"""A server over an engine of this process, with KV outside the pool."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import AsyncIterator

from acceptance.asking import Answer, Asking
from headrace.assembly import make_model
from headrace.engines.base import StreamEngine
from headrace.gateway.guard import Guard
from headrace.observe.accesslog import AccessLog
from headrace.observe.metrics import Metrics
from headrace.server.app import App
from headrace.settings import Config
from server.socket_client import serving


class Served(Asking):
    """A server, and the engine behind it."""

    def __init__(self, port: int, engine: StreamEngine) -> None:
        super().__init__(f"http://127.0.0.1:{port}", "tiny", None)
        self.engine = engine

    async def ask(self, prompt: str) -> Answer:
        answer = await self.comp(prompt=prompt, temperature=0, max_tokens=4)
        assert answer.status == 200
        return answer


def cached(answer: Answer) -> int:
    return int(answer.usage["prompt_tokens_details"]["cached_tokens"])


@contextlib.asynccontextmanager
async def answering(config: Config, engine: StreamEngine, *, guard: Guard | None = None) -> AsyncIterator[Served]:
    """The engine, started, behind a server; closed at the end."""
    await engine.start()
    app = App(
        {"tiny": make_model(config, engine)},
        Metrics({"tiny": engine}),
        AccessLog(time.time),
        guard=guard,
        seed=itertools.count(1000).__next__,
    )
    try:
        async with serving(app) as running:
            server = Served(running.port, engine)
            async with server.calls():
                yield server
    finally:
        await engine.close()
