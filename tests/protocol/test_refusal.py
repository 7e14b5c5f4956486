"""What error statuses of another server become."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.core.errors import HeadraceError, Overloaded, UpstreamFailed, UpstreamRefused
from headrace.protocol.refusal import MAX_MESSAGE, refusal


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"error": {"message": "m", "type": "t", "param": None, "code": None, **fields}})


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_wrong_request_is_told_in_its_words(status: int) -> None:
    error = refusal(status, "", body(message="max_tokens is\n too  large", param="max_tokens", code="too_large"))
    assert isinstance(error, UpstreamRefused)
    assert (error.status, error.message, error.param, error.code) == (
        status, "max_tokens is too large", "max_tokens", "too_large",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b'{"error":"no such field"}', "no such field"),
        (b'{"object":"error","message":"too long","code":400}', "too long"),
        (b'{"detail":"not this"}', "not this"),
        (b'{"detail":[{"loc":["body"]}]}', "the engine answered 400"),
        (b"<html>", "the engine answered 400"),
        (b"[]", "the engine answered 400"),
        (b"", "the engine answered 400"),
    ],
)
def test_words_in_other_forms(given: bytes, message: str) -> None:
    error = refusal(400, "", given)
    assert isinstance(error, UpstreamRefused)
    assert error.message == message


def test_words_are_bounded() -> None:
    error = refusal(400, "", body(message="x" * 10_000, param="p" * 1000, code="c" * 1000))
    assert len(error.message) == MAX_MESSAGE
    assert len(error.param or "") == len(error.code or "") == 100


@pytest.mark.parametrize(
    ("status", "given", "kind"),
    [
        (404, body(param="messages"), UpstreamRefused),
        (404, body(code="model_not_found"), UpstreamFailed),
        (404, body(param="model"), UpstreamFailed),
        (404, b"not found", UpstreamFailed),
        (400, body(code="model_not_found"), UpstreamFailed),
        (401, body(message="bad key sk-123"), UpstreamFailed),
        (403, b"", UpstreamFailed),
        (301, b"", UpstreamFailed),
        (204, b"", UpstreamFailed),
        (402, b"", UpstreamFailed),
        (500, body(), UpstreamFailed),
        (502, b"<html>", UpstreamFailed),
    ],
)
def test_kinds(status: int, given: bytes, kind: type[HeadraceError]) -> None:
    error = refusal(status, "", given)
    assert type(error) is kind
    assert "sk-" not in error.message


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7), (" 0 ", 1), ("99999", 3600), ("Fri, 31 Dec", 1), ("", 1), ("-3", 1), ("1" * 50, 1)],
)
@pytest.mark.parametrize("status", [408, 429, 503, 529])
def test_no_room(status: int, header: str, seconds: int) -> None:
    error = refusal(status, header, body())
    assert isinstance(error, Overloaded)
    assert error.retry_after == seconds
