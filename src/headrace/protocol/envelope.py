"""An error as OpenAI's clients expect it: `{"error": {"message", "type", "param", "code"}}`, all four always there."""

from __future__ import annotations

from headrace.core.errors import HeadraceError
from headrace.protocol import sse


def envelope(error: HeadraceError) -> bytes:
    """The JSON body of a response that failed before its first byte."""
    return sse.json_value(
        {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
    )


def error_event(error: HeadraceError) -> bytes:
    """The event that ends a stream that failed after its first byte; no `[DONE]` follows it."""
    return sse.event(envelope(error))
