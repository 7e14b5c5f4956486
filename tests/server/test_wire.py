from __future__ import annotations

import contextlib

from headrace.server.stream import StreamLimits
from headrace.server.wire import MAX_HEAD
from server.asgi_driver import settle
from server.hand_engine import HandEngine, Hands, server
from server.socket_client import on_uvloop, serving, until


@on_uvloop
async def test_a_head_without_end_is_refused() -> None:
    async with serving(server(HandEngine())) as running:
        connection = await running.connect()
        connection.writer.write(b"GET /healthz HTTP/1.1\r\nx: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                connection.writer.write(b"x" * (MAX_HEAD // 8))
                await connection.writer.drain()
                if connection.reader.at_eof():
                    break
        status, headers, body = await connection.answer()
        assert status == 431
        assert headers["connection"] == "close"
        assert body["error"]["code"] == "headers_too_large"
        other = await running.connect()
        await other.request("GET", "/healthz")
        assert (await other.answer())[0] == 200


@on_uvloop
async def test_heads_are_counted_one_by_one_and_without_their_bodies() -> None:
    async with serving(server(HandEngine(), body_limit=1 << 20)) as running:
        connection = await running.connect()
        for _ in range(5):
            await connection.request("GET", "/healthz", head=b"x: " + b"y" * (MAX_HEAD // 2) + b"\r\n")
            assert (await connection.answer())[0] == 200
        await connection.request("POST", "/v1/chat/completions", b"x" * (MAX_HEAD * 2))
        assert (await connection.answer())[0] == 400


@on_uvloop
async def test_a_reader_that_takes_nothing_loses_its_connection() -> None:
    engine, clock = HandEngine(), Hands()
    app = server(engine, clock=clock, limits=StreamLimits(max_pending_events=8))
    async with serving(app) as running:
        connection = await running.connect()
        connection.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await connection.chat(stream=True)
        await until(lambda: bool(engine.generations))
        said = 0
        while engine.rid not in engine.paused:
            engine.say("x" * 100_000)
            said += 1
            await settle()
            assert said < 500, "the sequence is parked before much is kept for its reader"
        app.ticker.tick(clock.now + 60.0)
        assert engine.cancelled == [engine.rid]
        await until(lambda: app.running == 0)
