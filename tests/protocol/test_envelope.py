"""Errors as clients read them."""

from __future__ import annotations

import json

import pytest

from headrace.core.errors import (
    BodyTooLarge,
    ContextExceeded,
    EngineFailed,
    HeadraceError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unauthorized,
)
from headrace.protocol.envelope import envelope, error_event

CASES = [
    (InvalidRequest("n must be 1", param="n"), "invalid_request_error", "n", None),
    (InvalidRequest("no JSON"), "invalid_request_error", None, None),
    (ContextExceeded("300 > 256", param="messages"), "invalid_request_error", "messages", "context_length_exceeded"),
    (Unauthorized("no key"), "authentication_error", None, "invalid_api_key"),
    (ModelNotFound("no model", param="model"), "invalid_request_error", "model", "model_not_found"),
    (BodyTooLarge("too large"), "invalid_request_error", None, "body_too_large"),
    (Overloaded("full"), "server_error", None, "overloaded"),
    (EngineFailed("broken"), "engine_error", None, "engine_failed"),
]


@pytest.mark.parametrize(("error", "type_", "param", "code"), CASES)
def test_all_four_keys_are_always_there(error: HeadraceError, type_: str, param: str | None, code: str | None) -> None:
    assert json.loads(envelope(error)) == {
        "error": {"message": error.message, "type": type_, "param": param, "code": code}
    }


def test_error_event_is_the_same_json_in_one_event() -> None:
    error = EngineFailed("it broke\u2028\nhere")
    data = error_event(error)
    assert data.startswith(b'data: {"error":{')
    assert data.endswith(b"}}\n\n")
    lines = data.decode().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0].removeprefix("data: ")) == json.loads(envelope(error))
