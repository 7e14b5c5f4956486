from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.core.errors import (
    BodyTooLarge,
    Draining,
    EngineFailed,
    HeadraceError,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    RateLimited,
    Unauthorized,
)
from headrace.server.exchange import ClientGone, Exchange
from server.asgi_driver import on_loop


class Wire:
    def __init__(self, *messages: dict[str, Any]) -> None:
        self.sent: list[Any] = []
        self.messages = [*messages]
        self.error: Exception | None = None

    async def receive(self) -> dict[str, Any]:
        return self.messages.pop(0) if self.messages else {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(message)


def exchange(wire: Wire, *ids: bytes, method: str = "GET") -> Exchange:
    scope = {"type": "http", "method": method, "path": "/p", "headers": [(b"x-request-id", value) for value in ids]}
    return Exchange(scope, wire.receive, wire.send, first_byte=1.0, new_id=lambda: "made")


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ([], "made"),
        ([b"ok-1"], "ok-1"),
        ([b"A.b_c-9"], "A.b_c-9"),
        ([b"x" * 128], "x" * 128),
        ([b"x" * 129], "made"),
        ([b""], "made"),
        ([b"a\tb"], "made"),
        ([b'x" y'], "made"),
        ([b"\x80\xff"], "made"),
        ([b"ok\n"], "made"),
        ([b"a", b"b"], "made"),
    ],
)
def test_request_ids_from_outside_are_repeated_only_if_harmless(given: list[bytes], used: str) -> None:
    assert exchange(Wire(), *given).request_id == used


@on_loop
async def test_a_whole_answer_has_its_length_type_and_id() -> None:
    wire = Wire()
    await exchange(wire).answer(200, b"body", content_type=b"text/plain", headers=[(b"x", b"y")])
    start, body = wire.sent
    assert start["status"] == 200
    assert dict(start["headers"]) == {
        b"x-request-id": b"made", b"content-type": b"text/plain", b"content-length": b"4", b"x": b"y",
    }  # fmt: skip
    assert body == {"type": "http.response.body", "body": b"body", "more_body": False}


@on_loop
async def test_head_gets_the_headers_of_get() -> None:
    wire = Wire()
    await exchange(wire, method="HEAD").answer(200, b"body")
    assert dict(wire.sent[0]["headers"])[b"content-length"] == b"4"
    assert wire.sent[1]["body"] == b""


@pytest.mark.parametrize(
    ("error", "status", "outcome", "headers"),
    [
        (InvalidRequest("m", param="n"), 400, "invalid", {}),
        (ModelNotFound("m", param="model"), 404, "invalid", {}),
        (Unauthorized("m"), 401, "invalid", {b"www-authenticate": b"Bearer"}),
        (MethodNotAllowed("m", allow=("GET", "HEAD")), 405, "invalid", {b"allow": b"GET, HEAD"}),
        (Overloaded("m", retry_after=7), 503, "rejected", {b"retry-after": b"7"}),
        (RateLimited("m", retry_after=9), 429, "invalid", {b"retry-after": b"9"}),
        (Draining("m"), 503, "rejected", {b"retry-after": b"1", b"connection": b"close"}),
        (EngineFailed("m"), 500, "error", {}),
    ],
)
@on_loop
async def test_an_error_is_answered_with_its_envelope(
    error: HeadraceError, status: int, outcome: str, headers: dict[bytes, bytes]
) -> None:
    wire = Wire()
    one = exchange(wire)
    await one.refuse(error)
    start, body = wire.sent
    assert start["status"] == status
    assert one.record.outcome == outcome
    sent = dict(start["headers"])
    assert int(sent.pop(b"content-length")) == len(body["body"])
    assert sent == {b"x-request-id": b"made", b"content-type": b"application/json", **headers}
    envelope = msgspec.json.decode(body["body"])
    assert envelope == {"error": {"message": "m", "type": error.type, "param": error.param, "code": error.code}}


@on_loop
async def test_why_the_queue_refused_is_remembered() -> None:
    for error in (Overloaded("m", reason="deadline"), Overloaded("m"), Draining("m")):
        one = exchange(Wire())
        await one.refuse(error)
        assert one.record.reason == getattr(error, "reason", None)


@on_loop
async def test_a_body_that_is_too_large_is_answered_before_the_rest_is_let_go() -> None:
    more = {"type": "http.request", "body": b"x", "more_body": True}
    wire = Wire(more, more, {"type": "http.request", "body": b"x", "more_body": False})
    await exchange(wire).refuse(BodyTooLarge("too large"))
    start, body, end = wire.sent
    assert dict(start["headers"])[b"connection"] == b"close"
    assert (len(body["body"]), body["more_body"]) == (int(dict(start["headers"])[b"content-length"]), True)
    assert end == {"type": "http.response.body", "body": b"", "more_body": False}
    assert wire.messages == []


@on_loop
async def test_a_send_that_fails_means_that_the_client_is_gone() -> None:
    wire = Wire()
    wire.error = ConnectionResetError()
    with pytest.raises(ClientGone):
        await exchange(wire).answer(200, b"")


def test_an_unknown_method_is_not_kept() -> None:
    assert exchange(Wire(), method="BREW").record.method == "other"
    assert exchange(Wire(), method="POST").record.method == "POST"
