"""Servers for tests of the laboratory's client: bytes by hand over a socket, and a small HTTP/2 one."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import h2.config
import h2.connection
import h2.events
import h2.settings
from h2.settings import SettingCodes

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
OPEN = HEAD + b"\r\n"
"""Of a body that ends with its connection."""


async def request(reader: Reader) -> bytes:
    """A request's head and body; b"" when the client has left."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
    return head + await reader.readexactly(int(length or 0))


def sized(body: bytes, head: bytes = HEAD) -> bytes:
    """A response with its length."""
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


@contextlib.asynccontextmanager
async def by_hand(
    play: Callable[[Reader, Writer], Awaitable[None]], tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """`play` has each connection; the URL. What it raises when the client has left is nobody's business."""
    tasks: set[asyncio.Task[None]] = set()

    async def one(reader: Reader, writer: Writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await play(reader, writer)
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0, ssl=tls)
    try:
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


class H2Stream:
    """One request to an `H2Server`; answers by hand."""

    def __init__(self, connection: H2Connection, number: int, headers: dict[str, str]) -> None:
        self.connection = connection
        self.number = number
        self.headers = headers
        self.body = b""

    def head(self, status: int = 200, **headers: str) -> None:
        named = [(name.replace("_", "-"), value) for name, value in headers.items()]
        self.connection.h2.send_headers(self.number, [(":status", str(status)), *named])
        self.connection.flush()

    def data(self, data: bytes, end: bool = False) -> None:
        for start in range(0, len(data) or 1, 16_000):
            last = start + 16_000 >= len(data)
            self.connection.h2.send_data(self.number, data[start : start + 16_000], end_stream=end and last)
        self.connection.flush()

    def reset(self, code: int) -> None:
        self.connection.h2.reset_stream(self.number, code)
        self.connection.flush()


class H2Connection(asyncio.Protocol):
    """Calls `answer` for each whole request."""

    def __init__(self, server: H2Server) -> None:
        self.server = server
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        self.streams: dict[int, H2Stream] = {}
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.server.connections.append(self)
        values = {SettingCodes.MAX_CONCURRENT_STREAMS: self.server.room}
        self.h2.local_settings = h2.settings.Settings(client=False, initial_values=values)
        self.h2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(self.h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                headers = {str(name): str(value) for name, value in event.headers}
                self.streams[event.stream_id] = H2Stream(self, event.stream_id, headers)
            elif isinstance(event, h2.events.DataReceived):
                self.streams[event.stream_id].body += event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                self.server.answer(self.streams[event.stream_id])
            elif isinstance(event, h2.events.StreamReset):
                self.server.resets.append(event.stream_id)
        self.flush()

    def goodbye(self, last: int) -> None:
        """Takes no stream above `last`."""
        self.h2.close_connection(last_stream_id=last)
        self.flush()


class H2Server:
    """HTTP/2 by prior knowledge. `room`: streams at a time. Use it as `async with H2Server(answer) as url`."""

    def __init__(self, answer: Callable[[H2Stream], None], room: int = 100, tls: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self.room = room
        self.tls = tls
        self.connections: list[H2Connection] = []
        self.resets: list[int] = []

    async def __aenter__(self) -> str:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: H2Connection(self), "127.0.0.1", 0, ssl=self.tls)
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in self.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._server.wait_closed()
        await asyncio.sleep(0)
