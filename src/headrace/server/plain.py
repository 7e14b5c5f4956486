"""`/chat/v1/stream`: the simple event stream, for pages and scripts without a client library.

Rules: what comes in becomes a chat request, and from there on goes the way of all of them: keys, limits, admission,
attempts, pacing. A key comes in the header and nowhere else: an address with a key in it ends in the logs of every
proxy on the way. So an EventSource, which can send no header, needs a server without keys or a proxy that adds one;
`fetch` does not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from headrace.core.clock import Clock
from headrace.core.errors import InvalidRequest
from headrace.core.request import Ask
from headrace.gateway.backend import Work
from headrace.protocol.plain_events import END_ID, PlainEvents, chat_fields, query_fields
from headrace.server.attempts import Encoding
from headrace.server.exchange import Exchange
from headrace.server.route import Route
from headrace.server.stream import STREAM_HEADERS

PATH = "/chat/v1/stream"


class Host(Protocol):
    """What is needed of the application."""

    def aliases(self, exchange: Exchange) -> Collection[str]:
        """Those that the caller may know of."""
        ...

    async def body(self, exchange: Exchange) -> tuple[Mapping[str, Any], int]: ...

    def ask(self, exchange: Exchange, fields: Mapping[str, Any], size: int, *, chat: bool) -> Ask: ...

    async def generate(self, exchange: Exchange, ask: Ask, prefix: str, encoding: Encoding) -> None: ...


def plain_routes(host: Host, clock: Clock) -> tuple[Route, ...]:
    """The rows of the path table."""

    async def get(exchange: Exchange) -> None:
        if exchange.method == "HEAD":
            await exchange.start(200, STREAM_HEADERS)
            await exchange.write(b"", more=False)
        elif exchange.values(b"last-event-id") == [END_ID]:
            # An EventSource that has the whole answer asks again; this is how it is told to leave off.
            await exchange.start(204, ())
            await exchange.write(b"", more=False)
        else:
            await _stream(host, clock, exchange, query_fields(exchange.query), len(exchange.query))

    async def post(exchange: Exchange) -> None:
        await _stream(host, clock, exchange, *await host.body(exchange))

    return (Route(PATH, {"GET": get, "POST": post}),)


async def _stream(host: Host, clock: Clock, exchange: Exchange, fields: Mapping[str, Any], size: int) -> None:
    ask = host.ask(exchange, chat_fields(fields, model=_only(host, exchange, fields)), size, chat=True)
    timeline = exchange.timeline

    def encoding(id: str, created: int, ask: Ask, work: Work) -> PlainEvents:
        options = ask.options
        return PlainEvents(
            ttft=lambda: (clock() - timeline.first_byte) * 1e3,
            report=timeline.report if options.timings else None,
            ids=not options.resume,
        )

    await host.generate(exchange, ask, "stream-", encoding)


def _only(host: Host, exchange: Exchange, fields: Mapping[str, Any]) -> str:
    """The model of a request that names none. Raises InvalidRequest if there are several."""
    aliases = host.aliases(exchange)
    if fields.get("model") is None and len(aliases) > 1:
        raise InvalidRequest(f"model must be given; served here: {', '.join(sorted(aliases))}", param="model")
    return next(iter(aliases), "none")  # which is then refused as a model that is not there
