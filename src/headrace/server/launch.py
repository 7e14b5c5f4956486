"""From an address to a serving process, and out again.

    listen ─▶ answering, loading ─▶ ready ── first signal ─▶ draining ── all done, or drain_s ─▶ closing ─▶ exit 0
                                                                 └───── second signal ─────────▶ exit at once

Rules: the listening socket is made here, with IPPROTO_TCP and TCP_NODELAY, so that no accepted connection can hold
a token back; signals are ours, because the HTTP server underneath would cut streams without a word; whoever holds a
stream when the time is over gets one error event.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import resource
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import uvicorn
import uvloop

from headrace.core.errors import Draining, StartupError
from headrace.server.app import App
from headrace.server.collector import Collector
from headrace.server.exchange import Receive, Scope, Send
from headrace.server.route import Routes
from headrace.server.wire import HEAD_TIMEOUT_S, WireProtocol, protocol

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Longer than the usual 60 s of proxies: whoever closes first never writes into a closed connection."""
FEW_FILES = 4096
MANY_FILES = 2**20
FLUSH_S = 2.0
"""How long last words may take to leave."""
FORCED_S = 1.0
"""How long an engine may take to close after a second signal."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Side:
    """An address that we listen on, as the settings call it."""

    host: str
    port: str
    remedy: str
    """What to do where other machines can reach it and need no key."""


MAIN = Side("server.host", "server.port", "set server.key, or server.insecure if anyone may use it")
ADMIN = Side("server.admin_host", "server.admin_port", "set server.admin_key")

# The socket ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def listen(host: str, port: int, *, guarded: bool, side: Side = MAIN) -> socket.socket:
    """A listening socket; port 0 takes a free one, which `getsockname` tells. Raises StartupError.

    `guarded`: there is a key, or the operator said that none is needed. Without it only loopback addresses will do.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise StartupError(f"{side.host}: cannot find an address for {host!r}") from None
    if not guarded and not is_loopback(str(address[0])):
        raise StartupError(f"{side.host}: other machines can reach {host}; {side.remedy}")
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise StartupError(_why_not(error, host, port, side)) from None
    return sock


def url_of(sock: socket.socket) -> str:
    """Where it listens."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def check_nodelay(sock: socket.socket) -> bool:
    """Whether connections accepted from a socket made like `sock` have TCP_NODELAY. Makes one to itself."""
    host = "::1" if sock.family == socket.AF_INET6 else "127.0.0.1"
    with listen(host, 0, guarded=True) as scratch:
        scratch.setblocking(True)
        scratch.settimeout(FLUSH_S)
        with socket.create_connection(scratch.getsockname()[:2], timeout=FLUSH_S):
            accepted, _ = scratch.accept()
            with accepted:
                return bool(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))


def raise_file_limit() -> int:
    """Raise the soft limit of open files, one a connection, to the hard one. The limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    limit = MANY_FILES if soft == resource.RLIM_INFINITY else soft
    if limit < FEW_FILES:
        log.warning("this process may open %d files, and each connection is one: raise `ulimit -n`", limit)
    return limit


def is_loopback(address: str) -> bool:
    """Only this machine can reach that IP address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _why_not(error: OSError, host: str, port: int, side: Side) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"{side.port}: {port} on {host} is in use; stop what uses it, or choose another"
        case errno.EACCES | errno.EPERM:
            return f"{side.port}: this user may not listen on {port}; choose one from 1024 up"
        case errno.EADDRNOTAVAIL:
            return f"{side.host}: this machine has no address {host}"
        case _:
            return f"cannot listen on {host}:{port}: {error.strerror}"


# The process ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Beside:
    """The same application with other routes, for another socket."""

    def __init__(self, app: App, routes: Routes) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app.serve(self._routes, scope, receive, send)


def _http(app: Any, http: type[WireProtocol]) -> _HttpServer:
    config = uvicorn.Config(
        app,
        http=http,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",  # its news are ours to tell
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(FLUSH_S),
    )
    return _HttpServer(config)


class Service:
    """A served application and its end. `signal` is what SIGTERM and SIGINT call.

    `beside`: further sockets, and which routes they have; they are served to the end.
    """

    def __init__(
        self,
        app: App,
        sock: socket.socket,
        *,
        beside: Mapping[socket.socket, Routes] | None = None,
        drain_s: float = 30.0,
        head_timeout_s: float = HEAD_TIMEOUT_S,
        start: Callable[[], Awaitable[None]] | None = None,
        ready: Callable[[], None] | None = None,
    ) -> None:
        self._app = app
        self._drain_s = drain_s
        self._start = start
        self._ready = ready
        self._collector = Collector(lambda: app.running > 0)
        self._asked = asyncio.Event()
        self._forced = asyncio.Event()
        self._code = 0
        wire = protocol(head_timeout_s, app.metrics.wire_refusal)
        self._http = _http(app, wire)
        self._sockets = {self._http: sock}
        self._sockets.update((_http(_Beside(app, routes), wire), other) for other, routes in (beside or {}).items())

    def signal(self, number: int) -> None:
        """The first one drains, the second one ends the process at once."""
        if not self._asked.is_set():
            log.info("draining: running answers may take %g s more", self._drain_s)
            self._asked.set()
            self._app.drain()
        else:
            self._code = 128 + number
            for http in self._sockets:
                http.force_exit = True
            self._forced.set()

    async def run(self) -> int:
        """Serve until told to stop; the exit code. Raises StartupError if `start` does."""
        serving = asyncio.gather(*(http.serve(sockets=[sock]) for http, sock in self._sockets.items()))
        try:
            if self._start is not None:
                await _first(self._start(), self._asked.wait(), asyncio.shield(serving))
            if not self._asked.is_set():
                self._collector.start()
                if self._ready is not None:
                    self._ready()
                await _first(self._asked.wait(), asyncio.shield(serving))
            await self._drain()
        finally:
            self._collector.stop()
            for http in self._sockets:
                http.should_exit = True
            try:
                await serving
            finally:
                await self._close()
        return self._code

    async def _drain(self) -> None:
        self._app.drain()
        await self._within(self._drain_s)
        if not self._app.running:
            return
        log.warning("%d answers are not finished and are ended", self._app.running)
        self._app.fail_all(Draining("the server is shutting down and could not finish this answer"))
        await self._within(FLUSH_S)

    async def _within(self, seconds: float) -> None:
        """Until no answer is being made any more; at most `seconds`, and not after a second signal."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await _first(self._app.quiet(), self._forced.wait())

    async def _hurry(self) -> None:
        """Until a second signal's patience is over."""
        await self._forced.wait()
        await asyncio.sleep(FORCED_S)

    async def _close(self) -> None:
        await _first(self._app.finish(), self._hurry())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._app.fleet.close(), FORCED_S if self._forced.is_set() else None)
        self._app.close()


async def serve(
    app: App,
    sock: socket.socket,
    *,
    beside: Mapping[socket.socket, Routes] | None = None,
    drain_s: float = 30.0,
    head_timeout_s: float = HEAD_TIMEOUT_S,
    start: Callable[[], Awaitable[None]] | None = None,
    ready: Callable[[], None] | None = None,
) -> int:
    """Serve `app` on `sock` until SIGTERM or SIGINT; the exit code. Raises StartupError if `start` does.

    `start` loads what is to be loaded while the socket already answers (not ready, but alive); `ready` is called
    once that is done. `beside`: as for `Service`. The engines of the app's models are closed at the end, and so are the
    sockets.
    """
    raise_file_limit()
    if not check_nodelay(sock):
        log.warning("accepted connections lack TCP_NODELAY here: streams may stall by about 40 ms")
    service = Service(
        app, sock, beside=beside, drain_s=drain_s, head_timeout_s=head_timeout_s, start=start, ready=ready
    )
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    for number in signals:
        loop.add_signal_handler(number, service.signal, number)
    try:
        return await service.run()
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run `main` on the loop that we serve on."""
    return uvloop.run(main)


async def _first(*waits: Awaitable[Any]) -> None:
    """Until one of them is done, and raise what it raised; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
