"""Connections to a scripted server on a real socket: used again, dead, too old, given up."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.engines.connections import AT_ONCE_S, Connections, Origin
from headrace.engines.http1 import Head, WireFault
from headrace.engines.openai import parse_url
from server.hand_engine import Hands
from server.socket_client import on_uvloop, until
from upstreams import Play, Request, Server, stream, upstream, whole

GET = b"GET /v1/x HTTP/1.1\r\nhost: x\r\n\r\n"


class Notes:
    def __init__(self) -> None:
        self.status = 0
        self.body_ = b""
        self.ends: list[WireFault | None] = []

    def head(self, head: Head) -> None:
        self.status = head.status

    def body(self, data: bytes) -> None:
        self.body_ += data

    def end(self, fault: WireFault | None) -> None:
        self.ends.append(fault)


@contextlib.asynccontextmanager
async def connected(answer: Callable[[Request], Play], **how: Any) -> AsyncIterator[tuple[Server, Connections, Hands]]:
    clock = Hands()
    async with upstream(answer) as there:
        pool = Connections(parse_url(there.url)[0], clock, **how)
        try:
            yield there, pool, clock
        finally:
            await pool.close()
            assert (pool.running, pool.idle) == (0, 0)


async def ask(pool: Connections) -> Notes:
    notes = Notes()
    pool.start(GET, notes)
    await until(lambda: bool(notes.ends))
    return notes


@on_uvloop
async def test_a_connection_is_used_again() -> None:
    async with connected(lambda _: whole({})) as (there, pool, _):
        for _ in range(3):
            notes = await ask(pool)
            assert (notes.status, notes.body_, notes.ends) == (200, b"{}", [None])
        assert (there.connections, pool.opened, pool.idle) == (1, 1, 1)


@on_uvloop
async def test_the_one_used_last_is_used_first_and_the_rest_grows_old() -> None:
    gate = asyncio.Event()
    plain = whole({})
    async with connected(lambda _: Play(plain.pieces, gate=gate)) as (there, pool, clock):
        both = [Notes(), Notes()]
        for notes in both:
            pool.start(GET, notes)
        await until(lambda: len(there.requests) == 2)
        gate.set()
        await until(lambda: all(notes.ends for notes in both))
        assert pool.idle == 2
        clock.now += 20
        await ask(pool)
        clock.now += 15  # 35 s for one of them, 15 s for the other
        await ask(pool)
        assert there.connections == 2
        clock.now += 31
        await ask(pool)
        assert there.connections == 3
        await until(lambda: there.open == 1)


@on_uvloop
async def test_idle_connections_go_by_themselves() -> None:
    async with connected(lambda _: whole({}), keep_s=0.01) as (there, pool, clock):
        await ask(pool)
        assert pool.idle == 1
        clock.now += 1
        await until(lambda: there.open == 0)
        assert pool.idle == 0


@on_uvloop
async def test_the_other_side_says_how_long_it_keeps_one() -> None:
    async with connected(lambda _: whole({}, keep_alive="timeout=5")) as (there, pool, clock):
        await ask(pool)
        clock.now += 4.5
        await ask(pool)
        assert there.connections == 2


@on_uvloop
async def test_few_are_kept() -> None:
    gate = asyncio.Event()
    plain = whole({})
    async with connected(lambda _: Play(plain.pieces, gate=gate), most_idle=2) as (there, pool, _):
        notes = [Notes() for _ in range(4)]
        for one in notes:
            pool.start(GET, one)
        await until(lambda: len(there.requests) == 4)
        gate.set()
        await until(lambda: all(one.ends for one in notes))
        assert pool.idle == 2
        await until(lambda: there.open == 2)


@on_uvloop
async def test_one_that_died_meanwhile_costs_nothing() -> None:
    """Its end and the next request cross: the server took neither the request nor any part of it."""
    asked = 0

    def answer(_: Request) -> Play:
        nonlocal asked
        asked += 1
        return Play([], "reset" if asked % 2 else "close") if asked in (2, 3) else whole({})

    async with connected(answer) as (there, pool, _):
        await ask(pool)
        notes = Notes()
        pool.start(GET, notes)  # on the kept one, which dies; then on a fresh one, which dies as well: that is final
        await until(lambda: bool(notes.ends))
        assert isinstance(notes.ends[0], WireFault)
        assert (len(there.requests), there.connections) == (3, 2)
        assert (await ask(pool)).ends == [None]


@on_uvloop
async def test_a_dead_one_is_replaced_once() -> None:
    asked = 0

    def answer(_: Request) -> Play:
        nonlocal asked
        asked += 1
        return Play([], "close") if asked == 2 else whole({})

    async with connected(answer) as (there, pool, _):
        await ask(pool)
        notes = await ask(pool)
        assert (notes.status, notes.ends) == (200, [None])
        assert (len(there.requests), there.connections) == (3, 2)


@pytest.mark.parametrize("end", ["close", "reset"])
def test_one_that_dies_at_work_is_not_asked_twice(end: Any) -> None:
    """It may have died of the request."""

    @on_uvloop
    async def play() -> None:
        gate = asyncio.Event()

        def answer(_: Request) -> Play:
            return Play([], end, gate) if len(there.requests) == 2 else whole({})

        async with connected(answer) as (there, pool, clock):
            await ask(pool)
            notes = Notes()
            pool.start(GET, notes)
            await until(lambda: len(there.requests) == 2)
            clock.now += AT_ONCE_S + 0.001
            gate.set()
            await until(lambda: bool(notes.ends))
            assert isinstance(notes.ends[0], WireFault)
            assert (len(there.requests), there.connections) == (2, 1)

    play()


@on_uvloop
async def test_from_far_away_the_end_comes_later() -> None:
    gate = asyncio.Event()

    def answer(_: Request) -> Play:
        return Play([], "close", gate) if len(there.requests) == 2 else whole({})

    async with connected(answer) as (there, pool, clock):
        clock.step = 0.1  # what opening a connection takes by this clock
        await ask(pool)
        clock.step = 0.0
        notes = Notes()
        pool.start(GET, notes)
        await until(lambda: len(there.requests) == 2)
        clock.now += 0.1 + AT_ONCE_S / 2
        gate.set()
        await until(lambda: bool(notes.ends))
        assert (notes.status, notes.ends, len(there.requests)) == (200, [None], 3)


@on_uvloop
async def test_what_was_answered_in_part_is_not_sent_again() -> None:
    asked = 0

    def answer(_: Request) -> Play:
        nonlocal asked
        asked += 1
        return Play([b"H"], "close") if asked == 2 else whole({})

    async with connected(answer) as (there, pool, _):
        await ask(pool)
        notes = await ask(pool)
        assert isinstance(notes.ends[0], WireFault)
        assert len(there.requests) == 2


@on_uvloop
async def test_one_that_the_server_closed_is_gone_at_once() -> None:
    async with connected(lambda _: Play(whole({}).pieces, "close")) as (there, pool, _):
        await ask(pool)
        await until(lambda: pool.idle == 0)
        assert (await ask(pool)).ends == [None]
        assert there.connections == 2


@on_uvloop
async def test_giving_up_cuts_the_connection() -> None:
    async with connected(lambda _: stream([b"data: {}\n\n"], end="stall")) as (there, pool, _):
        notes = Notes()
        transfer = pool.start(GET, notes)
        await until(lambda: bool(notes.body_))
        transfer.cancel()
        transfer.cancel()
        assert pool.running == 0
        await until(lambda: there.cut == 1 and there.open == 0)
        assert notes.ends == []


@on_uvloop
async def test_giving_up_while_connecting() -> None:
    async with connected(lambda _: whole({})) as (there, pool, _):
        notes = Notes()
        for turns in range(5):
            transfer = pool.start(GET, notes)
            for _ in range(turns):
                await asyncio.sleep(0)
            transfer.cancel()
            assert pool.running == 0
        # A turn more, and it was answered: then its connection is kept.
        await until(lambda: there.open == pool.idle and not pool._tasks)
        assert len(notes.ends) <= 1
        assert (await ask(pool)).ends == [None]


@on_uvloop
async def test_closing_ends_what_runs() -> None:
    async with connected(lambda _: Play([], "stall")) as (there, pool, _):
        notes = [Notes(), Notes()]
        pool.start(GET, notes[0])
        await until(lambda: len(there.requests) == 1)
        pool.start(GET, notes[1])
        await pool.close()
        assert all(isinstance(one.ends[0], WireFault) and len(one.ends) == 1 for one in notes)
        await until(lambda: there.open == 0)
        with pytest.raises(WireFault, match="closed"):
            pool.start(GET, Notes())


@on_uvloop
async def test_open_connections_are_bounded() -> None:
    async with connected(lambda _: Play([], "stall"), most_open=1) as (_, pool, _):
        transfer = pool.start(GET, Notes())
        with pytest.raises(WireFault, match="1 connections"):
            pool.start(GET, Notes())
        transfer.cancel()


@on_uvloop
async def test_nobody_is_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        pool = Connections(Origin("127.0.0.1", taken.getsockname()[1]), Hands())
        (fault,) = (await ask(pool)).ends
        assert "refused" in str(fault).lower()
        assert "127" not in str(fault)
        await pool.close()


@on_uvloop
async def test_a_connection_that_does_not_come_about() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fill = []
        for _ in range(3):  # nobody accepts: its queue is full
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
            fill.append(sock)
        pool = Connections(Origin(*full.getsockname()), Hands(), connect_s=0.05)
        (fault,) = (await ask(pool)).ends
        assert "0.05 s" in str(fault)
        await pool.close()
        for sock in fill:
            sock.close()


@on_uvloop
async def test_pausing_holds_the_sender() -> None:
    piece = b"x" * 65_536
    async with connected(lambda _: stream([piece] * 400)) as (_, pool, _):
        notes = Notes()
        transfer = pool.start(GET, notes)
        transfer.pause()  # while it connects
        for _ in range(200):
            await asyncio.sleep(0)
        assert notes.body_ == b""
        transfer.resume()
        await until(lambda: bool(notes.body_))
        transfer.pause()
        for _ in range(20):
            await asyncio.sleep(0)
        held = len(notes.body_)
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(notes.body_) == held < 400 * len(piece)
        transfer.resume()
        await until(lambda: bool(notes.ends))
        assert len(notes.body_) == 400 * len(piece)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, its own authority, and its key."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("no openssl to make a certificate with")
    file = tmp_path_factory.mktemp("tls") / "cert.pem"
    names = ["-subj", "/CN=test", "-addext", "subjectAltName=DNS:localhost"]
    made = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", *names]
    subprocess.run([*made, "-keyout", file.with_suffix(".key"), "-out", file], check=True, capture_output=True)
    return file, file.with_suffix(".key")


# TLS ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tls(certificate: tuple[Path, Path]) -> None:
    file, key = certificate

    @on_uvloop
    async def play() -> None:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(file, key)
        trust = ssl.create_default_context(cafile=str(file))
        async with upstream(lambda _: whole({}), ssl=server) as there:
            url = there.url.replace("127.0.0.1", "localhost")
            pool = Connections(parse_url(url, tls=trust)[0], Hands())
            assert [(await ask(pool)).ends for _ in range(2)] == [[None], [None]]
            assert there.connections == 1
            await pool.close()
            for doubtful in (parse_url(url)[0], parse_url(there.url, tls=trust)[0]):
                wary = Connections(doubtful, Hands())
                (fault,) = (await ask(wary)).ends
                assert "certificate" in str(fault)
                await wary.close()

    play()
