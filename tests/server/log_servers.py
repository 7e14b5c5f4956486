"""Servers over hand-moved engines that share a real Redis, in one process."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.gateway.guard import NO_PERMIT, Caller
from headrace.gateway.shared import SharedRedis
from headrace.observe.accesslog import AccessLog
from headrace.observe.metrics import Metrics
from headrace.server.app import App
from headrace.server.log_writer import LogWriter
from headrace.server.stream import StreamLimits
from headrace.server.streams import LogLimits
from redis_server import RedisServer
from server.asgi_driver import Call, Client, settle
from server.hand_engine import HandEngine, Hands, model
from server.socket_client import until

RESUME = {"resume": True}
LEASE_S = 0.6


class NamedGuard:
    """The bearer token is the caller's name."""

    async def identify(self, authorization: Any) -> Caller:
        name = authorization[0].decode().removeprefix("Bearer ") if authorization else ""
        return Caller(name=name, salt=name)

    async def admit(self, caller: Caller, ask: Any) -> Any:
        return NO_PERMIT


@dataclass
class Server:
    app: App
    engine: HandEngine

    @property
    def client(self) -> Client:
        return Client(self.app)

    def chat(self, *, key: str | None = None, last: str | None = None, **fields: Any) -> Call:
        """A resumable chat."""
        headers = []
        if key is not None:
            headers.append((b"idempotency-key", key.encode()))
        if last is not None:
            headers.append((b"last-event-id", last.encode()))
        return self.client.chat(stream=True, headrace=RESUME, headers=headers, **fields)

    def get(self, id: str, after: int | None = None, *, last: str | None = None, key: str | None = None) -> Call:
        return self._call("GET", id, after, last, key)

    def delete(self, id: str, *, key: str | None = None) -> Call:
        return self._call("DELETE", id, None, None, key)

    def _call(self, method: str, id: str, after: int | None, last: str | None, key: str | None) -> Call:
        headers = [] if last is None else [(b"last-event-id", last.encode())]
        if key is not None:
            headers.append((b"authorization", f"Bearer {key}".encode()))
        query = "" if after is None else f"?after={after}"
        return self.client.call(method, f"/v1/streams/{id}{query}", headers=headers)

    async def die(self) -> None:
        """As kill -9: nothing more is written, the lease runs out."""
        writer = writer_of(self)
        if writer._task is not None:
            writer._task.cancel()
        writer._writings.clear()
        for live in tuple(self.app._producer._live):
            live.leave()
        await settle()


def one(
    *, clock: Hands | None = None, limits: StreamLimits | None = None, log_limits: LogLimits | None = None,
    shared: SharedRedis | None = None, guard: Any = None, engine: HandEngine | None = None, name: str = "",
) -> Server:  # fmt: skip
    """One server; its stream ids are `s1`, `s2`, … behind `name`."""
    engine = engine or HandEngine()
    ids, streams = itertools.count(1), itertools.count(1)
    app = App(
        {"m": model(engine)},
        Metrics({"m": engine}),
        AccessLog(lambda: 1000.0),
        guard=guard,
        limits=limits,
        log_limits=log_limits,
        shared=shared,
        lease_s=LEASE_S,
        clock=clock or Hands(),
        wall=lambda: 1000.0,
        new_id=lambda: f"{name}id{next(ids)}",
        seed=lambda: 42,
    )
    app.resuming.streams.new_id = lambda: f"{name}s{next(streams)}"
    return Server(app, engine)


def nothing_left(server: Server) -> None:
    """No generation, no stream, no byte."""
    app = server.app
    assert server.engine.live == {}
    assert app.running == 0
    assert app.metrics.open_streams == 0
    assert not app.ticker.running
    figures = app.metrics.streams
    assert (figures.open, figures.kept, figures.bytes, figures.readers) == (0, 0, 0, 0)
    assert len(app.resuming.streams) == 0


@contextlib.asynccontextmanager
async def sharing(redis: RedisServer, *names: str, **options: Any) -> AsyncIterator[list[Server]]:
    """Servers with one Redis; all are closed."""
    stores = [SharedRedis(redis.url, time.monotonic, timeout_s=10.0) for _ in names]
    servers = [
        one(shared=store, name=name, clock=time.monotonic, **options)  # type: ignore[arg-type]
        for store, name in zip(stores, names, strict=True)
    ]
    try:
        yield servers
    finally:
        for server, store in zip(servers, stores, strict=True):
            await server.app.resuming.close()
            await store.close()


def frames(body: bytes) -> list[tuple[str, bytes]]:
    """(id, data) of each event."""
    out = []
    for block in body.replace(b": hb\n", b"").split(b"\n\n"):
        if block:
            first, _, second = block.partition(b"\n")
            assert first.startswith(b"id: "), block
            assert second.startswith(b"data: "), block
            out.append((first[4:].decode(), second[6:]))
    return out


def data(body: bytes) -> list[bytes]:
    """The data lines."""
    return [line for _, line in frames(body)]


def text(body: bytes) -> str:
    parts = []
    for line in data(body):
        if line != b"[DONE]":
            choices = msgspec.json.decode(line).get("choices", ())
            parts += [choice["delta"].get("content") or "" for choice in choices]
    return "".join(parts)


def writer_of(server: Server) -> LogWriter:
    assert server.app.resuming.shared is not None
    return server.app.resuming.shared.writer


async def written(server: Server) -> None:
    """Redis has everything that the server said."""
    writer = writer_of(server)
    await until(lambda: all(one.known is not None and one.written == one.log.last for one in writer._writings.values()))
