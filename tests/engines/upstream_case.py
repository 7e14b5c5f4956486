"""A server of ours in front of a scripted one, and the events that it told."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

from headrace.core.events import Answered, Relayed
from headrace.core.request import Ask, Options, Told
from headrace.engines.answering import Sending
from headrace.engines.openai import OpenAIServer, parse_url
from server.hand_engine import Hands
from server.socket_client import until
from upstreams import Play, Request, Server, chat_events, upstream

EVENTS = chat_events(["a", "b", "c"])
RIDS = itertools.count(1)


class Case:
    """A server of ours in front of a scripted one."""

    def __init__(self, there: Server, server: OpenAIServer, clock: Hands) -> None:
        self.there = there
        self.server = server
        self.clock = clock
        self.told: list[Answered] = []

    def submit(self, *, told: Told | None = None, n: int = 1, stream: bool = True, **options: Any) -> int:
        rid = next(RIDS)
        given = Options(stream=stream, n=n, **options)
        ask = Ask(told is None, "alias", {}, 100, given, 1, told=told, request_id="req-1")
        self.server.submit(Sending(rid, ask, n, "/v1/chat/completions", b'{"x":1}'), self.told.append)
        return rid

    async def ended(self) -> list[Answered]:
        await until(lambda: self.server.running == 0)
        return self.told

    @property
    def raw(self) -> bytes:
        return b"".join(event.raw for event in self.told if isinstance(event, Relayed))

    def last(self) -> Any:
        return self.told[-1]


@contextlib.asynccontextmanager
async def asking(answer: Callable[[Request], Play], **how: Any) -> AsyncIterator[Case]:
    clock = Hands()
    async with upstream(answer) as there:
        origin, prefix = parse_url(there.url)
        server = OpenAIServer(origin, prefix, clock, **how)
        try:
            yield Case(there, server, clock)
        finally:
            await server.close()
            assert server.running == 0
            assert server.ledger.pending == 0
            assert server.connections.running == 0
