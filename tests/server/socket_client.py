"""A server on a loopback socket and a client that sees its bytes, on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import uvloop

from headrace.server.app import App
from headrace.server.launch import Service, listen
from headrace.server.wire import HEAD_TIMEOUT_S

TEST_S = 60.0


async def until(reached: Callable[[], bool]) -> None:
    """Turn the loop, sockets included, until `reached`."""
    async with asyncio.timeout(20):
        while not reached():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)


class Connection:
    """One TCP connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def request(self, method: str, path: str, body: bytes = b"", *, head: bytes = b"") -> None:
        start = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n".encode()
        self.writer.write(start + head + b"\r\n" + body)
        await self.writer.drain()

    async def chat(self, **fields: Any) -> None:
        given = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        await self.request("POST", "/v1/chat/completions", msgspec.json.encode(given))

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        return int(lines[0].split()[1]), dict(line.split(": ", 1) for line in lines[1:] if line)

    async def chunk(self) -> bytes:
        """The next piece of a chunked body; b"" is its proper end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """A whole answer in JSON."""
        status, headers = await self.head()
        return status, headers, msgspec.json.decode(await self.reader.readexactly(int(headers["content-length"])))

    def reset(self) -> None:
        """End the connection with RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


class Running:
    """A service that serves."""

    def __init__(self, service: Service, task: asyncio.Task[int], port: int) -> None:
        self.service = service
        self.task = task
        self.port = port
        self.connections: list[Connection] = []

    async def connect(self) -> Connection:
        connection = Connection(*await asyncio.open_connection("127.0.0.1", self.port))
        self.connections.append(connection)
        return connection


@contextlib.asynccontextmanager
async def serving(
    app: App,
    *,
    drain_s: float = 30.0,
    head_timeout_s: float = HEAD_TIMEOUT_S,
    start: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[Running]:
    sock = listen("127.0.0.1", 0, guarded=False)
    service = Service(app, sock, drain_s=drain_s, head_timeout_s=head_timeout_s, start=start)
    task = asyncio.get_running_loop().create_task(service.run())
    running = Running(service, task, sock.getsockname()[1])
    try:
        yield running
    finally:
        for connection in running.connections:
            connection.close()
        service.signal(15)
        service.signal(15)
        await asyncio.wait((task,))


def on_uvloop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a coroutine test on the loop that we serve on, for TEST_S at most: pytest's own limit cannot stop uvloop."""

    async def limited() -> None:
        async with asyncio.timeout(TEST_S):
            await test()

    def wrapper() -> None:
        uvloop.run(limited())

    wrapper.__name__ = test.__name__
    return wrapper
