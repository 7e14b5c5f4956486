from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from typing import Any

import msgspec
import pytest

from headrace.core.errors import StartupError
from headrace.server import launch
from headrace.server.launch import Service, check_nodelay, listen, raise_file_limit, serve
from headrace.server.route import Routes
from server.hand_engine import HandEngine, server
from server.socket_client import Connection, on_uvloop, serving, until

# The socket ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_its_url() -> None:
    for host, url in (("127.0.0.1", "http://127.0.0.1"), ("::1", "http://[::1]")):
        with listen(host, 0, guarded=True) as sock:
            assert launch.url_of(sock) == f"{url}:{sock.getsockname()[1]}"


def test_the_socket_is_made_for_streams() -> None:
    with listen("127.0.0.1", 0, guarded=False) as sock:
        assert sock.getsockname()[1] > 0
        assert sock.proto == socket.IPPROTO_TCP
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert check_nodelay(sock)


def test_a_port_in_use_is_one_line() -> None:
    with listen("127.0.0.1", 0, guarded=False) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(StartupError, match=f"{port} on 127.0.0.1 is in use") as caught:
            listen("127.0.0.1", port, guarded=False)
        assert "\n" not in caught.value.message


@pytest.mark.parametrize("host", ["no such host", "192.0.2.1", "x" * 300])
def test_an_address_that_is_not_ours_is_one_line(host: str) -> None:
    with pytest.raises(StartupError, match=r"server\.host"):
        listen(host, 0, guarded=True)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_machines_are_let_in_only_when_somebody_said_so(host: str) -> None:
    with pytest.raises(StartupError, match=r"server\.key"):
        listen(host, 0, guarded=False)


def test_a_guarded_server_may_listen_to_all() -> None:
    listen("0.0.0.0", 0, guarded=True).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost"])
def test_loopback_needs_no_guard(host: str) -> None:
    listen(host, 0, guarded=False).close()


def test_the_limit_of_files_is_raised(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    limits = {"now": (1024, 65536)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.update(now=pair))
    assert raise_file_limit() == 65536
    assert limits["now"] == (65536, 65536)
    assert caplog.text == ""
    limits["now"] = (256, 1024)
    assert raise_file_limit() == 1024
    assert "1024 files" in caplog.text
    limits["now"] = (1024, resource.RLIM_INFINITY)
    assert raise_file_limit() == launch.MANY_FILES


def test_a_limit_that_may_not_be_raised_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, pair: Any) -> None:
        raise ValueError

    monkeypatch.setattr(resource, "getrlimit", lambda which: (5000, 65536))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_file_limit() == 5000


# Over the socket ──────────────────────────────────────────────────────────────────────────────────────────────────────


@on_uvloop
async def test_every_token_leaves_when_it_is_there() -> None:
    engine = HandEngine()
    async with serving(server(engine)) as running:
        connection = await running.connect()
        await connection.chat(stream=True)
        await until(lambda: bool(engine.generations))
        engine.say("a")
        status, headers = await connection.head()
        assert status == 200
        assert headers["transfer-encoding"] == "chunked"
        assert "server" not in headers
        assert not {"content-length", "content-encoding", "connection"} & set(headers)
        assert b'"content":"a"' in await connection.chunk()
        engine.say("b")
        assert b'"content":"b"' in await connection.chunk()
        engine.finish()
        assert (await connection.chunk()).endswith(b"data: [DONE]\n\n")
        assert await connection.chunk() == b""
        await connection.request("GET", "/healthz")
        assert (await connection.answer())[0] == 200, "the connection is kept"


@on_uvloop
async def test_a_failing_stream_ends_its_body_properly() -> None:
    engine = HandEngine()
    async with serving(server(engine)) as running:
        connection = await running.connect()
        await connection.chat(stream=True)
        await until(lambda: bool(engine.generations))
        engine.say("a")
        await connection.head()
        await connection.chunk()
        engine.fail()
        assert b'data: {"error":' in await connection.chunk()
        assert await connection.chunk() == b""


async def _leaves(end: str, *, text: bool, stream: bool) -> None:
    engine = HandEngine()
    app = server(engine)
    async with serving(app) as running:
        connection = await running.connect()
        await connection.chat(stream=stream)
        await until(lambda: bool(engine.generations))
        if text:
            engine.say("a")
        if text and stream:
            await connection.head()
        getattr(connection, end)()
        await until(lambda: engine.cancelled == [engine.rid])
        await until(lambda: app.running == 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("end", ["close", "reset"])
def test_a_client_that_hangs_up_stops_the_engine(end: str, text: bool, stream: bool) -> None:
    launch.run(_code(_leaves(end, text=text, stream=stream)))


async def _code(main: Any) -> int:
    await main
    return 0


@on_uvloop
async def test_a_refused_body_still_gets_its_answer() -> None:
    async with serving(server(HandEngine(), body_limit=1000)) as running:
        connection = await running.connect()
        await connection.request("POST", "/v1/chat/completions", b"x" * 5_000_000)
        status, headers, body = await connection.answer()
        assert status == 413
        assert headers["connection"] == "close"
        assert body["error"]["code"] == "body_too_large"


@on_uvloop
async def test_bytes_that_are_not_http_do_no_harm() -> None:
    async with serving(server(HandEngine())) as running:
        bad = await running.connect()
        bad.writer.write(b"\x16\x03\x01\x00\xa5\x01\x00\x00\r\n\r\n")
        assert (await bad.head())[0] == 400
        for path in ("/%ff%fe", "/v1/%2e%2e/v1/models", "http://x/healthz"):
            connection = await running.connect()
            await connection.request("GET", path)
            assert (await connection.answer())[0] == (200 if "healthz" in path else 404)


# The end ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_uvloop
async def test_a_signal_drains_and_the_code_is_zero() -> None:
    """The whole of `serve`, with a real signal."""
    engine = HandEngine()
    sock = listen("127.0.0.1", 0, guarded=False)
    port = sock.getsockname()[1]
    ready: list[bool] = []
    task = asyncio.create_task(serve(server(engine), sock, ready=lambda: ready.append(True)))
    await until(lambda: bool(ready))
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
    late, later = [Connection(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(2)]
    await connection.chat(stream=True)
    await until(lambda: bool(engine.generations))
    engine.say("a")
    await connection.head()
    os.kill(os.getpid(), signal.SIGTERM)
    await late.request("GET", "/healthz")
    while (await late.answer())[2]["status"] != "draining":
        await late.request("GET", "/healthz")
    await late.request("GET", "/readyz")
    assert (await late.answer())[0] == 503
    await later.chat()
    status, headers, body = await later.answer()
    assert (status, headers["connection"], body["error"]["code"]) == (503, "close", "draining")
    assert not task.done()
    engine.say("b")
    engine.finish()
    text = b""
    while part := await connection.chunk():
        text += part
    assert text.endswith(b"data: [DONE]\n\n")
    assert await task == 0
    assert engine.closed
    assert await connection.reader.read() == b""
    with pytest.raises(OSError):  # noqa: PT011 - refused or reset, as the system likes
        await asyncio.open_connection("127.0.0.1", port)
    for one in (connection, late, later):
        one.close()


@on_uvloop
async def test_what_is_not_finished_in_time_gets_one_error_event() -> None:
    engine = HandEngine()
    async with serving(server(engine), drain_s=0.0) as running:
        connection = await running.connect()
        await connection.chat(stream=True)
        await until(lambda: bool(engine.generations))
        engine.say("a")
        await connection.head()
        await connection.chunk()
        running.service.signal(signal.SIGTERM)
        event = await connection.chunk()
        assert msgspec.json.decode(event.removeprefix(b"data: "))["error"]["code"] == "draining"
        assert await connection.chunk() == b""
        assert await running.task == 0
    assert engine.cancelled == [engine.rid]


@on_uvloop
async def test_a_second_signal_ends_at_once() -> None:
    engine = HandEngine()
    async with serving(server(engine)) as running:
        connection = await running.connect()
        await connection.chat(stream=True)
        await until(lambda: bool(engine.generations))
        running.service.signal(signal.SIGTERM)
        running.service.signal(signal.SIGINT)
        assert await running.task == 128 + signal.SIGINT
        assert engine.closed


@on_uvloop
async def test_the_socket_answers_while_the_model_loads() -> None:
    engine = HandEngine(ready=False)
    loaded = asyncio.Event()

    async def start() -> None:
        await loaded.wait()
        engine.ready = True

    async with serving(server(engine), start=start) as running:
        connection = await running.connect()
        for path, expected in (("/healthz", 200), ("/readyz", 503)):
            await connection.request("GET", path)
            assert (await connection.answer())[0] == expected
        await connection.chat()
        status, headers, _ = await connection.answer()
        assert (status, headers["retry-after"]) == (503, "1")
        loaded.set()
        await until(lambda: engine.ready)
        await connection.request("GET", "/readyz")
        assert (await connection.answer())[0] == 200


@on_uvloop
async def test_a_model_that_cannot_be_loaded_ends_the_process() -> None:
    async def start() -> None:
        raise StartupError("model.path: no such file")

    sock = listen("127.0.0.1", 0, guarded=False)
    with pytest.raises(StartupError, match="no such file"):
        await Service(server(HandEngine()), sock, start=start).run()
    assert sock.fileno() == -1


@on_uvloop
async def test_a_signal_while_the_model_loads_ends_the_process() -> None:
    async def start() -> None:
        await asyncio.Event().wait()

    sock = listen("127.0.0.1", 0, guarded=False)
    service = Service(server(HandEngine()), sock, start=start)
    task = asyncio.create_task(service.run())
    await until(lambda: service._http.started)
    service.signal(signal.SIGINT)
    assert await task == 0


def test_an_engine_that_does_not_close_cannot_hold_a_forced_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FORCED_S", 0.0)

    class Stuck(HandEngine):
        async def close(self) -> None:
            await asyncio.Event().wait()

    async def main() -> int:
        async with serving(server(Stuck())) as running:
            await until(lambda: running.service._http.started)
            running.service.signal(signal.SIGTERM)
            running.service.signal(signal.SIGTERM)
            return await running.task

    assert launch.run(main()) == 128 + signal.SIGTERM


def test_a_hand_over_that_does_not_end_cannot_hold_a_forced_end_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FORCED_S", 0.0)

    async def stuck() -> None:
        await asyncio.Event().wait()

    async def main() -> int:
        app = server(HandEngine())
        monkeypatch.setattr(app, "finish", stuck)
        async with serving(app) as running:
            await until(lambda: running.service._http.started)
            running.service.signal(signal.SIGTERM)
            running.service.signal(signal.SIGTERM)
            return await running.task

    assert launch.run(main()) == 128 + signal.SIGTERM


# Beside ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_uvloop
async def test_another_socket_has_its_own_routes_until_the_last_answer_is_over() -> None:
    engine = HandEngine()
    app = server(engine)
    main, side = [listen("127.0.0.1", 0, guarded=False) for _ in range(2)]
    ports = [sock.getsockname()[1] for sock in (main, side)]
    service = Service(app, main, beside={side: Routes(*app.operating)})
    task = asyncio.create_task(service.run())
    public, private = [Connection(*await asyncio.open_connection("127.0.0.1", port)) for port in ports]
    for path, statuses in (("/healthz", (200, 200)), ("/metrics", (200, 200)), ("/v1/models", (200, 404))):
        for connection, status in zip((public, private), statuses, strict=True):
            await connection.request("GET", path)
            head, headers = await connection.head()
            await connection.reader.readexactly(int(headers["content-length"]))
            assert head == status, path
    await public.chat(stream=True)
    await until(lambda: bool(engine.generations))
    engine.say("a")
    await public.head()
    service.signal(signal.SIGTERM)
    await private.request("GET", "/healthz")
    assert (await private.answer())[2]["status"] == "draining"
    engine.finish()
    assert await task == 0
    assert main.fileno() == side.fileno() == -1
    for connection in (public, private):
        connection.close()
