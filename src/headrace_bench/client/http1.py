"""HTTP/1.1 without a socket: a request's bytes, and a response's bytes → its head, its body, its end.

    bytes ── Responses.feed ──► [Head, bytes, bytes, …, End]        chunked, by length, or until the connection closes

Rules: informational responses (1xx) are passed over; what comes after a message's end without a request is a fault.
"""

from __future__ import annotations

from collections.abc import Mapping

import httptools

from headrace_bench.client.answer import Head


class Malformed(Exception):
    """Not HTTP; the message says how."""


class End:
    """The message is complete. `reusable`: the connection can take another request."""

    __slots__ = ("reusable",)

    def __init__(self, reusable: bool) -> None:
        self.reusable = reusable


Part = Head | bytes | End


def head(method: str, path: str, host: str, headers: Mapping[str, str]) -> bytes:
    """A request's head but for its length, which `request` adds."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("latin-1")


def request(start: bytes, body: bytes) -> bytes:
    """`start` by `head`, with its body."""
    return b"%b\r\nContent-Length: %d\r\n\r\n%b" % (start, len(body), body)


class Responses:
    """Reads the responses of one connection, one after the other."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._found: list[Part] = []
        self._until_close = False
        """The message has no length of its own: the end of the connection ends it."""

    def feed(self, data: bytes) -> list[Part]:
        """What `data` completes. Raises Malformed; `found` in it is lost, as the connection is."""
        self._found = []
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise Malformed("it switches to another protocol") from None
        except httptools.HttpParserError as error:
            raise Malformed(f"{error}: {data[:40]!r}") from None
        return self._found

    def eof(self) -> End | None:
        """The connection has closed: the end of a message that has no length, else None."""
        if not self._until_close:
            return None
        self._until_close = False
        return End(reusable=False)

    # What the parser calls ──────────────────────────────────────────────────────────────────────────────────────────
    def on_message_begin(self) -> None:
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return
        length = self._headers.get("content-length")
        chunked = "chunked" in self._headers.get("transfer-encoding", "").lower()
        self._until_close = length is None and not chunked and status not in (204, 304)
        self._found.append(Head(status, self._headers))

    def on_body(self, data: bytes) -> None:
        self._found.append(data)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        self._until_close = False
        self._found.append(End(self._parser.should_keep_alive()))
