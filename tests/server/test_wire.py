from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httptools
import pytest

from headrace.observe.metrics import WIRE_STATUSES
from headrace.server import head
from headrace.server.head import MAX_HEAD
from headrace.server.stream import StreamLimits
from headrace.server.wire import MIN_BODY, WireProtocol, protocol
from server.asgi_driver import settle
from server.hand_engine import HandEngine, Hands, server
from server.socket_client import Running, on_uvloop, serving, until

START = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
SOON_S = 0.05
PARSER = httptools.HttpRequestParser


def only(running: Running) -> WireProtocol:
    """The connection that there is, as the server has it."""
    (found,) = running.service._http.server_state.connections
    assert isinstance(found, WireProtocol)
    return found


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


@on_uvloop
async def test_a_head_that_does_not_end_is_not_waited_for() -> None:
    async with serving(server(HandEngine()), head_timeout_s=SOON_S) as running:
        for sent in (b"P", START, START + b"X: y", START + b"X: y\r\n", b"\r\n"):
            connection = await running.connect()
            connection.writer.write(sent)
            status, headers, body = await connection.answer()
            assert (status, headers["connection"]) == (408, "close")
            assert body["error"]["code"] == "request_timeout"
            assert await connection.reader.read() == b""
        silent = await running.connect()
        assert await silent.reader.read() == b"", "who never said anything is told nothing"
        await until(lambda: not running.service._http.server_state.connections)


@on_uvloop
async def test_a_body_that_stalls_is_not_waited_for() -> None:
    engine = HandEngine()
    app = server(engine)
    async with serving(app, head_timeout_s=SOON_S) as running:
        for sent in (b"Content-Length: 9\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"):
            connection = await running.connect()
            connection.writer.write(START + sent)
            assert (await connection.answer())[0] == 408
            assert await connection.reader.read() == b""
        await until(lambda: not running.service._http.server_state.connections)
        assert app.running == 0
        assert not engine.generations


@on_uvloop
async def test_a_body_that_comes_slowly_and_steadily_is_waited_for() -> None:
    async with serving(server(HandEngine())) as running:
        connection = await running.connect()
        connection.writer.write(START + b"Content-Length: %d\r\n\r\n" % (4 * MIN_BODY))
        await until(lambda: bool(running.service._http.server_state.connections))
        wire = only(running)
        for part in range(1, 4):
            connection.writer.write(b"x" * MIN_BODY)
            await until(lambda part=part: wire._body == part * MIN_BODY)  # type: ignore[misc]
            wire._overdue()
            assert wire._timer is not None
            assert not wire.transport.is_closing()
        wire._overdue()
        assert (await connection.answer())[0] == 408


@on_uvloop
async def test_head_and_body_have_each_its_own_time() -> None:
    async with serving(server(HandEngine())) as running:
        connection = await running.connect()
        await until(lambda: bool(running.service._http.server_state.connections))
        wire = only(running)
        timers = [wire._timer]
        for piece in (START, b"Content-Length: 4\r\n\r\n"):
            connection.writer.write(piece)
            await until(lambda: wire._timer is not timers[-1])
            timers.append(wire._timer)
        connection.writer.write(b"a")
        await until(lambda: wire._body == 1)
        assert None not in timers
        assert wire._timer is timers[-1], "not each byte"
        assert all(timer.cancelled() for timer in timers[:-1] if timer is not None)
        connection.writer.write(b"bcd")
        assert (await connection.answer())[0] == 400
        assert wire._timer is None


@on_uvloop
async def test_a_request_that_is_complete_is_under_no_clock_of_the_wire() -> None:
    engine = HandEngine()
    async with serving(server(engine), head_timeout_s=SOON_S) as running:
        connection = await running.connect()
        await connection.chat(stream=True)
        await until(lambda: bool(engine.generations))
        assert only(running)._timer is None
        engine.admit()
        engine.say("x")
        engine.finish()
        assert (await connection.head())[0] == 200


@on_uvloop
async def test_an_answer_before_the_end_of_its_request_leaves_no_connection_for_ever() -> None:
    async with serving(server(HandEngine(), key="k")) as running:
        connection = await running.connect()
        connection.writer.write(START + b"Content-Length: 4\r\n\r\nab")
        assert (await connection.answer())[0] == 401
        wire = only(running)
        assert wire._timer is not None, "the rest of the body is waited for"
        connection.writer.write(b"cd")
        await until(lambda: wire._timer is None)
        assert wire.timeout_keep_alive_task is not None
        await connection.request("GET", "/healthz")
        assert (await connection.answer())[0] == 200


@on_uvloop
async def test_who_was_not_asked_for_its_body_is_told_that_nothing_more_is_read() -> None:
    inner = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    begun = START + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(inner)
    async with serving(server(HandEngine(), key="k")) as running:
        connection = await running.connect()
        connection.writer.write(begun)
        status, headers, _ = await connection.answer()
        assert (status, headers["connection"]) == (401, "close")
        assert await connection.reader.read() == b""
        prompt = await running.connect()
        prompt.writer.write(begun + inner)
        status, headers, _ = await prompt.answer()
        assert (status, headers.get("connection")) == (401, None), "it did not wait: all of it was read"
        await prompt.request("GET", "/healthz")
        assert (await prompt.answer())[0] == 200
    engine = HandEngine()
    async with serving(server(engine)) as running:
        connection = await running.connect()
        connection.writer.write(begun)
        assert await connection.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.writer.write(inner)
        status, headers, _ = await connection.answer()
        assert (status, headers.get("connection")) == (400, None), "it was asked: all of it was read"
        large = await running.connect()
        large.writer.write(START + b"Expect: 100-continue\r\nContent-Length: 99999999\r\n\r\n")
        raw = await large.reader.readuntil(b"\r\n\r\n")
        assert raw.startswith(b"HTTP/1.1 413 ")
        assert raw.count(b"connection: close") == 1


@on_uvloop
async def test_a_client_that_knows_no_chunks_gets_none() -> None:
    body = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
    old = START.replace(b"1.1", b"1.0")
    engine = HandEngine()
    async with serving(server(engine)) as running:
        connection = await running.connect()
        connection.writer.write(old + b"Connection: keep-alive\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: bool(engine.generations))
        engine.say("x")
        status, headers = await connection.head()
        assert (status, headers["connection"]) == (200, "close")
        assert not {"transfer-encoding", "content-length"} & headers.keys()
        assert (await connection.reader.readuntil(b"\n\n")).startswith(b"data: {")
        for _ in range(3):
            engine.say("y")
            assert b'"y"' in await connection.reader.readuntil(b"\n\n")
        engine.finish()
        rest = await connection.reader.read()
        assert rest.startswith(b"data: {")
        assert rest.endswith(b"\n\ndata: [DONE]\n\n")
        whole = await running.connect()
        whole.writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert (await whole.answer())[0] == 200
        assert await whole.reader.read() == b""


class Fed:
    """A parser that shows what goes into it."""

    def __init__(self, protocol: object, fed: list[Any]) -> None:
        self._parser = PARSER(protocol)
        self._fed = fed

    def feed_data(self, data: Any) -> None:
        self._fed.append(data)
        self._parser.feed_data(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


def test_what_follows_a_wish_for_another_protocol_is_not_copied_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[Any] = []
    one = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    number = 50

    @on_uvloop
    async def run() -> None:
        async with serving(server(HandEngine())) as running:
            connection = await running.connect()
            await until(lambda: bool(running.service._http.server_state.connections))
            wire = only(running)
            wire.parser = Fed(wire, fed)  # type: ignore[assignment]
            data = one * number
            with monkeypatch.context() as patch:
                patch.setattr(httptools, "HttpRequestParser", lambda of: Fed(of, fed))
                wire.data_received(data)
            for _ in range(number):
                assert (await connection.answer())[0] == 200
            views = [piece for piece in fed if isinstance(piece, memoryview)]
            assert [len(view) for view in views] == [len(one) * left for left in range(number, 0, -1)]
            assert all(view.obj is data for view in views)
            assert sum(len(piece) for piece in fed if isinstance(piece, bytes)) < len(data)

    run()


@on_uvloop
async def test_what_the_wire_refuses_is_counted() -> None:
    app = server(HandEngine())
    async with serving(app, head_timeout_s=SOON_S) as running:
        long = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * MAX_HEAD)
        for sent in (b"?\r\n\r\n", b"P", START, long):
            connection = await running.connect()
            connection.writer.write(sent)
            await connection.head()
        chunks = await running.connect()
        await chunks.request("GET", "/metrics")
        _, headers = await chunks.head()
        text = (await chunks.reader.readexactly(int(headers["content-length"]))).decode()
    counts = [line.split()[1] for line in text.splitlines() if line.startswith("headrace_wire_refused_total{")]
    assert counts == ["1.0", "2.0", "1.0", "0.0", "0.0"], "400, 408, 431, 501, 505"


def test_each_refusal_has_its_series() -> None:
    assert {one.status for one in vars(head).values() if isinstance(one, head.Fault)} == set(WIRE_STATUSES)


@on_uvloop
async def test_a_client_that_leaves_is_heard_of_without_a_task() -> None:
    engine = HandEngine()
    app = server(engine)
    async with serving(app) as running:
        connection = await running.connect()
        await connection.chat()
        await until(lambda: bool(engine.generations))
        assert not [task for task in asyncio.all_tasks() if "_watch" in repr(task)]
        connection.close()
        await until(lambda: app.running == 0)
        assert engine.cancelled == [engine.rid]


@on_uvloop
async def test_who_asks_after_the_client_has_left_hears_of_it_at_once() -> None:
    async with serving(server(HandEngine())) as running:
        connection = await running.connect()
        await connection.request("GET", "/healthz")
        await connection.answer()
        wire, told = only(running), list[int]()
        wire.watch(lambda: told.append(1))
        wire.watch(None)
        connection.close()
        await until(lambda: wire.parser is None)
        assert not told, "it was taken back"
        wire.watch(lambda: told.append(2))
        assert told == [2]


def test_a_protocol_has_its_own_time() -> None:
    assert protocol(3.0, print).head_timeout_s == 3.0
    assert WireProtocol.head_timeout_s != 3.0
