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
    # Gaps of a paced answer say how it was paced, not how fast its engine is.
    gaps = tuple(record.gaps) if record.stream and not record.delays else ()
    seen = Seen(live.failure is None, live.first_s if record.stream else None, gaps)
    shadow.close(seen, live.text if shadow.compares else None)


def mirror_routes(mirror: Mirror) -> tuple[Route, ...]:
    """A row of the admin API."""

    async def show(exchange: Exchange) -> None:
        await exchange.answer(200, msgspec.json.encode(mirror.table()))

    return (Route("/admin/v1/mirror", {"GET": show}),)
