"""uvicorn's HTTP/1.1 protocol with what it lacks for us.

    bytes ─▶ parser ─▶ head ─▶ fault? ─▶ refused: one answer, then the connection ends
      │                  └─▶ application ─▶ answer
      └─ too many, too slow ─▶ refused

Through `scope["extensions"]` an application can drop a connection whose reader is dead together with what is queued for
it, write a piece of a body from a plain function (`Channel`), and hear of its client's leaving without a task that
waits for it. A request is bounded: in bytes that are not its body, in headers, and in the time that it may take.

Rules: whatever comes behind a fault is read by nobody; an answer that was begun before it is finished first, since a
refusal in the middle of it would be taken for a part of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.server.exchange import ABORT, CHANNEL, GONE, UNASKED
from headrace.server.head import (
    MALFORMED,
    MAX_HEAD,
    MAX_HEADERS,
    TOO_LARGE,
    TOO_MANY,
    TOO_SLOW,
    Fault,
    fault_of,
    without_upgrade,
)

FRAMING = 16
"""Bytes of framing that each byte of a body may bring: in chunks of one byte it is 5."""
MIN_BODY = 1024
"""Bytes of a body that must come in `head_timeout_s`."""
HEAD_TIMEOUT_S = 30.0
MAX_PIPELINED = 4
"""Requests that may wait behind the running one while we still read, and so hear of their client's leaving."""


class Channel:
    """A begun, chunked response of one connection. What `send` does with a middle piece, without a coroutine."""

    __slots__ = ("_cycle", "_protocol")

    def __init__(self, protocol: HttpToolsProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle

    def ready(self) -> bool:
        """Whether `write` would go straight to the socket."""
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding
            and cycle.response_started
            and not cycle.response_complete
            and not cycle.disconnected
            and not self._protocol.flow.write_paused
        )

    def write(self, body: bytes) -> None:
        """Send a piece that is not the last one. Only if `ready`."""
        self._protocol.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def unasked(self) -> bool:
        """UNASKED, see `exchange`: nothing of the body has come, and nobody asked for it."""
        cycle = self._cycle
        return cycle.waiting_for_100_continue and cycle.more_body and not cycle.body


class Unframed:
    """`app` for one HTTP/1.0 client, which knows no chunks: a body of unknown length ends with its connection."""

    def __init__(self, app: Any, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        cycle, unframed = self._cycle, False

        async def bare(message: Any) -> None:
            nonlocal unframed
            if message["type"] == "http.response.start":
                unframed = all(name != b"content-length" for name, _ in message["headers"])
                if unframed:
                    cycle.chunked_encoding = False  # so that it adds no header, and no `Channel` is ready
            elif unframed:
                cycle.expected_content_length = len(message["body"])  # what comes is what was to come
            await send(message)

        await self._app(scope, receive, bare)


class WireProtocol(HttpToolsProtocol):
    """One connection."""

    head_timeout_s = HEAD_TIMEOUT_S
    """From the connection's beginning to a request, from its first byte to the end of its head, then for each
    `MIN_BODY` of its body."""

    refused: Callable[[int], None] = staticmethod(lambda status: None)
    """Told the status of each refusal, also of one whose answer has no place."""

    _message = False
    """A request has begun and is not complete."""
    _in_head = False
    _framing = 0
    """Bytes since the last request's end that belong to no body."""
    _head = 0
    """Bytes of the target and the headers that the parser found."""
    _body = 0
    _seen = 0
    """What `_body` was when the time was looked at."""
    _plain = b""
    """The head of a request that asked for another protocol, without that."""
    _fault: Fault | None = None
    _deaf = False
    """Nothing that comes is read any more."""
    _timer: asyncio.TimerHandle | None = None
    _gone: Callable[[], None] | None = None

    # The connection ───────────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._unset_keepalive_if_required()
        for cycle, _ in self.pipeline:
            cycle.disconnected = True
        self.pipeline.clear()
        super().connection_lost(exc)
        gone, self._gone = self._gone, None
        if gone is not None:
            gone()

    def watch(self, gone: Callable[[], None] | None) -> None:
        """GONE, see `exchange`. The running request's; its body must have been read."""
        self._gone = gone
        if gone is not None:
            self.flow.resume_reading()
            if self.parser is None:  # the connection was lost before
                self._gone = None
                gone()

    # The parser ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        self._framing += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(self._fault or MALFORMED)
        else:
            if self._framing > MAX_HEAD + FRAMING * self._body:
                self._refuse(TOO_LARGE)
        self._look_out()

    def _feed(self, data: bytes) -> None:
        """Raises HttpParserError."""
        rest = memoryview(
            data
        )  # thousands of wishes may stand one behind the other: what follows is not copied for each
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser takes what follows for another protocol. Nobody has to agree to one: so the same head goes
                # in again without the wish. Some clients ask for HTTP/2 in this way with every request.
                rest = rest[upgrade.args[0] :]
                plain, self._plain = self._plain, b""
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(plain)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._disarm()  # its head has a time of its own, whatever the connection did before
        self._message = self._in_head = True
        self._head = self._body = self._seen = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: the request is being answered, and nothing of it may change any more
        super().on_header(name, value)
        self._count(len(name) + len(value))
        if len(self.headers) > MAX_HEADERS:
            self._stop(TOO_MANY)

    def on_headers_complete(self) -> None:
        fault = fault_of(self.parser.get_http_version(), self.url, self.headers)
        if fault is not None:
            self._stop(fault)
        if self.parser.should_upgrade():
            method = self.parser.get_method()
            if method == b"CONNECT":
                self._stop(MALFORMED)
            self._plain = without_upgrade(method, self.url, self.parser.get_http_version(), self.headers)
            return
        before = self.cycle
        super().on_headers_complete()
        self._disarm()  # and so has its body
        self._in_head = False
        if self.cycle is not before:
            channel = Channel(self, self.cycle)
            extensions: dict[str, Any] = {ABORT: self.transport.abort, CHANNEL: channel, GONE: self.watch}
            if self.expect_100_continue:
                extensions[UNASKED] = channel.unasked
            cast("dict[str, Any]", self.scope)["extensions"] = extensions
        if self.pipeline and len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, Unframed(app, cycle) if old else app)

    def on_body(self, body: bytes) -> None:
        self._framing -= len(body)
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._plain:
            return  # it comes again
        self._message = False
        self._framing = 0
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > MAX_HEAD:
            self._stop(TOO_LARGE)

    def _stop(self, fault: Fault) -> None:
        """Let the parser go no further."""
        self._fault = fault
        raise ValueError(fault.code)

    # Refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _refuse(self, fault: Fault) -> None:
        """Say why and close; behind an answer that is being made there is no place for that."""
        if self.transport.is_closing():
            return
        self._deaf = True
        self.refused(fault.status)
        cycle = self.cycle
        if cycle is not None and self._message and not self._in_head:
            # The running request's own body, unless others wait before it.
            ours = not self.pipeline and not cycle.response_started
        else:
            ours = cycle is None or cycle.response_complete
        if ours:
            self.transport.write(fault.answer())
            self.transport.close()
        elif self._message and not self._in_head:
            self.transport.close()
        else:
            self._finish()

    def _finish(self) -> None:
        """Answer what is there, hear nothing more, and then close."""
        self._deaf = True
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    # Time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _look_out(self) -> None:
        """A request that is not complete is waited for, but not for ever. Nor is a next one."""
        if self._deaf or self.transport.is_closing():
            self._disarm()
        elif self._message or self._framing:
            if self._timer is None:
                self._arm()
        else:
            self._disarm()
            if self.cycle is not None and self.cycle.response_complete and self.timeout_keep_alive_task is None:
                # The answer came before the end of its request.
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.head_timeout_s, self._overdue)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _overdue(self) -> None:
        self._timer = None
        if self._message and not self._in_head:
            if self.flow.read_paused or self._body - self._seen >= MIN_BODY:
                self._seen = self._body
                self._arm()
                return
        elif not self._framing:
            self.transport.close()  # it never said anything
            return
        self._refuse(TOO_SLOW)


def protocol(head_timeout_s: float, refused: Callable[[int], None]) -> type[WireProtocol]:
    """A WireProtocol with these."""
    return type("WireProtocol", (WireProtocol,), {"head_timeout_s": head_timeout_s, "refused": staticmethod(refused)})
