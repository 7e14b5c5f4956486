"""uvicorn's HTTP/1.1 protocol with the two things it lacks for us.

An application can drop a connection whose reader is dead together with what is queued for it
(`scope["extensions"]`), and a request's head is bounded: the parser below would go on reading one for as long as it
comes.
"""

from __future__ import annotations

from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.server.exchange import ABORT

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

    def _refuse_head(self) -> None:
        # Behind an answer that is still being written there is no place for another.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_TOO_LARGE)
        self.transport.close()
