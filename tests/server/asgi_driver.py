"""Drives an ASGI application in memory: a scripted client that sees every message as it is sent.

async with Client(app).post("/v1/…", {...}) as call:
    await settle()          # let everything on the loop come to rest
    call.sent               # what the application sent so far
    call.hang_up()          # http.disconnect
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, ParamSpec

import msgspec

P = ParamSpec("P")
Pairs = Iterable[tuple[bytes, bytes]]


async def settle(rounds: int = 30) -> None:
    """Let every task that can run do so. Turns of the loop, not time."""
    for _ in range(rounds):
        await asyncio.sleep(0)


class Call:
    """One request in progress."""

    def __init__(self, app: Callable[..., Awaitable[None]], scope: dict[str, Any], chunks: list[bytes]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.receives = 0
        self.broken: BaseException | None = None
        """Raised by every send from now on."""
        self.gate = asyncio.Event()
        """Cleared: sends block, as they do for a slow reader."""
        self.gate.set()
        self.blocked = 0
        self._chunks = chunks
        self._gone = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._run(app, scope))

    async def _run(self, app: Callable[..., Awaitable[None]], scope: dict[str, Any]) -> None:
        await app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        self.receives += 1
        if self._chunks:
            body = self._chunks.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self._chunks)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self.broken is not None:
            raise self.broken
        if not self.gate.is_set():
            self.blocked += 1
            await self.gate.wait()
            if self._gone.is_set():
                return
        self.sent.append(message)

    def hang_up(self) -> None:
        """The client is gone: receive says so, and a send that hangs returns, as with uvicorn."""
        self._gone.set()
        self.gate.set()

    async def __aenter__(self) -> Call:
        await settle()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.task.done():
            self.task.cancel()
            await asyncio.wait((self.task,))

    # What was sent ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def headers(self) -> dict[str, str]:
        return {key.decode(): value.decode() for key, value in self.sent[0]["headers"]}

    @property
    def writes(self) -> list[bytes]:
        """The bodies of all sends but the head."""
        return [message["body"] for message in self.sent[1:]]

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)

    @property
    def ended(self) -> bool:
        return len(self.sent) > 1 and not self.sent[-1].get("more_body", False)

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def events(self) -> list[Any]:
        """The data of all events: decoded, or the text "[DONE]"."""
        data = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [text if text == "[DONE]" else msgspec.json.decode(text) for text in data]

    def content(self, index: int = 0) -> str:
        """Text of a choice, joined."""
        out = ""
        for event in self.events():
            for choice in event["choices"] if isinstance(event, dict) and "choices" in event else ():
                if choice["index"] == index:
                    out += choice.get("delta", choice).get("content" if "delta" in choice else "text") or ""
        return out


class Client:
    """Makes calls. `extensions` go into each scope."""

    def __init__(
        self, app: Callable[..., Awaitable[None]], *, headers: Pairs = (), extensions: dict[str, Any] | None = None
    ) -> None:
        self._app = app
        self._headers = list(headers)
        self._extensions = extensions

    def call(self, method: str, path: str, *, headers: Pairs = (), chunks: Iterable[bytes] = (b"",)) -> Call:
        path, _, query = path.partition("?")
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [*self._headers, *headers],
        }
        if self._extensions is not None:
            scope["extensions"] = self._extensions
        return Call(self._app, scope, list(chunks))

    def get(self, path: str, *, headers: Pairs = ()) -> Call:
        return self.call("GET", path, headers=headers)

    def post(self, path: str, fields: Any, *, headers: Pairs = ()) -> Call:
        body = fields if isinstance(fields, bytes) else msgspec.json.encode(fields)
        length = (b"content-length", str(len(body)).encode())
        return self.call("POST", path, headers=(length, *headers), chunks=(body,))

    def chat(self, *, headers: Pairs = (), **fields: Any) -> Call:
        given = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.post("/v1/chat/completions", given, headers=headers)

    def complete(self, *, headers: Pairs = (), **fields: Any) -> Call:
        return self.post("/v1/completions", {"model": "m", "prompt": "hi", **fields}, headers=headers)


def on_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run a coroutine test on a loop of its own, and fail it if it leaves a task behind."""

    async def run(*args: P.args, **kwargs: P.kwargs) -> None:
        await test(*args, **kwargs)
        await settle()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"left behind: {left}"

    @functools.wraps(test)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(run(*args, **kwargs))

    return wrapper
