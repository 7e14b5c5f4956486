"""One HTTP request and its answer, on the raw ASGI interface.

Rules: a status goes out at most once; whole answers carry their length; every answer carries the request id; a
write to a client that is gone raises `ClientGone`, whatever the server underneath does with it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol

from headrace.core.errors import (
    BodyTooLarge,
    Draining,
    HeadraceError,
    MethodNotAllowed,
    Overloaded,
    RateLimited,
    ServiceError,
    Unauthorized,
)
from headrace.core.timeline import Timeline
from headrace.gateway.guard import ANYBODY, Caller
from headrace.observe.record import OTHER, Record, outcome_of
from headrace.protocol.envelope import envelope

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

JSON = b"application/json"
CLOSE = (b"connection", b"close")
ABORT = "headrace.abort"
"""ASGI extension of our own protocol class: a function that drops the connection with all that is not yet sent."""

CHANNEL = "headrace.channel"
"""ASGI extension of our own protocol class: writes a piece of a begun body without a coroutine."""

GONE = "headrace.gone"
"""ASGI extension of our own protocol class: takes a function that is called once when the client leaves, or None."""

UNASKED = "headrace.unasked"
"""ASGI extension of our own protocol class: does the client wait to be asked for its body (`Expect: 100-continue`)?"""

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
SWALLOW_S = 2.0
"""How long a client whose body was refused may go on sending before its connection is closed."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class Channel(Protocol):
    """What stands behind CHANNEL."""

    def ready(self) -> bool:
        """Whether `write` would go straight to the socket."""
        ...

    def write(self, body: bytes) -> None:
        """Send a piece that is not the last one. Only if `ready`."""
        ...


class ClientGone(Exception):
    """The client left; there is nobody to answer."""


class Exchange:
    """What a handler gets. `new_id` makes a request id for clients that sent none, or none that may be repeated."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, first_byte: float, new_id: Callable[[], str]
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        self.receive = receive
        self._send = send
        # Taken out: the scope belongs to the connection, which they hold.
        extensions = scope.pop("extensions", None) or {}
        self.abort: Callable[[], None] | None = extensions.get(ABORT)
        self.channel: Channel | None = extensions.get(CHANNEL)
        self.on_gone: Callable[[Callable[[], None] | None], None] | None = extensions.get(GONE)
        self._unasked: Callable[[], bool] | None = extensions.get(UNASKED)
        given = self.values(b"x-request-id")
        valid = len(given) == 1 and _REQUEST_ID.fullmatch(given[0])
        self.request_id = given[0].decode() if valid else new_id()
        self.timeline = Timeline(first_byte)
        method = self.method if self.method in METHODS else OTHER
        self.record = Record(self.request_id, method, OTHER, self.timeline)
        self.caller: Caller = ANYBODY
        self.started = False
        self.accounted = True
        """`record` is this exchange's own; else a generation that outlives it has it, and accounts for it."""
        self.extra: tuple[tuple[bytes, bytes], ...] = ()
        """Headers of its answer, whichever that becomes."""

    def values(self, name: bytes) -> list[bytes]:
        """All values of a header; `name` in lower case."""
        return [value for key, value in self.headers if key == name]

    def hand_over(self) -> Record:
        """Give the record, and with it the account of the request, to a generation of its own life."""
        record = self.record
        self.record = Record(record.request_id, record.method, record.route, Timeline(self.timeline.first_byte))
        self.accounted = False
        return record

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status line. Raises ClientGone."""
        self.started = True
        self.record.status = status
        head = [(b"x-request-id", self.request_id.encode()), *self.extra, *headers]
        if self._unasked is not None and self._unasked() and CLOSE not in head:
            # It may send the body all the same, or take this for the end and go on with a next request: nobody can
            # tell which it is, so nothing more is read.
            head.append(CLOSE)
        await self._hand_over({"type": "http.response.start", "status": status, "headers": head})

    async def write(self, body: bytes, *, more: bool) -> None:
        """Send a piece of the body; returns once the socket can take more. Raises ClientGone."""
        await self._hand_over({"type": "http.response.body", "body": body, "more_body": more})

    async def answer(self, status: int, body: bytes, *, content_type: bytes = JSON, headers: Headers = ()) -> None:
        """Send a whole answer. Raises ClientGone."""
        await self.start(status, self._whole(body, content_type, headers))
        await self.write(b"" if self.method == "HEAD" else body, more=False)

    async def confirm(self, headers: Headers) -> None:
        """Answer 204, which has no body. Raises ClientGone."""
        await self.start(204, headers)
        await self.write(b"", more=False)

    async def refuse(self, error: HeadraceError) -> None:
        """Answer with an error's status and envelope. Raises ClientGone."""
        self.record.outcome = outcome_of(error)
        if isinstance(error, Overloaded):
            self.record.reason = error.reason
        if isinstance(error, RateLimited):
            self.record.limit = error.limit
        body = envelope(error)
        await self.start(error.status, self._whole(body, JSON, _headers_of(error)))
        if isinstance(error, BodyTooLarge):
            # The connection closes with the last piece. Closing while the client still sends resets it, and the
            # answer may be lost on its way: so hand over the answer, let the client come to an end, then close.
            await self.write(body, more=True)
            await self._swallow()
            body = b""
        await self.write(b"" if self.method == "HEAD" else body, more=False)

    async def _swallow(self) -> None:
        """Read and forget what is left of the request, for a little while."""
        try:
            async with asyncio.timeout(SWALLOW_S):
                while (message := await self.receive())["type"] == "http.request" and message.get("more_body"):
                    pass
        except TimeoutError:
            pass

    def _whole(self, body: bytes, content_type: bytes, headers: Headers) -> list[tuple[bytes, bytes]]:
        return [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers]

    async def _hand_over(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:
            raise ClientGone from error


def _headers_of(error: HeadraceError) -> list[tuple[bytes, bytes]]:
    """What an error's answer says besides its envelope."""
    out: list[tuple[bytes, bytes]] = []
    if isinstance(error, ServiceError | RateLimited) and error.retry_after is not None:
        out.append((b"retry-after", b"%d" % error.retry_after))
    if isinstance(error, MethodNotAllowed):
        out.append((b"allow", ", ".join(error.allow).encode()))
    if isinstance(error, Unauthorized):
        out.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, BodyTooLarge | Draining):
        out.append(CLOSE)
    return out
