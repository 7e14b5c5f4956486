r"""Server-sent events, as far as we need them: one `data:` line an event.

Rules: an event is written whole; it holds no line end of any kind but its own two. Some clients split the stream at
whatever Unicode calls a line separator, so U+0085, U+2028 and U+2029 leave as JSON escapes, as control characters do.
"""

from __future__ import annotations

from typing import Any

import msgspec

COMMENT = b": hb\n\n"
"""Keeps a silent connection open; clients skip it."""
DONE = b"data: [DONE]\n\n"
"""The end of a stream that went well."""

_encode = msgspec.json.Encoder().encode
_SEPARATORS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def event(data: bytes) -> bytes:
    """One event; `data` is JSON of this module's making, so it holds no line end."""
    return b"data: " + data + b"\n\n"


def json_string(text: str) -> bytes:
    """`text` as a JSON string, quotes included, safe inside an event."""
    return _encode(text) if text.isascii() else escaped(_encode(text))


def json_value(value: Any) -> bytes:
    """Any JSON value, compact, safe inside an event. A number that is not finite becomes null."""
    return escaped(_encode(value))


def escaped(data: bytes) -> bytes:
    """JSON in UTF-8 without the characters at which some clients split."""
    # Outside strings JSON is ASCII, and UTF-8 never hides one character in another: replacing bytes is exact.
    for raw, escape in _SEPARATORS:
        if raw in data:
            data = data.replace(raw, escape)
    return data
