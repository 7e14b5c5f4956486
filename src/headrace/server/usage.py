"""`GET /admin/v1/usage?from=2026-01-01&to=2026-01-31&key=NAME`: what every key used, a row a day and model."""

from __future__ import annotations

from datetime import date
from urllib.parse import parse_qs

import msgspec

from headrace.core.errors import InvalidRequest
from headrace.gateway.usage import Usage
from headrace.server.exchange import Exchange
from headrace.server.route import Route

USUAL_DAYS = 31
"""That are shown if nobody says which."""


def usage_routes(usage: Usage | None) -> tuple[Route, ...]:
    """The rows for the admin API; None: nothing is booked, so there are none."""
    if usage is None:
        return ()

    async def show(exchange: Exchange) -> None:
        first, last, key = asked(exchange.query, usage.today, usage.days)
        table = await usage.table(first, last, key)
        body = {"from": first.isoformat(), "to": last.isoformat(), "complete": table.complete, "rows": table.rows}
        await exchange.answer(200, msgspec.json.encode(body))

    return (Route("/admin/v1/usage", {"GET": show}),)


def asked(query: bytes, today: date, days: int) -> tuple[date, date, str | None]:
    """(first day, last day, key) of a query string; `days` that are kept. Raises InvalidRequest."""
    fields = parse_qs(query.decode("latin-1"), keep_blank_values=True)
    last = _day(fields, "to") or today
    first = _day(fields, "from") or date.fromordinal(max(1, last.toordinal() - USUAL_DAYS + 1))
    if first > last:
        raise InvalidRequest(f"from is {first}, which is after to, {last}", param="from")
    if (last - first).days >= days + 1:
        raise InvalidRequest(f"from {first} to {last} is more than the {days} days that are kept", param="from")
    return first, last, fields.get("key", [None])[-1]


def _day(fields: dict[str, list[str]], name: str) -> date | None:
    if name not in fields:
        return None
    try:
        return date.fromisoformat(fields[name][-1])
    except ValueError:
        raise InvalidRequest(f"{name} should be a day such as 2026-01-31, in UTC", param=name) from None
