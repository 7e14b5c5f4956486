from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop

from bench_servers import H2Server, Reader, Writer, by_hand
from headrace_bench.client.place import parse
from headrace_bench.client.pool import Pool


async def wait(reader: Reader, writer: Writer) -> None:
    await reader.read()


def on(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test, 20))


def test_the_one_used_last_is_used_next_and_closed_ones_never() -> None:
    async def test() -> None:
        async with by_hand(wait) as url:
            pool = Pool(parse(url), time.monotonic)
            assert pool.idle() is None
            one, two, three = [await pool.open() for _ in range(3)]
            for line in (one, two, three):
                pool.keep(line)
            three.close()
            assert pool.idle() is two
            assert pool.idle() is one
            assert pool.idle() is None
            await pool.close()
            assert one.gone.done()
            assert two.gone.done()

    on(test())


def test_without_keeping_none_is_idle() -> None:
    async def test() -> None:
        async with by_hand(wait) as url:
            pool = Pool(parse(url), time.monotonic, keep_alive=False)
            line = await pool.open()
            pool.keep(line)
            assert pool.idle() is None
            await asyncio.wait_for(line.gone, 5)
            await pool.close()

    on(test())


def test_a_name_is_looked_up_once() -> None:
    async def test() -> None:
        async with by_hand(wait) as url:
            pool = Pool(parse(url.replace("127.0.0.1", "localhost")), time.monotonic)
            await pool.open()
            assert pool.address == "127.0.0.1"
            await pool.open()
            await pool.close()

    on(test())


def test_nagle_is_off() -> None:
    async def test() -> None:
        async with by_hand(wait) as url:
            pool = Pool(parse(url), time.monotonic)
            line = await pool.open()
            assert line.info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            await pool.close()

    on(test())


def test_those_who_wait_for_http2_share_what_is_opened() -> None:
    server = H2Server(lambda stream: None)

    async def test() -> None:
        async with server as url:
            pool = Pool(parse(url), time.monotonic, http2=True)
            lines = await asyncio.gather(*(pool.open() for _ in range(5)))
            assert len(set(lines)) == 1
            assert pool.idle() is lines[0]
            await pool.close()

    on(test())
    assert len(server.connections) == 1


def test_a_failure_to_open_is_everybodys() -> None:
    async def test() -> None:
        async with by_hand(wait) as url:
            pass
        pool = Pool(parse(url), time.monotonic, http2=True)
        found = await asyncio.gather(*(pool.open() for _ in range(3)), return_exceptions=True)
        assert all(isinstance(error, ConnectionRefusedError) for error in found)
        await pool.close()

    on(test())


def test_closing_does_not_wait_for_what_is_being_opened() -> None:
    async def test() -> None:
        greeted = asyncio.Event()

        async def silent(reader: Reader, writer: Writer) -> None:
            await reader.read(1 << 16)
            greeted.set()
            await reader.read()

        async with by_hand(silent) as url:
            pool = Pool(parse(url), time.monotonic, http2=True)
            opening = asyncio.create_task(pool.open())
            await greeted.wait()  # it is connected, and waits for the server's half of HTTP/2
            await pool.close()
            with pytest.raises(asyncio.CancelledError):
                await opening

    on(test())
