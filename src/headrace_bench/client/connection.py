"""One open connection to a server, by HTTP/1.1 or HTTP/2, and who hears what comes on it.

    request ─► Line ─► socket          socket ─► data_received ─► one stamp ─► parser ─► Listener

Rules: the clock is read once a read, before anything else is done; `sent` is when the kernel has taken the request's
last byte; a listener hears exactly one of `ended` and `broken`, and nothing after it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from headrace_bench.client import http1, http2
from headrace_bench.client.answer import Head
from headrace_bench.client.place import Place
from headrace_bench.record import Outcome

Clock = Callable[[], float]
"""Seconds, monotonic."""
AGENT = "headrace-bench"


class Listener(Protocol):
    """Who waits for one response. Every `at` is on the connection's clock."""

    def sent(self, at: float) -> None: ...
    def head(self, head: Head, at: float) -> None: ...
    def body(self, data: bytes, at: float) -> None: ...
    def ended(self, at: float) -> None: ...
    def broken(self, at: float, outcome: Outcome, why: str, untouched: bool) -> None:
        """`untouched`: not a byte of a response had come."""
        ...


@dataclass(frozen=True, slots=True)
class Ask:
    """A request but for its body; built once for many."""

    place: Place
    method: str
    path: str
    key: str | None = None
    keep_alive: bool = True
    head1: bytes = field(init=False)
    head2: list[tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        headers = {"User-Agent": AGENT, "Accept": "text/event-stream, application/json"}
        if self.method == "POST":
            headers["Content-Type"] = "application/json"
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        path, authority = self.place.prefix + self.path, self.place.authority
        head2 = http2.headers(self.method, authority, self.place.scheme, path, headers)
        object.__setattr__(self, "head2", head2)
        only1 = {} if self.keep_alive else {"Connection": "close"}
        object.__setattr__(self, "head1", http1.head(self.method, path, authority, {**headers, **only1}))


class Line(asyncio.Protocol):
    """What both have in common."""

    def __init__(self, clock: Clock, on_idle: Callable[[Line], None]) -> None:
        self._clock = clock
        self._on_idle = on_idle
        self._transport: asyncio.Transport | None = None
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the socket is closed."""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when requests can be sent. Raises ConnectionError."""

    @property
    def room(self) -> bool:
        """Takes a request now."""
        raise NotImplementedError

    @property
    def full(self) -> bool:
        """Open, and takes no request now."""
        return not self._closing() and not self.room

    def send(self, ask: Ask, body: bytes, listener: Listener) -> Callable[[], None]:
        """Sends a request; what it returns leaves it, at once and without a word to the listener."""
        if self._closing():
            listener.broken(self._clock(), "truncated", "it closed the connection", True)
            return lambda: None
        return self._send(ask, body, listener)

    def _send(self, ask: Ask, body: bytes, listener: Listener) -> Callable[[], None]:
        raise NotImplementedError

    def info(self, name: str) -> Any:
        """What the transport knows of the socket; None: nothing."""
        return None if self._transport is None else self._transport.get_extra_info(name)

    def close(self) -> None:
        """At once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # not one by class in uvloop
        self._transport = transport
        # With no room in the buffer, the loop calls `resume_writing` the moment the kernel has taken the last byte.
        transport.set_write_buffer_limits(high=0)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, error: Exception | None) -> None:
        at = self._clock()
        if not self.ready.done():
            self.ready.set_exception(ConnectionResetError("it closed the connection at once"))
            self.ready.exception()  # nobody may wait for it any more
        if not self.gone.done():
            self.gone.set_result(None)
        self._lost(at, error)

    def eof_received(self) -> None:
        self._lost(self._clock(), None)  # and the loop closes the socket

    def resume_writing(self) -> None:
        self._written(self._clock())

    def _write(self, data: bytes) -> None:
        transport = self._transport
        assert transport is not None
        transport.write(data)
        if not transport.get_write_buffer_size():
            self._written(self._clock())

    def _closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def _written(self, at: float) -> None:
        """All that was written is the kernel's."""
        raise NotImplementedError

    def _lost(self, at: float, error: Exception | None) -> None:
        """Nothing more comes. `error` None: the server has closed it properly."""
        raise NotImplementedError


class Plain(Line):
    """HTTP/1.1: one request at a time."""

    def __init__(self, clock: Clock, on_idle: Callable[[Line], None]) -> None:
        super().__init__(clock, on_idle)
        self._responses = http1.Responses()
        self._listener: Listener | None = None
        self._unsent = False
        self._heard = False
        self._keep = True

    @property
    def room(self) -> bool:
        return self._listener is None and not self._closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.ready.set_result(None)

    def _send(self, ask: Ask, body: bytes, listener: Listener) -> Callable[[], None]:
        self._listener, self._unsent, self._heard, self._keep = listener, True, False, ask.keep_alive
        self._write(http1.request(ask.head1, body))
        return self._leave

    def data_received(self, data: bytes) -> None:
        at = self._clock()
        listener = self._listener
        if listener is None:
            self.close()  # nobody asked
            return
        self._heard = True
        try:
            parts = self._responses.feed(data)
        except http1.Malformed as error:
            self._break(at, "protocol", f"not HTTP/1.1: {error}")
            return
        for part in parts:
            if isinstance(part, bytes):
                listener.body(part, at)
            elif isinstance(part, Head):
                listener.head(part, at)
            else:
                self._end(part, at)

    def _end(self, end: http1.End, at: float) -> None:
        listener, self._listener = self._listener, None
        if end.reusable and self._keep and not self._unsent:
            self._on_idle(self)
        elif self._transport is not None:
            self._transport.close()
        if listener is not None:
            listener.ended(at)

    def _break(self, at: float, outcome: Outcome, why: str) -> None:
        listener, self._listener = self._listener, None
        self.close()
        if listener is not None:
            listener.broken(at, outcome, why, not self._heard)

    def _leave(self) -> None:
        self._listener = None
        self.close()

    def _written(self, at: float) -> None:
        if self._unsent:
            self._unsent = False
            if self._listener is not None:
                self._listener.sent(at)

    def _lost(self, at: float, error: Exception | None) -> None:
        end = self._responses.eof() if error is None else None
        if end is not None and self._listener is not None:
            self._end(end, at)
        else:
            self._break(at, "truncated", _why(error))


class Shared(Line):
    """HTTP/2: as many requests at a time as the server takes."""

    def __init__(self, clock: Clock, on_idle: Callable[[Line], None]) -> None:
        super().__init__(clock, on_idle)
        self._frames = http2.Multiplexed()
        self._listeners: dict[int, Listener] = {}
        self._unsent: set[int] = set()
        self._heard: set[int] = set()
        self._keep = True

    @property
    def room(self) -> bool:
        return not self._closing() and self._frames.ready and self._frames.room > 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._write(self._frames.start())

    def _send(self, ask: Ask, body: bytes, listener: Listener) -> Callable[[], None]:
        self._keep = ask.keep_alive
        stream = self._frames.request(ask.head2, body)
        self._listeners[stream] = listener
        self._unsent.add(stream)
        self._flush()
        return lambda: self._leave(stream)

    def data_received(self, data: bytes) -> None:
        at = self._clock()
        try:
            found = self._frames.feed(data)
        except http1.Malformed as error:
            self._malformed(at, str(error))
            return
        if self._frames.ready and not self.ready.done():
            self.ready.set_result(None)
        self._flush()
        for stream, part in found:
            listener = self._listeners.get(stream)
            if listener is None:
                continue
            if isinstance(part, bytes):
                listener.body(part, at)
            elif isinstance(part, Head):
                self._heard.add(stream)
                listener.head(part, at)
            elif isinstance(part, http1.End):
                self._forget(stream)
                listener.ended(at)
            else:
                untouched = part.untouched and stream not in self._heard
                self._forget(stream)
                listener.broken(at, "truncated", part.why, untouched)
        if not self._listeners and (self._frames.leaving or not self._keep) and self.ready.done():
            self.close()

    def _malformed(self, at: float, why: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(ConnectionAbortedError(f"it does not speak HTTP/2: {why}"))
            self.ready.exception()
        self._all_break(at, "protocol", why)
        self.close()

    def _leave(self, stream: int) -> None:
        if stream in self._listeners:
            self._forget(stream)
            if not self._closing():
                self._frames.cancel(stream)
                self._flush()
                if not self._keep:
                    self.close()

    def _flush(self) -> None:
        data = self._frames.pending()
        if data and not self._closing():
            self._write(data)

    def _written(self, at: float) -> None:
        for stream in [stream for stream in self._unsent if not self._frames.sending(stream)]:
            self._unsent.discard(stream)
            self._listeners[stream].sent(at)

    def _forget(self, stream: int) -> None:
        self._listeners.pop(stream, None)
        self._unsent.discard(stream)
        self._heard.discard(stream)

    def _all_break(self, at: float, outcome: Outcome, why: str) -> None:
        for stream, listener in list(self._listeners.items()):
            untouched = stream not in self._heard
            self._forget(stream)
            listener.broken(at, outcome, why, untouched)

    def _lost(self, at: float, error: Exception | None) -> None:
        self._all_break(at, "truncated", _why(error))


def _why(error: Exception | None) -> str:
    return "it closed the connection" if error is None else f"connection lost: {error}"
