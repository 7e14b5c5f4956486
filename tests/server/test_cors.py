from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import StartupError
from headrace.server.cors import Cors
from headrace.server.exchange import Exchange
from headrace.server.route import Route

PAGE = b"https://chat.example.org"
ASKS = (b"access-control-request-method", b"POST")


async def handler(exchange: Exchange) -> None: ...


def exchange(method: str, *headers: tuple[bytes, bytes]) -> Exchange:
    async def receive() -> dict[str, Any]:
        raise AssertionError

    async def send(message: Any) -> None:
        raise AssertionError

    scope = {"method": method, "path": "/", "headers": list(headers)}
    return Exchange(scope, receive, send, first_byte=0.0, new_id=lambda: "id")


def of(setting: str) -> Cors:
    cors = Cors.of(setting)
    assert cors is not None
    return cors


@pytest.mark.parametrize("setting", ["", " ", ",", " , "])
def test_it_is_off_without_origins(setting: str) -> None:
    assert Cors.of(setting) is None


def test_an_origin_of_the_list_may_read_and_others_may_not() -> None:
    cors = of(f"{PAGE.decode()}, http://localhost:5173")
    allowed = dict(cors.headers([PAGE]))
    assert allowed[b"access-control-allow-origin"] == PAGE
    assert allowed[b"vary"] == b"Origin"
    exposed = allowed[b"access-control-expose-headers"].split(b", ")
    assert {b"x-request-id", b"retry-after", b"server-timing", b"x-headrace-stream"} <= set(exposed)
    assert dict(cors.headers([b"http://localhost:5173"]))[b"access-control-allow-origin"] == b"http://localhost:5173"
    strangers = [
        [], [b"null"], [PAGE + b"."], [PAGE.upper()], [PAGE + b":443"], [b"http://chat.example.org"],
        [b"https://evil-chat.example.org"], [b"https://chat.example.org.evil.com"], [PAGE, PAGE], [b""], [b"*"],
    ]  # fmt: skip
    for stranger in strangers:
        assert cors.headers(stranger) == ((b"vary", b"Origin"),), stranger


def test_a_star_allows_every_page_without_naming_it_or_its_cookies() -> None:
    headers = of("*").headers([b"https://anywhere.example"])
    assert dict(headers)[b"access-control-allow-origin"] == b"*"
    answer = of("*").preflight(exchange("OPTIONS", (b"origin", b"null"), ASKS), Route("/", {"GET": handler}))
    assert answer
    assert not [key for key, _ in (*headers, *answer) if b"credentials" in key]


def test_a_preflight_is_answered_from_the_row() -> None:
    row = Route("/v1/things/{name}", {"GET": handler, "DELETE": handler})
    answer = of(PAGE.decode()).preflight(exchange("OPTIONS", (b"origin", PAGE), ASKS), row)
    assert answer is not None
    found = dict(answer)
    assert found[b"access-control-allow-methods"] == b"DELETE, GET, HEAD"
    allowed = {b"authorization", b"content-type", b"last-event-id", b"x-request-id", b"idempotency-key"}
    assert allowed <= set(found[b"access-control-allow-headers"].split(b", "))


@pytest.mark.parametrize(
    ("method", "headers", "row"),
    [
        ("POST", ((b"origin", PAGE), ASKS), True),
        ("OPTIONS", ((b"origin", PAGE),), True),
        ("OPTIONS", (ASKS,), True),
        ("OPTIONS", ((b"origin", PAGE), ASKS), False),
    ],
)
def test_what_is_no_preflight_goes_its_way(method: str, headers: tuple[tuple[bytes, bytes], ...], row: bool) -> None:
    route = Route("/", {"POST": handler}) if row else None
    assert of(PAGE.decode()).preflight(exchange(method, *headers), route) is None


def test_a_stranger_is_told_nothing() -> None:
    call = exchange("OPTIONS", (b"origin", b"https://other.example"), ASKS)
    assert of(PAGE.decode()).preflight(call, Route("/", {"POST": handler})) == ()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("HTTPS://Chat.Example.org", PAGE),
        ("https://chat.example.org:443", PAGE),
        ("http://10.0.0.1:8080", b"http://10.0.0.1:8080"),
        ("http://[::1]:3000", b"http://[::1]:3000"),
    ],
)
def test_origins_are_meant_as_browsers_write_them(written: str, meant: bytes) -> None:
    assert dict(of(written).headers([meant]))[b"access-control-allow-origin"] == meant


@pytest.mark.parametrize(
    "wrong",
    [
        "chat.example.org", "https://", "https://a/", "https://a/b", "https://a?b", "ftp://a", "null", "https://*.a.org",
        "https://a:x", "https://a b", "https://u:p@a", "https://a\r\nx: y", "*,https://a", "https://a:99999",
    ],
)  # fmt: skip
def test_what_is_no_origin_stops_the_start(wrong: str) -> None:
    with pytest.raises(StartupError, match=r"server\.cors_origins"):
        Cors.of(wrong)
