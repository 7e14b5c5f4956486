"""The connections to one server: those that can take a request, and how new ones are opened.

Rules: as many as are needed, no limit of our own; the one used last is used next; names are looked up once.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from headrace_bench.client.connection import Clock, Line, Plain, Shared
from headrace_bench.client.place import Place

CLOSING_S = 1.0
"""Given to sockets to close."""


class Pool:
    """Belongs to one event loop. `clock` stamps what its connections read."""

    def __init__(self, place: Place, clock: Clock, *, http2: bool = False, keep_alive: bool = True) -> None:
        self._place = place
        self._clock = clock
        self._http2 = http2
        self._keep_alive = keep_alive
        self._idle: list[Line] = []
        self._lines: set[Line] = set()
        self._opening: asyncio.Task[Line] | None = None
        self.address: str | None = None
        """What the name turned out to be."""
        self._tls = _tls(http2) if place.tls else None

    def idle(self) -> Line | None:
        """An open connection that takes a request; None: open one."""
        if not self._keep_alive:
            return None
        if self._http2:
            return next((line for line in self._lines if line.room), None)
        while self._idle:
            line = self._idle.pop()
            if line.room:
                return line
        return None

    async def open(self) -> Line:
        """A new connection. One that is shared may have been filled by others before its caller comes to use it.

        Raises OSError (ssl.SSLError and ConnectionError are some).
        """
        if not (self._http2 and self._keep_alive):
            return await self._open()
        # Requests that come while a connection is being opened share it, as far as it has room.
        while True:
            if self._opening is None or self._opening.done():
                self._opening = asyncio.get_running_loop().create_task(self._open())
                self._opening.add_done_callback(_seen)
            line = await asyncio.shield(self._opening)
            if not line.full:
                return line

    def keep(self, line: Line) -> None:
        """A connection that was opened for somebody who has left."""
        if not self._keep_alive:
            line.close()
        elif not self._http2:
            self._idle.append(line)

    async def close(self) -> None:
        """All of them, at once."""
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait([self._opening])
        lines = list(self._lines)
        for line in lines:
            line.close()
        if lines:
            await asyncio.wait([line.gone for line in lines], timeout=CLOSING_S)
        self._idle.clear()

    async def _open(self) -> Line:
        make: Callable[[Clock, Callable[[Line], None]], Line] = Shared if self._http2 else Plain
        loop = asyncio.get_running_loop()
        name = self._place.host if self._tls is not None else None
        _, line = await loop.create_connection(
            lambda: make(self._clock, self._idle.append),
            self.address or self._place.host,
            self._place.port,
            ssl=self._tls,
            server_hostname=name,
        )
        self._lines.add(line)
        line.gone.add_done_callback(lambda _: self._lines.discard(line))
        try:
            self._learn(line)
            await line.ready
        except BaseException:
            line.close()
            raise
        return line

    def _learn(self, line: Line) -> None:
        peer = line.info("peername")
        if self.address is None and peer is not None:
            self.address = peer[0]
        if self._tls is not None and self._http2:
            chosen = line.info("ssl_object")
            if chosen is None or chosen.selected_alpn_protocol() != "h2":
                raise ConnectionAbortedError("it does not speak HTTP/2: it did not choose h2")


def _seen(opening: asyncio.Task[Line]) -> None:
    """Everybody who waited may have left: nobody has to hear of its failure then."""
    if not opening.cancelled():
        opening.exception()


def _tls(http2: bool) -> ssl.SSLContext:
    """Trusts what the system trusts; SSL_CERT_FILE names more."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"] if http2 else ["http/1.1"])
    return context
