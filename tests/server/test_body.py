from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import BodyTooLarge
from headrace.server.body import read_body
from headrace.server.exchange import ClientGone, Exchange
from server.asgi_driver import on_loop


def exchange(messages: list[dict[str, Any]], *, length: bytes | None = None) -> Exchange:
    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError("nothing is sent while reading")

    headers = [] if length is None else [(b"content-length", length)]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    return Exchange(scope, receive, send, first_byte=0.0, new_id=lambda: "id")


def chunks(*bodies: bytes) -> list[dict[str, Any]]:
    last = len(bodies) - 1
    return [{"type": "http.request", "body": body, "more_body": i < last} for i, body in enumerate(bodies)]


@on_loop
async def test_joins_what_comes() -> None:
    assert await read_body(exchange(chunks(b"ab", b"", b"c")), limit=3) == b"abc"
    assert await read_body(exchange([{"type": "http.request"}]), limit=3) == b""


@on_loop
async def test_an_announced_length_over_the_limit_is_refused_unread() -> None:
    messages = chunks(b"x")
    with pytest.raises(BodyTooLarge, match=r"100 bytes, this one has 101"):
        await read_body(exchange(messages, length=b"101"), limit=100)
    assert len(messages) == 1


@pytest.mark.parametrize("length", [b"9" * 16, b"9" * 100_000])
@on_loop
async def test_a_length_of_many_digits_is_too_large(length: bytes) -> None:
    with pytest.raises(BodyTooLarge):
        await read_body(exchange([], length=length), limit=100)


@on_loop
async def test_counts_what_comes_and_stops() -> None:
    messages = chunks(*[b"x" * 40] * 10)
    with pytest.raises(BodyTooLarge):
        await read_body(exchange(messages), limit=100)
    assert len(messages) == 7, "read up to the first piece over the limit"


@on_loop
async def test_the_limit_itself_is_allowed() -> None:
    assert len(await read_body(exchange(chunks(b"x" * 100), length=b"100"), limit=100)) == 100


@on_loop
async def test_a_client_that_leaves_on_the_way_is_gone() -> None:
    messages = [*chunks(b"x", b"y")[:1], {"type": "http.disconnect"}]
    with pytest.raises(ClientGone):
        await read_body(exchange(messages), limit=100)
