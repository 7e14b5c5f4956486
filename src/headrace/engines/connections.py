"""Connections to one origin, kept alive and used again.

    start ──▶ idle one there? ── the youngest ──▶ send ──┐
                 └── none ──▶ connect ──▶ send ──────────┤
                               ▲                         └── closed at once, before the first byte of an answer, and
                               └──── once ──────────────────── it was a used one: the other side had given it up

Rules: the connection used last is used first, so the rest can grow old and go. A request is sent once; only if a kept
connection turns out to be dead is it sent again, on a fresh one. Dead means that its end comes within a round trip:
what comes later may be the end of a server that was at work on the request, and may have died of it. Whoever gives a
request up cuts its connection. What is kept and what is open is bounded.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

from headrace.core.clock import Clock
from headrace.engines.http1 import Head, Http1Connection, Reader, WireFault

CONNECT_S = 5.0
"""Name, TCP and TLS together."""
KEEP_S = 30.0
"""How long an idle connection is kept, unless its other side says less."""
MARGIN_S = 1.0
"""This much before the other side's own limit."""
AT_ONCE_S = 0.05
"""Beyond a round trip, for both ends to come to it. Few servers die of a request so soon."""
MOST_IDLE = 256
MOST_OPEN = 20_000


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server listens. `tls` None: plain."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None

    @property
    def authority(self) -> str:
        """For the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (80 if self.tls is None else 443) else f"{host}:{self.port}"


class Transfer:
    """One request on its way. It reads for the caller's `reader`, and knows on which connection."""

    def __init__(self, pool: Connections, request: bytes, reader: Reader) -> None:
        self._pool = pool
        self._request = request
        self._reader = reader
        self._connection: Http1Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._paused = False
        self._over = False
        self._fresh = False
        self.sent: float | None = None
        """When the request was handed to a connection, s."""

    def begin(self) -> None:
        connection = self._pool.take()
        if connection is None:
            self._connect()
        else:
            self._send(connection)

    def cancel(self) -> None:
        """Give it up: its connection is cut, its reader hears nothing any more."""
        if self._over:
            return
        self._over = True
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.cut()
        self._pool.done(self)

    def fail(self, fault: WireFault) -> None:
        """Give it up, and tell its reader."""
        if not self._over:
            self.cancel()
            self._reader.end(fault)

    def pause(self) -> None:
        self._paused = True
        if self._connection is not None and not self._over:
            self._connection.pause()

    def resume(self) -> None:
        self._paused = False
        if self._connection is not None and not self._over:
            self._connection.resume()

    # Reader ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def head(self, head: Head) -> None:
        self._request = b""  # it will not be sent again, and may be long
        self._reader.head(head)

    def body(self, data: bytes) -> None:
        self._reader.body(data)

    def end(self, fault: WireFault | None) -> None:
        connection, self._connection = self._connection, None
        if self._over:
            return
        if fault is not None and not self._fresh and connection is not None and self._was_dead(connection):
            self._connect()
            return
        self._finish(fault)

    # ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _was_dead(self, connection: Http1Connection) -> bool:
        """It was when the request was sent, as far as anybody can tell."""
        assert self.sent is not None
        return not connection.answered and self._pool.clock() - self.sent <= connection.opened_s + AT_ONCE_S

    def _finish(self, fault: WireFault | None) -> None:
        self._over = True
        self._pool.done(self)
        self._reader.end(fault)

    def _connect(self) -> None:
        self._fresh = True
        self._task = asyncio.get_running_loop().create_task(self._connected())

    async def _connected(self) -> None:
        try:
            connection = await self._pool.connect()
        except WireFault as fault:
            if not self._over:
                self._finish(fault)
            return
        finally:
            self._task = None
        if self._over:
            connection.cut()
        else:
            self._send(connection)

    def _send(self, connection: Http1Connection) -> None:
        self._connection = connection
        self.sent = self._pool.clock()
        connection.send(self._request, self)
        if self._paused:
            connection.pause()


class Connections:
    """To one origin, on one event loop."""

    def __init__(
        self,
        origin: Origin,
        clock: Clock,
        *,
        connect_s: float = CONNECT_S,
        keep_s: float = KEEP_S,
        most_idle: int = MOST_IDLE,
        most_open: int = MOST_OPEN,
    ) -> None:
        self.origin = origin
        self.clock = clock
        self._connect_s = connect_s
        self._keep_s = keep_s
        self._most_idle = most_idle
        self._most_open = most_open
        self._idle: list[tuple[float, Http1Connection]] = []
        """(when it is to go, connection), the one used last at the end."""
        self._running: set[Transfer] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.opened = 0
        """Connections made since start."""

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def running(self) -> int:
        return len(self._running)

    def start(self, request: bytes, reader: Reader) -> Transfer:
        """Send `request`, a whole one; `reader` gets its answer, at the earliest after this call."""
        transfer = Transfer(self, request, reader)
        if self._closed or len(self._running) >= self._most_open:
            reason = "it is closed" if self._closed else f"{self._most_open} connections to it are open already"
            raise WireFault(reason)
        self._running.add(transfer)
        transfer.begin()
        return transfer

    async def close(self) -> None:
        """Cut everything; running requests end with a fault."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.cut()
        for transfer in tuple(self._running):
            transfer.fail(WireFault("it is closed"))
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    # For transfers ────────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self) -> Http1Connection | None:
        """The idle connection used last."""
        while self._idle:
            until, connection = self._idle.pop()
            if connection.idle and self.clock() < until:
                return connection
            connection.cut()
        return None

    def done(self, transfer: Transfer) -> None:
        self._running.discard(transfer)

    async def connect(self) -> Http1Connection:
        """A new one. Raises WireFault."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        origin, loop = self.origin, asyncio.get_running_loop()
        begun = self.clock()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: Http1Connection(self._freed),
                    origin.host,
                    origin.port,
                    ssl=origin.tls,
                    server_hostname=origin.host if origin.tls is not None else None,
                )
        except TimeoutError:
            raise WireFault(f"no connection within {self._connect_s:g} s") from None
        except ssl.SSLCertVerificationError as error:
            raise WireFault(f"its certificate is not good: {error.verify_message}") from None
        except (OSError, ValueError) as error:
            raise WireFault(f"no connection ({_reason(error)})") from None
        self.opened += 1
        connection.opened_s = self.clock() - begun
        return connection

    # ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _freed(self, connection: Http1Connection, usable: bool) -> None:
        if not usable or self._closed:
            self._idle = [kept for kept in self._idle if kept[1] is not connection]
            if usable:
                connection.cut()
            return
        keep = self._keep_s if connection.keep_s is None else min(self._keep_s, connection.keep_s - MARGIN_S)
        self._idle.append((self.clock() + keep, connection))
        if len(self._idle) > self._most_idle:
            self._idle.pop(0)[1].cut()
        self._arm()

    def _arm(self) -> None:
        if self._timer is None and self._idle:
            wait = max(0.01, min(until for until, _ in self._idle) - self.clock())
            self._timer = asyncio.get_running_loop().call_later(wait, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self.clock()
        for until, connection in self._idle:
            if until <= now:
                connection.cut()
        self._idle = [kept for kept in self._idle if kept[0] > now]
        self._arm()


def _reason(error: Exception) -> str:
    """What went wrong, without an address in it."""
    return (
        type(error).__name__ if not isinstance(error, OSError) or not error.strerror else error.strerror.split(" (")[0]
    )
