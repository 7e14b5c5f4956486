"""One HTTP/1.1 connection to another server, from the client's side.

    request ──▶ socket ──▶ head ─▶ body* ─▶ end ──▶ free: kept for the next request, or closed
                  └── refused, reset, nonsense ─▶ end(fault)

Rules: one request at a time. What a read of the socket holds is handed on within that read, all of its body in one
call. `end` comes exactly once, unless the request was given up: then nothing comes any more, and the connection is cut,
for whoever is at its other end must see it at once. A connection is used again only if both ends know where the answer
ended.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import httptools

MAX_HEAD = 64 * 1024
"""Bytes of status line and headers; of trailers too."""


class WireFault(Exception):
    """The connection was of no use; the message is one line without addresses."""


@dataclass(frozen=True, slots=True)
class Head:
    """Of an answer."""

    status: int
    headers: dict[str, str]
    """Names in lower case; of a repeated header the last value."""

    def value(self, name: str) -> str:
        return self.headers.get(name, "")


class Reader(Protocol):
    """Takes an answer. It may give the request up at any time, also within a call."""

    def head(self, head: Head) -> None: ...

    def body(self, data: bytes) -> None:
        """All that came with one read of the socket."""
        ...

    def end(self, fault: WireFault | None) -> None:
        """The answer is complete, or will not be."""
        ...


class Http1Connection(asyncio.Protocol):
    """`freed(connection, usable)`: a request is over, and whether another may follow; also when an idle connection is
    closed by the other side."""

    def __init__(self, freed: Callable[[Http1Connection, bool], None]) -> None:
        self._freed = freed
        self._transport: asyncio.Transport | None = None
        self._reader: Reader | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._headers: dict[str, str] = {}
        self._head: Head | None = None
        self._bare = 0
        """Bytes of reads since the last one that brought a piece of the body."""
        self._body: list[bytes] = []
        self._told = False
        """The reader has the head."""
        self._complete = False
        self._excess = False
        """Something came after the answer's end."""
        self._sized = False
        """The answer says itself where it ends."""
        self._kept = False
        """The other side keeps the connection."""
        self._paused = False
        self._gone = False
        self.answered = False
        """A byte of the answer to the running request came."""
        self.opened_s = 0.0
        """What it took to open it, which is at least one round trip."""
        self.keep_s: float | None = None
        """How long the other side keeps an idle connection, if it said so."""

    # What its owner does ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def idle(self) -> bool:
        return self._reader is None and not self._gone and self._transport is not None

    def send(self, request: bytes, reader: Reader) -> None:
        """Begin. Only if `idle`."""
        assert self._transport is not None
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._head = None
        self._bare = 0
        self._told = self._complete = self._excess = self._sized = self.answered = False
        self._transport.write(request)

    def pause(self) -> None:
        """Read nothing: what comes waits in the kernel, and then at the sender."""
        if not self._paused and self._transport is not None and not self._gone:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self._transport is not None and not self._gone:
            self._paused = False
            self._transport.resume_reading()

    def cut(self) -> None:
        """Give up the request and the connection, at once. Nobody is told."""
        self._reader = None
        self._gone = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol ─────────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self._reader is None or self._parser is None:
            # Nobody asked: whatever it is, the connection is of no use now.
            self._lose()
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._excess = True
            self._hand_on()
            self._finish(None if self._complete else WireFault("it does not speak HTTP/1.1"))
            return
        if self._body or self._complete:
            self._bare = 0
        else:
            # Headers, trailers, the frames of chunks: nothing of it is handed on, and a parser keeps what is not whole.
            self._bare += len(data)
            if self._bare > MAX_HEAD:
                self._finish(WireFault(f"its headers are over {MAX_HEAD} bytes"))
                return
        self._hand_on()
        if self._complete:
            self._finish(None)

    def eof_received(self) -> None:
        return None  # close

    def connection_lost(self, error: Exception | None) -> None:
        if self._gone:
            return
        if self._reader is None:
            self._lose()
            return
        if self._head is not None and not self._sized and error is None:
            self._finish(None)
        elif self._head is None:
            self._finish(WireFault("it closed the connection without an answer"))
        else:
            self._finish(WireFault("it broke off in the middle of its answer"))

    # httptools ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        self._excess = self._complete
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is not None:
            return  # a trailer, of which nobody reads anything
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200 or self._excess:
            return
        headers = self._headers
        self._sized = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()
        self._head = Head(status, headers)
        self.keep_s = _keep_s(headers.get("keep-alive", ""))

    def on_body(self, data: bytes) -> None:
        if not self._excess:
            self._body.append(data)

    def on_message_complete(self) -> None:
        # An interim answer (100, 103) is none.
        if self._head is not None and not self._complete and self._parser is not None:
            self._complete = True
            self._kept = bool(self._parser.should_keep_alive())  # later the parser has forgotten

    # ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _hand_on(self) -> None:
        """What the parser found, to the reader: not from within the parser, which takes every error for its own."""
        if not self._told and self._head is not None and self._reader is not None:
            self._told = True
            self._reader.head(self._head)
        pieces = self._body
        if not pieces:
            return
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._reader is not None:
            self._reader.body(data)

    def _finish(self, fault: WireFault | None) -> None:
        reader, self._reader = self._reader, None
        self._parser = None
        transport = self._transport
        if self._gone or transport is None:
            return
        usable = (
            fault is None
            and self._sized
            and not self._excess
            and self._kept
            and transport.get_write_buffer_size() == 0
            and not transport.is_closing()
        )
        if usable:
            self.resume()
        else:
            self._gone = True
            transport.abort()
        self._freed(self, usable)
        if reader is not None:
            reader.end(fault)

    def _lose(self) -> None:
        """An idle connection is over."""
        self._gone = True
        if self._transport is not None:
            self._transport.abort()
        self._freed(self, False)


def _keep_s(header: str) -> float | None:
    """`timeout=5, max=100` → 5.0"""
    for part in header.split(","):
        name, _, value = part.strip().partition("=")
        if name.lower() == "timeout" and value.isascii() and value.isdigit() and len(value) < 6:
            return float(value)
    return None
