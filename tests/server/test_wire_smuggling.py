"""Bytes that a proxy and we could read as different requests: refused, or read in one way, and nothing hidden runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from headrace.server.app import App
from server.hand_engine import HandEngine, Hands, server
from server.socket_client import Connection, Running, on_uvloop, serving, until

BODY = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
HOST = b"Host: x\r\n"
CHAT = b"POST /v1/chat/completions HTTP/1.1"
HIDDEN = b"%b\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (CHAT, len(BODY), BODY)
"""What must not run: a whole request."""
END = b"0\r\n\r\n"
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


def length(value: bytes | int) -> bytes:
    return b"Content-Length: %b\r\n" % (b"%d" % value if isinstance(value, int) else value)


def post(headers: bytes, body: bytes = b"", line: bytes = CHAT) -> bytes:
    return line + b"\r\n" + headers + b"\r\n" + body


def chunked(body: bytes, line: bytes = CHAT) -> bytes:
    return post(HOST + CHUNKED, body, line)


def one_chunk(size: bytes) -> bytes:
    """BODY in one chunk whose size line is `size`, `%x` in it being the size."""
    return chunked(size.replace(b"%x", b"%x" % len(BODY)) + b"\r\n" + BODY + b"\r\n" + END + HIDDEN)


REFUSED: dict[str, tuple[int, bytes]] = {
    # Two views of the length.
    "length and chunked": (400, post(HOST + length(len(HIDDEN)) + CHUNKED, END + HIDDEN)),
    "chunked and length": (400, post(HOST + CHUNKED + length(5), END + HIDDEN)),
    "two lengths": (400, post(HOST + length(0) + length(len(HIDDEN)), HIDDEN)),
    "one length twice": (400, post(HOST + length(0) * 2, HIDDEN)),
    "a list of lengths": (400, post(HOST + length(b"0, 0"), HIDDEN)),
    "a plus": (400, post(HOST + length(b"+0"), HIDDEN)),
    "a minus": (400, post(HOST + length(b"-1"), HIDDEN)),
    "hexadecimal": (400, post(HOST + length(b"0x10"), HIDDEN)),
    "a space inside": (400, post(HOST + length(b"1 0"), HIDDEN)),
    "an underscore": (400, post(HOST + length(b"1_0"), HIDDEN)),
    "a fraction": (400, post(HOST + length(b"1.0"), HIDDEN)),
    "no digits": (400, post(HOST + length(b""), HIDDEN)),
    "too many digits": (400, post(HOST + length(b"9" * 30), HIDDEN)),
    "wide digits": (400, post(HOST + length("１".encode()), HIDDEN)),
    # Codings.
    "chunked twice": (400, post(HOST + CHUNKED * 2, END + HIDDEN)),
    "chunked in chunked": (400, post(HOST + b"Transfer-Encoding: chunked, chunked\r\n", END + HIDDEN)),
    "gzip in chunked": (501, post(HOST + b"Transfer-Encoding: gzip, chunked\r\n", END + HIDDEN)),
    "chunked in gzip": (400, post(HOST + b"Transfer-Encoding: chunked, gzip\r\n", END + HIDDEN)),
    "identity": (501, post(HOST + b"Transfer-Encoding: identity\r\n", HIDDEN)),
    "identity and a length": (400, post(HOST + b"Transfer-Encoding: identity\r\n" + length(0), HIDDEN)),
    "chunked, then identity": (400, post(HOST + CHUNKED + b"Transfer-Encoding: identity\r\n", END + HIDDEN)),
    "xchunked": (501, post(HOST + b"Transfer-Encoding: xchunked\r\n", END + HIDDEN)),
    "xchunked and a length": (400, post(HOST + b"Transfer-Encoding: xchunked\r\n" + length(5), END + HIDDEN)),
    "quoted": (501, post(HOST + b'Transfer-Encoding: "chunked"\r\n', END + HIDDEN)),
    "with a parameter": (501, post(HOST + b"Transfer-Encoding: chunked;q=1\r\n", END + HIDDEN)),
    "a comma behind": (400, post(HOST + b"Transfer-Encoding: chunked,\r\n", END + HIDDEN)),
    "empty": (400, post(HOST + b"Transfer-Encoding:\r\n", HIDDEN)),
    "a vertical tab": (400, post(HOST + b"Transfer-Encoding: \x0bchunked\r\n", END + HIDDEN)),
    "a space before the colon": (400, post(HOST + b"Transfer-Encoding : chunked\r\n" + length(0), END + HIDDEN)),
    "a tab before the colon": (400, post(HOST + b"Transfer-Encoding\t: chunked\r\n" + length(0), END + HIDDEN)),
    "chunked in HTTP/1.0": (400, chunked(END + HIDDEN, CHAT.replace(b"1.1", b"1.0"))),
    # Lines.
    "bare LF": (400, post(HOST + length(0), HIDDEN).replace(b"\r\n", b"\n")),
    "one bare LF": (400, post(b"Host: x\nX: y\r\n" + length(0), HIDDEN)),
    "bare CR": (400, post(HOST + b"X: a\rTransfer-Encoding: chunked\r\n" + length(0), END + HIDDEN)),
    "bare CR as the end": (400, post(HOST + b"X: a\r" + length(0), HIDDEN)),
    "a folded line": (400, post(HOST + b"X: a\r\n b\r\n" + length(0), HIDDEN)),
    "a folded coding": (400, post(HOST + b"Transfer-Encoding:\r\n chunked\r\n", END + HIDDEN)),
    "a space before the first header": (400, post(b" X: y\r\n" + HOST + length(0), HIDDEN)),
    "NUL in a value": (400, post(HOST + b"X: a\0b\r\n" + length(0), HIDDEN)),
    "a control byte in a value": (400, post(HOST + b"X: a\x01b\r\n" + length(0), HIDDEN)),
    "DEL in a value": (400, post(HOST + b"X: a\x7fb\r\n" + length(0), HIDDEN)),
    "NUL in a name": (400, post(HOST + b"X\0: a\r\n" + length(0), HIDDEN)),
    "a space in a name": (400, post(HOST + b"X Y: a\r\n" + length(0), HIDDEN)),
    "no name": (400, post(HOST + b": a\r\n" + length(0), HIDDEN)),
    "no colon": (400, post(HOST + b"abc\r\n" + length(0), HIDDEN)),
    # Chunks.
    "an extension up to LF": (400, one_chunk(b"%x;a\nb")),
    "an extension with CR": (400, one_chunk(b"%x;a\rb")),
    "a size with a space": (400, one_chunk(b"%x ")),
    "a size with a prefix": (400, one_chunk(b"0x%x")),
    "a size with a sign": (400, one_chunk(b"+%x")),
    "a negative size": (400, one_chunk(b"-1")),
    "no size": (400, one_chunk(b"")),
    "a size over 64 bits": (400, one_chunk(b"1" + b"0" * 16)),
    "a size far over 64 bits": (400, one_chunk(b"f" * 40)),
    "a chunk that ends early": (400, chunked(b"5\r\n" + BODY + b"\r\n" + END + HIDDEN)),
    "a chunk without an end": (400, chunked(b"%x\r\n%b" % (len(BODY), BODY) + END + HIDDEN)),
    "a length among the trailers": (400, chunked(CHUNK + b"0\r\n" + length(5) + b"\r\n" + HIDDEN)),
    "zeros without end": (431, chunked(b"0" * 200_000)),
    "an extension without end": (431, chunked(b"1;a=" + b"x" * 200_000)),
    "a trailer without end": (431, chunked(b"0\r\nX: " + b"x" * 200_000)),
    "trailers without end": (431, chunked(b"0\r\n" + b"X: y\r\n" * 40_000)),
    # Targets, hosts, versions.
    "an authority": (400, post(HOST + length(0), HIDDEN, b"POST x:80 HTTP/1.1")),
    "CONNECT": (400, post(HOST, HIDDEN, b"CONNECT x:80 HTTP/1.1")),
    "no slash": (400, post(HOST + length(0), HIDDEN, b"POST v1/models HTTP/1.1")),
    "a space in the target": (400, post(HOST + length(0), HIDDEN, b"GET /a HTTP/1.1 HTTP/1.1")),
    "a control byte in the target": (400, post(HOST + length(0), HIDDEN, b"GET /\x01 HTTP/1.1")),
    "a fragment": (400, post(HOST + length(0), HIDDEN, b"GET /healthz#x HTTP/1.1")),
    "no host": (400, post(length(0), HIDDEN)),
    "two hosts": (400, post(HOST * 2 + length(0), HIDDEN)),
    "an empty host": (400, post(b"Host:\r\n" + length(0), HIDDEN)),
    "a path as a host": (400, post(b"Host: x/y\r\n" + length(0), HIDDEN)),
    "HTTP/0.9": (505, b"GET /healthz\r\n\r\n" + HIDDEN),
    "HTTP/2": (505, post(HOST + length(0), HIDDEN, b"GET /healthz HTTP/2.0")),
    "HTTP/2's own beginning": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HIDDEN),
    "TLS": (400, bytes.fromhex("16030100c8010000c40303")),
    "too many headers": (431, post(HOST + b"X: y\r\n" * 200 + length(0), HIDDEN)),
    "a long header in one piece": (431, post(HOST + b"X: %b\r\n" % (b"y" * 70_000) + length(0), HIDDEN)),
    "a long target": (431, post(HOST + length(0), HIDDEN, b"GET /%b HTTP/1.1" % (b"a" * 70_000))),
    "empty lines without end": (431, b"\r\n" * 40_000),
}  # fmt: skip


class Stage:
    """A server whose engine answers nothing, and its connections."""

    def __init__(self, running: Running, app: App, engine: HandEngine) -> None:
        self.running = running
        self.app = app
        self.engine = engine

    @property
    def connections(self) -> int:
        return len(self.running.service._http.server_state.connections)

    async def send(self, data: bytes) -> Connection:
        connection = await self.running.connect()
        connection.writer.write(data)
        return connection

    async def generations(self, number: int) -> None:
        """Until so many began, and none more, however often the loop turns."""
        await until(lambda: len(self.engine.generations) >= number)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(self.engine.generations) == number


@contextlib.asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    engine = HandEngine()
    app = server(engine, clock=Hands())
    async with serving(app) as running:
        yield Stage(running, app, engine)


async def everything(connection: Connection) -> bytes:
    """Up to the connection's end. What a reset cuts off was read before."""
    out = b""
    with contextlib.suppress(ConnectionError):
        while piece := await connection.reader.read(65536):
            out += piece
    return out


async def refused(on: Stage, status: int, data: bytes) -> None:
    """One answer with that status, then the connection's end, and nothing ran."""
    raw = await everything(await on.send(data))
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), raw
    assert raw.count(b"content-length: ") == 1, "one answer"
    assert b"\r\nconnection: close\r\n" in head
    assert msgspec.json.decode(body)["error"]["type"] == "invalid_request_error"
    await until(lambda: on.connections == 0)
    assert not on.engine.generations, "nothing ran"
    assert on.app.running == 0


@on_uvloop
async def test_refused_once_and_closed() -> None:
    async with stage() as on:
        for name, (status, data) in REFUSED.items():
            try:
                await refused(on, status, data)
            except (AssertionError, TimeoutError) as error:
                pytest.fail(f"{name}: {error!r}")
        other = await on.running.connect()
        await other.request("GET", "/healthz")
        assert (await other.answer())[0] == 200


ONE = {
    "a length": post(HOST + length(len(BODY)), BODY),
    "zeros before a length": post(HOST + length(b"000%d" % len(BODY)), BODY),
    "spaces around a length": post(HOST + length(b"\t%d  " % len(BODY)), BODY),
    "chunked in capitals": post(HOST + b"TRANSFER-ENCODING: CHUNKED\r\n", CHUNK + END),
    "a tab before chunked": post(HOST + b"Transfer-Encoding:\tchunked\r\n", CHUNK + END),
    "an extension": chunked(b"%x;a=b\r\n%b\r\n" % (len(BODY), BODY) + END),
    "chunks of one byte": chunked(b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + END),
    "trailers": chunked(b"%x\r\n%b\r\n0\r\nX: y\r\nAuthorization: z\r\n\r\n" % (len(BODY), BODY)),
    "a whole URL": post(HOST + length(len(BODY)), BODY, b"POST http://elsewhere/v1/chat/completions HTTP/1.1"),
    "HTTP/1.0 without a host": post(length(len(BODY)), BODY, CHAT.replace(b"1.1", b"1.0")),
    "empty lines before": b"\r\n\r\n" + post(HOST + length(len(BODY)), BODY),
    "a wish for HTTP/2": post(HOST + H2C + length(len(BODY)), BODY),
    "a wish for a web socket": post(HOST + b"Connection: upgrade\r\nUpgrade: websocket\r\n" + length(len(BODY)), BODY),
}  # fmt: skip
"""Each is one request; whole, and a byte at a time."""


@pytest.mark.parametrize("name", ONE)
def test_read_in_one_way(name: str) -> None:
    @on_uvloop
    async def run() -> None:
        async with stage() as on:
            await on.send(ONE[name])
            await on.generations(1)
            slow = await on.running.connect()
            for byte in ONE[name]:
                slow.writer.write(bytes((byte,)))
                await asyncio.sleep(0)
            await on.generations(2)
            for generation in on.engine.generations:
                on.engine.say("x", rid=generation.rid)
                on.engine.finish(rid=generation.rid)
            assert (await slow.answer())[0] == 200
            if b"HTTP/1.0" not in ONE[name]:
                slow.writer.write(ONE[name])
                await on.generations(3)

    run()


@on_uvloop
async def test_a_request_in_the_body_of_another_is_its_body() -> None:
    async with stage() as on:
        for body in (HIDDEN, END + HIDDEN):
            connection = await on.send(post(HOST + length(len(body)), body))
            assert (await connection.answer())[0] == 400, "it is no JSON"
        connection = await on.send(chunked(b"%x\r\n%b\r\n" % (len(HIDDEN), HIDDEN) + END))
        assert (await connection.answer())[0] == 400
        connection = await on.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + length(len(HIDDEN)) + b"\r\n" + HIDDEN)
        assert (await connection.answer())[0] == 200
        await connection.request("GET", "/healthz")
        assert (await connection.answer())[0] == 200
        await on.generations(0)


@on_uvloop
async def test_what_follows_a_close_is_not_read() -> None:
    async with stage() as on:
        raw = await everything(await on.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" + HIDDEN))
        assert raw.count(b"HTTP/1.1 ") == 1
        await on.generations(0)


@on_uvloop
async def test_requests_one_behind_the_other_are_answered_in_order() -> None:
    async with stage() as on:
        connection = await on.send(HIDDEN + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN)
        await on.generations(1)
        on.engine.say("x")
        on.engine.finish()
        assert "chat.completion" in str((await connection.answer())[2])
        assert (await connection.answer())[2]["status"] == "ok"
        await on.generations(2)


@on_uvloop
async def test_a_fault_behind_a_request_that_runs_waits_for_its_answer() -> None:
    async with stage() as on:
        connection = await on.send(HIDDEN + b"G@RBAGE\r\n\r\n" + HIDDEN)
        await on.generations(1)
        on.engine.say("x")
        on.engine.finish()
        assert (await connection.answer())[0] == 200
        assert await everything(connection) == b"", "closed, and no second answer"
        await on.generations(1)
        await until(lambda: on.connections == 0)


@on_uvloop
async def test_a_fault_in_a_body_that_is_waited_for_behind_another_request_closes() -> None:
    async with stage() as on:
        connection = await on.send(HIDDEN + chunked(b"zz\r\n") + HIDDEN)
        assert await everything(connection) == b"", "an answer here would be taken for the first request's"
        await until(lambda: on.connections == 0)
        await until(lambda: on.app.running == 0)


@on_uvloop
async def test_a_client_with_requests_in_waiting_may_leave() -> None:
    async with stage() as on:
        connection = await on.send(HIDDEN + HIDDEN + HIDDEN)
        await on.generations(1)
        connection.reset()
        await until(lambda: on.engine.cancelled == [on.engine.rid])
        await until(lambda: on.app.running == 0)
        await on.generations(1)
