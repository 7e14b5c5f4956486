"""uvicorn's HTTP/1.1 protocol with the three things it lacks for us.

Through `scope["extensions"]` an application can drop a connection whose reader is dead together with what is queued for
it, and write a piece of a body from a plain function (`Channel`). And a request's head is bounded: the parser below
would go on reading one for as long as it comes.
"""

from __future__ import annotations

from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.server.exchange import ABORT, CHANNEL

MAX_HEAD = 64 * 1024
"""Bytes of request line and headers, as far as they do not come in one piece with the rest."""

_BODY = (
    b'{"error":{"message":"the request\'s headers are over %d bytes; send less","type":"invalid_request_error",'
    b'"param":null,"code":"headers_too_large"}}' % MAX_HEAD
)
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n" % len(_BODY) + _BODY
)


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


class WireProtocol(HttpToolsProtocol):
    """One connection."""

    _in_head = False
    _head = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head += len(data)
            if self._head > MAX_HEAD and not self.transport.is_closing():
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)["extensions"] = {ABORT: self.transport.abort}
        self._in_head = True
        self._head = 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        if self.cycle is not None:
            cast("dict[str, Any]", self.scope)["extensions"][CHANNEL] = Channel(self, self.cycle)

    def _refuse_head(self) -> None:
        # Behind an answer that is still being written there is no place for another.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_TOO_LARGE)
        self.transport.close()
