"""Scripted OpenAI-compatible servers on loopback sockets, for tests of the relay: bytes at will, and every way to die.

async with upstream(answer) as there:          # `answer(request) → Play`, for each request
    there.url                                  # http://127.0.0.1:port/v1
    there.requests                             # what was asked
    await until(lambda: there.cut == 1)        # connections that the other side closed before their answer ended
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

End = Literal["keep", "close", "reset", "stall"]


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Play:
    """An answer: its bytes, head and framing included, in pieces of one write each; then its end."""

    pieces: Sequence[bytes]
    end: End = "keep"
    gate: asyncio.Event | None = None
    """Waited for before the piece number `gated`; before the end if there are no more pieces."""
    gated: int = 0

    def cut_at(self, offset: int, end: End = "close") -> Play:
        """Only the first `offset` bytes."""
        return Play([b"".join(self.pieces)[:offset]], end)


@dataclass
class Server:
    answer: Callable[[Request], Play]
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    """Made since start."""
    open: int = 0
    cut: int = 0
    """Closed by the client while an answer was not over."""
    clean: int = 0
    """Closed by the client between answers."""

    def asked(self, path: str) -> list[Request]:
        return [request for request in self.requests if request.path == path]


@contextlib.asynccontextmanager
async def upstream(answer: Callable[[Request], Play], **tls: Any) -> AsyncIterator[Server]:
    server, tasks = Server(answer), set[asyncio.Task[None]]()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        server.connections += 1
        server.open += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await _serve(server, reader, writer)
        finally:
            server.open -= 1
            tasks.discard(task)
            writer.close()

    listening = await asyncio.start_server(one, "127.0.0.1", 0, **tls)
    scheme = "https" if tls else "http"
    server.url = f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    try:
        yield server
    finally:
        listening.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listening.wait_closed()


async def _serve(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while (request := await _request(reader)) is not None:
        server.requests.append(request)
        play = server.answer(request)
        gone = asyncio.ensure_future(reader.read(1))
        try:
            for i, piece in enumerate([*play.pieces, b""]):
                if play.gate is not None and i == play.gated:
                    await _either(play.gate.wait(), gone)
                if gone.done():
                    server.cut += 1
                    return
                writer.write(piece)
                await writer.drain()
            if play.end == "stall":
                with contextlib.suppress(ConnectionError):
                    await gone
                server.cut += 1
                return
        except ConnectionError:
            server.cut += 1
            raise
        finally:
            if not gone.done():
                gone.cancel()
                await asyncio.wait((gone,))
        if play.end == "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return
        if play.end == "close":
            return
    server.clean += 1


async def _either(wait: Any, gone: asyncio.Future[bytes]) -> None:
    task = asyncio.ensure_future(wait)
    await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    await asyncio.wait((task,))


async def _request(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    start, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    headers = dict(line.lower().split(": ", 1)[:1] + line.split(": ", 1)[1:] for line in lines)
    method, path, _ = start.split(" ")
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, path, headers, body)


# Bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream(events: Iterable[bytes], **how: Any) -> Play:
    """A head, one chunk an event, the end; without that if the connection is to end in another way."""
    return Play([STREAM, *map(chunk, events), *([] if how.get("end") else [END])], **how)


def whole(value: Any, status: int = 200, **headers: str) -> Play:
    """A JSON answer of known length."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    head += "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in headers.items())
    return Play([head.encode() + b"\r\n" + body])


def event(value: Any, *, ascii: bool = True, spaces: bool = False) -> bytes:
    separators = (", ", ": ") if spaces else (",", ":")
    return b"data: " + json.dumps(value, ensure_ascii=ascii, separators=separators).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def chat_events(
    pieces: Iterable[str], *, model: str = "up", id: str = "chatcmpl-up1", finish: str = "stop", usage: bool = True,
    **shape: Any
) -> list[bytes]:  # fmt: skip
    """A chat's stream: role, text, finish, usage, end."""
    pieces = list(pieces)
    head = {"id": id, "object": "chat.completion.chunk", "created": 11, "model": model}

    def one(delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return event({**head, "choices": [choice]}, **shape)

    tokens = {"prompt_tokens": 9, "completion_tokens": len(pieces), "total_tokens": 9 + len(pieces)}
    return [
        one({"role": "assistant", "content": ""}),
        *(one({"content": piece}) for piece in pieces),
        one({}, finish),
        *([event({**head, "choices": [], "usage": tokens}, **shape)] if usage else []),
        DONE,
    ]


def completion_events(
    pieces: Iterable[str], *, model: str = "up", id: str = "cmpl-up1", finish: str = "stop", usage: bool = True
) -> list[bytes]:
    """The same of a completion; the finish reason stands beside the last text, as some servers have it."""
    pieces = list(pieces)
    head = {"id": id, "object": "text_completion", "created": 11, "model": model}

    def one(text: str, reason: str | None = None) -> bytes:
        return event({**head, "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]})

    tokens = {"prompt_tokens": 9, "completion_tokens": len(pieces), "total_tokens": 9 + len(pieces)}
    return [
        *(one(piece) for piece in pieces),
        one("", finish),
        *([event({**head, "choices": [], "usage": tokens})] if usage else []),
        DONE,
    ]


def models(owned_by: str = "vllm", model: str = "up") -> Play:
    """The answer to `GET /v1/models`."""
    return whole({"object": "list", "data": [{"id": model, "object": "model", "created": 5, "owned_by": owned_by}]})
