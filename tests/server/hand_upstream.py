"""A double for the server's tests: another server behind an alias, whose answer the test gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.core.errors import HeadraceError, UpstreamFailed
from headrace.core.events import Broken, Relayed, Tokens
from headrace.core.request import Ask, Call, Generation
from headrace.engines.base import EngineStats, Lives
from headrace.gateway.backend import Kind, Sink, Work

COUNT = Tokens(9, 2)


class HandUpstream:
    """A backend of the kind that relays; the test emits its events."""

    kind: Kind = "openai"
    ready = True
    created = 7
    clock_offset = 0.0
    stats = EngineStats()
    lives = Lives()

    def __init__(self) -> None:
        self.asks: list[Ask] = []
        self.sink: Sink | None = None
        self.rid = 0
        self.cancelled: list[int] = []

    def parse(self, ask: Ask) -> Any:
        return None

    async def prepare(self, ask: Ask, parsed: Any, rids: Iterator[int]) -> Work:
        self.asks.append(ask)
        return Work((Call(next(rids), ask),), 1, 0)

    def submit(self, part: Generation | Call, sink: Sink) -> None:
        self.rid, self.sink = part.rid, sink

    def cancel(self, rid: int) -> None:
        self.cancelled.append(rid)

    def pause(self, rid: int) -> None: ...

    def resume(self, rid: int) -> None: ...

    def predict(self, size: int, shared: float, priority: int) -> float:
        return 0.0

    async def close(self) -> None: ...

    def fail(self, error: HeadraceError | None = None) -> None:
        assert self.sink is not None
        self.sink(Broken(self.rid, error or UpstreamFailed("it broke off")))

    def relay(self, text: str, **fields: Any) -> None:
        assert self.sink is not None
        raw = b'data: {"id":"theirs","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % text.encode()
        fields = {"raw": raw, "text": text, "content": text, "tokens": bool(text), **fields}
        self.sink(Relayed(self.rid, **fields))

    def over(
        self,
        raw: bytes = b'data: {"id":"theirs","choices":[{"index":0,"finish_reason":"stop"}]}\n\n',
        usage: Tokens | None = COUNT,
    ) -> None:
        assert self.sink is not None
        self.sink(Relayed(self.rid, raw, over=True, content="", usage=usage))
