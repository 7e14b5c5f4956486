from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import InvalidRequest
from headrace.gateway.usage import FileUsage, Usage
from headrace.server.exchange import Exchange
from headrace.server.usage import asked, usage_routes
from server.asgi_driver import Client, on_loop

TODAY = date(2027, 1, 31)


def test_what_is_asked_for() -> None:
    assert asked(b"", TODAY, 400) == (date(2027, 1, 1), TODAY, None)
    assert asked(b"key=a.b", TODAY, 400) == (date(2027, 1, 1), TODAY, "a.b")
    assert asked(b"from=2027-01-30", TODAY, 400) == (date(2027, 1, 30), TODAY, None)
    assert asked(b"to=2026-12-31", TODAY, 400) == (date(2026, 12, 1), date(2026, 12, 31), None)
    assert asked(b"from=2026-12-31&to=2026-12-31&key=", TODAY, 400) == (date(2026, 12, 31), date(2026, 12, 31), "")
    assert asked(b"to=0001-01-02", TODAY, 400)[0] == date.min


@pytest.mark.parametrize(
    ("query", "param", "message"),
    [
        (b"from=yesterday", "from", "should be a day such as 2026-01-31"),
        (b"to=2026-02-30", "to", "should be a day"),
        (b"to=", "to", "should be a day"),
        (b"from=2027-02-01", "from", "is after to, 2027-01-31"),
        (b"from=2000-01-01", "from", "more than the 400 days that are kept"),
        (b"from=\xff", "from", "should be a day"),
    ],
)
def test_what_cannot_be_asked_for(query: bytes, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        asked(query, TODAY, 400)
    assert caught.value.param == param


@on_loop
async def test_the_route(tmp_path: Path) -> None:
    usage = Usage(FileUsage(tmp_path), lambda: datetime(2027, 1, 31, tzinfo=UTC).timestamp(), lambda: "1", days=400)
    usage.book("a", "m", "ok", 3, 1, 2)
    (route,) = usage_routes(usage)
    assert (route.path, route.public, route.allow) == ("/admin/v1/usage", False, ("GET", "HEAD"))

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await route.handler("GET")(Exchange(scope, receive, send, first_byte=0.0, new_id=lambda: "id"))

    async with Client(app).get("/admin/v1/usage") as call:
        await call.task
        body = call.json()
    assert (body["from"], body["to"], body["complete"]) == ("2027-01-01", "2027-01-31", True)
    (row,) = body["rows"]
    assert (row["day"], row["key"], row["model"], row["requests"]) == ("2027-01-31", "a", "m", 1)
    await usage.close()
