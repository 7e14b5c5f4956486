"""A server that answers by script, at known times: what the laboratory is checked against.

    request ─► script of its model, or else of its last message ─► Pacer ─► a write at each time ─► log of real times

Rules: deadlines are absolute, from the request's last byte; waiting is a timer up to 2 ms before the deadline and turns
of the event loop from there on, so that nobody else waits (`--spin 0`: a timer alone, about 1 ms late, where others
need the cores); each write is stamped, and who wants to know how punctual the server was asks for `/writes/ID` (the ID
stands in the response's x-request-id), or for a stamped script, whose text is the times.
As a program it prints its URL and ends on SIGTERM, with its parent, or after --limit seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import heapq
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
import uvloop

from headrace_bench.client import golden
from headrace_bench.client.script import Script, answer, even, inscribed, named, refused, whole

ANY = "scripted"
"""The model whose messages say the script. One that says none, as a gateway's own first request, gets a word."""
SPIN_S = 0.002
"""From here on turns of the loop: a timer's resolution is 1 ms."""
TIMER_S = 0.001
"""A shorter timer is a turn of the loop at once."""
KEPT = 4096
"""Requests whose times are kept."""


class _Asked(msgspec.Struct):
    model: str = ""
    messages: list[Any] = []
    stream: bool = False


class Writes(msgspec.Struct):
    """When a request's answer was written. Seconds on the machine's monotonic clock."""

    asked: float
    """The request's last byte was read."""
    at: list[float]
    """One a piece that was written."""


class Pacer:
    """Calls at times of the monotonic clock."""

    def __init__(self, spin_s: float = SPIN_S) -> None:
        self._spin = spin_s
        self._loop = asyncio.get_running_loop()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._timer: asyncio.Handle | None = None

    def at(self, when: float, call: Callable[[], None]) -> None:
        """At once if it is past."""
        heapq.heappush(self._due, (when, next(self._order), call))
        if self._due[0][2] is call:
            self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left = self._due[0][0] - time.monotonic()
        if left <= self._spin:
            self._timer = self._loop.call_soon(self._wake)
        else:
            self._timer = self._loop.call_later(max(left - self._spin, TIMER_S), self._wake)

    def _wake(self) -> None:
        self._timer = None
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        if self._due:
            self._wait()


class Scripted:
    """The server, on the running loop; use it as `async with Scripted(scripts) as server`."""

    def __init__(
        self, scripts: Mapping[str, Script] = golden.SCRIPTS, *, key: str | None = None, spin_s: float = SPIN_S
    ) -> None:
        self._scripts = scripts
        self._spin = spin_s
        self._key = key
        self._ids = itertools.count(1)
        self._stalled: dict[str, float] = {}
        """Script → when its stall ends."""
        self.writes: dict[int, Writes] = {}
        self.requests: list[bytes] = []
        """Bodies, the last KEPT."""
        self.connections = 0
        self._open: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Scripted:
        return await self.start(0)

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int) -> Scripted:
        """Listens on the loopback. Raises OSError."""
        self.pacer = Pacer(self._spin)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", port, backlog=1024)
        return self

    async def stop(self) -> None:
        """Closes everything."""
        assert self._server is not None
        self._server.close()
        for connection in list(self._open):
            connection.abort()
        await self._server.wait_closed()
        await asyncio.sleep(0)

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def made(self, connection: _Connection) -> None:
        self.connections += 1
        self._open.add(connection)

    def lost(self, connection: _Connection) -> None:
        self._open.discard(connection)

    def respond(self, start: bytes, body: bytes, now: float) -> tuple[Script, float, Writes | None, int]:
        """The script for a request that was complete at `now`, the time its pieces count from, where to log, an id."""
        path = start.split(b" ", 2)[1]
        if self._key is not None and b"bearer " + self._key.encode() not in start.replace(b"Bearer", b"bearer"):
            return refused(401, "the API key is wrong"), now, None, 0
        if path != b"/v1/chat/completions":
            return self._other(path), now, None, 0
        name, script = self._chosen(body)
        if script is None:
            return refused(404, f"there is no script {name!r}"), now, None, 0
        base = now
        if script.stalls is not None:
            base = self._stalled.setdefault(name, now + script.stalls)
            base = max(base, now)
        if not script.logged:
            return script, base, None, 0
        number = next(self._ids)
        self.requests.append(body)
        writes = self.writes[number] = Writes(now, [])
        if number > KEPT:
            self.writes.pop(number - KEPT, None)
            del self.requests[0]
        return script, base, writes, number

    def _chosen(self, body: bytes) -> tuple[str, Script | None]:
        try:
            asked = msgspec.json.decode(body, type=_Asked)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return "", None
        name = asked.model
        if "#" in name:  # a script asked for by another name: its stall is another one, too
            return name, self._scripts.get(name.partition("#")[0])
        if name not in self._scripts and asked.messages and isinstance(asked.messages[-1], dict):
            said = asked.messages[-1].get("content")
            if isinstance(said, str) and (said in self._scripts or (named(name) is None and named(said))):
                name = said
        script = self._scripts.get(name) or named(name)
        if script is None and name == ANY:
            script = even(0.0, 0.0, 1) if asked.stream else whole("word ")
        return name, script

    def _other(self, path: bytes) -> Script:
        if path == b"/v1/models":
            names = [*self._scripts, ANY]
            return answer(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in names]})
        if path.startswith(b"/writes/") and path[8:].isdigit():
            writes = self.writes.get(int(path[8:]))
            return refused(404, "no such request") if writes is None else answer(200, writes)
        return refused(404, "there is no such path")


class _Connection(asyncio.Protocol):
    """HTTP/1.1, as much of it as clients of a test need: no pipelining, no chunked requests."""

    def __init__(self, server: Scripted) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._read = b""
        self._wanted = -1
        """Bytes that the request has; -1: its head is not complete."""
        self._body_at = 0
        self._pieces: tuple[tuple[float, bytes], ...] = ()
        self._next = 0

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # not one by class in uvloop
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server.made(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._server.lost(self)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self._read = self._read + data if self._read else data
        if self._wanted < 0:
            end = self._read.find(b"\r\n\r\n")
            if end < 0:
                return
            self._body_at = end + 4
            head = self._read[:end].lower()
            _, found, rest = head.partition(b"\r\ncontent-length:")
            self._wanted = self._body_at + (int(rest.split(b"\r\n", 1)[0]) if found else 0)
            self._closes = b"\r\nconnection: close" in head
        if len(self._read) < self._wanted:
            return
        start, body = self._read[: self._body_at], self._read[self._body_at : self._wanted]
        self._read, self._wanted = b"", -1
        script, base, writes, number = self._server.respond(start, body, now)
        self._base, self._writes, self._closes = base, writes, self._closes or script.closes
        self._asked, self._stamped = now, script.stamped
        self._pieces, self._next = script.pieces, 0
        if number:
            first, text = script.pieces[0]
            line, _, rest = text.partition(b"\r\n")
            self._pieces = ((first, b"%b\r\nX-Request-Id: %d\r\n%b" % (line, number, rest)), *script.pieces[1:])
        self._play()

    def _play(self) -> None:
        """Writes what is due, and waits for the next piece."""
        transport = self._transport
        while transport is not None and self._next < len(self._pieces):
            at, data = self._pieces[self._next]
            when = self._base + at
            if when > time.monotonic():
                self._server.pacer.at(when, self._play)
                return
            if self._writes is not None:
                # Before it is written: the write wakes the reader, who may then have the processor first.
                self._writes.at.append(time.monotonic())
            elif self._stamped:
                data = inscribed(data, time.monotonic(), self._asked)
            transport.write(data)
            self._next += 1
        if transport is not None and self._closes:
            transport.close()


def main(argv: Sequence[str] | None = None) -> int:
    """The program; 0 when it ends as it should."""
    parser = argparse.ArgumentParser(prog="headrace_bench.client.scripted", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0, help="0 chooses one")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which it ends by itself")
    parser.add_argument("--key", help="the API key it wants")
    parser.add_argument("--spin", type=float, default=SPIN_S * 1e3, help="ms before a deadline in which it waits awake")
    asked = parser.parse_args(argv)
    try:
        uvloop.run(_serve(asked.port, asked.limit, asked.key, asked.spin / 1e3))
    except OSError as error:
        print(f"scripted: port {asked.port}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


async def _serve(port: int, limit: float, key: str | None, spin_s: float) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    parent = os.getppid()
    server = await Scripted(key=key, spin_s=spin_s).start(port)
    gc.freeze()
    gc.set_threshold(100_000)  # a collection is a pause, and what a request leaves behind has no cycles
    print(server.url, flush=True)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit):
            while not ended.is_set() and os.getppid() == parent:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), 0.5)
    await server.stop()


if __name__ == "__main__":
    sys.exit(main())
