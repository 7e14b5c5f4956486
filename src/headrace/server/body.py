"""Reads a request's body, and stops when it is too large.

A length that is announced is believed only when it is over the limit; what comes is counted either way.
"""

from __future__ import annotations

from headrace.core.errors import BodyTooLarge
from headrace.server.exchange import ClientGone, Exchange


async def read_body(exchange: Exchange, *, limit: int) -> bytes:
    """The body, at most `limit` bytes. Raises BodyTooLarge, ClientGone."""
    for value in exchange.values(b"content-length"):
        # A number of many digits is over any limit; reading it as one would cost time for nothing.
        if value.isdigit() and (len(value) > 15 or int(value) > limit):
            raise _too_large(limit, "is larger" if len(value) > 15 else f"has {int(value)}")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await exchange.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit, "is larger")
        if part:
            parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int, this: str) -> BodyTooLarge:
    return BodyTooLarge(f"a request body may have {limit} bytes, this one {this}; send less, or raise the limit")
