"""What the server tells of mirrored requests: to the copy, how the live one went; to the operator, how both compare."""

from __future__ import annotations

import msgspec

from headrace.gateway.gate import Seen
from headrace.gateway.mirror import Mirror, Shadow
from headrace.observe.record import Record
from headrace.server.exchange import Exchange
from headrace.server.live import Live
from headrace.server.route import Route


def compare(shadow: Shadow, live: Live, record: Record) -> None:
    """The live request is over: its copy is told what became of it, or ends with it."""
    if live.gone or (live.failure is None and live.remaining):
        shadow.cancel()
        return
    streamed = record.stream
    seen = Seen(live.failure is None, live.first_s if streamed else None, tuple(record.gaps) if streamed else ())
    shadow.close(seen, live.text if shadow.compares else None)


def mirror_routes(mirror: Mirror) -> tuple[Route, ...]:
    """A row of the admin API."""

    async def show(exchange: Exchange) -> None:
        await exchange.answer(200, msgspec.json.encode(mirror.table()))

    return (Route("/admin/v1/mirror", {"GET": show}),)
