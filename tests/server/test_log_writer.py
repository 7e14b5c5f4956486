"""Behind the readers' backs: a Redis that is frozen, dead, full or forgetful delays no token and fails no request."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

import pytest

from headrace.core.errors import Draining
from headrace.core.events import Delta
from headrace.gateway.guard import ANYBODY
from headrace.server.log_mirror import Mirror
from headrace.server.log_redis import Put
from headrace.server.streamlog import StreamLog
from headrace.server.streams import LogLimits
from redis_server import RedisServer
from server.asgi_driver import on_loop, settle
from server.log_servers import Server, data, one, sharing, text, writer_of, written
from server.socket_client import until
from server.test_log_redis import ORIGIN, endless


def say(server: Server, word: str) -> None:
    server.engine.emit(Delta(server.engine.rid, 0, word, 1, ids=(7,)))


def token(server: Server, word: str, id: int) -> None:
    server.engine.emit(Delta(server.engine.rid, 0, word, 1, ids=(id,)))


@on_loop
async def test_a_task_is_there_only_while_something_is_written(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a") as (a,):
        assert writer_of(a)._task is None
        async with a.chat() as call:
            say(a, "x")
            await settle()
            assert writer_of(a)._task is not None
            a.engine.finish()
            await call.task
        await until(lambda: writer_of(a)._task is None)
        assert len(writer_of(a)) == 0
        assert all(log.changed is None for log in a.app.resuming.streams)
        assert await endless(redis_server) == []


@on_loop
async def test_what_was_refused_leaves_no_key(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a") as (a,):
        async with a.chat(key="k") as call:
            await until(lambda: bool(a.engine.generations))
            await written(a)
            a.engine.fail()
            await call.task
        assert call.status == 500
        await until(lambda: len(writer_of(a)) == 0)
        assert a.app.resuming.shared is not None
        client = a.app.resuming.shared.store._shared.client
        assert [key async for key in client.scan_iter("*")] == []


@on_loop
async def test_a_frozen_redis_delays_no_token_and_is_caught_up_with(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b), a.chat() as call:
        for server in (a, b):
            assert server.app.resuming.shared is not None
            server.app.resuming.shared.store._shared.timeout_s = 0.3
        say(a, "one ")
        await settle()
        await written(a)
        redis_server.signal(signal.SIGSTOP)
        try:
            for number in range(50):
                say(a, f"{number} ")
                await settle(8)
                assert text(call.body).endswith(f" {number} ")
            shared = a.app.resuming.shared
            assert shared is not None
            await until(lambda: shared.store._shared.down)
            say(a, "two ")
            await settle()
            assert text(call.body).endswith("two ")
        finally:
            redis_server.signal(signal.SIGCONT)
        await written(a)
        id = call.headers["x-headrace-stream"]
        a.engine.finish("stop", 53)
        await call.task
        await until(lambda: len(writer_of(a)) == 0)
        async with b.get(id) as late:
            await late.task
        assert data(late.body) == data(call.body)
        assert a.app.metrics.streams.unshared == 0


@on_loop
async def test_a_redis_that_died_and_forgot_is_told_everything_again(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b), a.chat() as call:
        say(a, "one ")
        await settle()
        await written(a)
        redis_server.stop()
        say(a, "two ")
        await settle()
        assert text(call.body) == "one two "
        shared = a.app.resuming.shared
        assert shared is not None
        await until(lambda: shared.store._shared.errors > 0)
        redis_server.start()
        say(a, "three ")
        await settle()
        await written(a)
        id = call.headers["x-headrace-stream"]
        async with b.get(id) as away:
            await until(lambda: text(away.body) == "one two three ")
            a.engine.finish()
            await away.task
        await call.task
        assert await endless(redis_server) == []


@on_loop
async def test_a_full_redis_takes_nothing_and_nobody_minds(make_redis: Callable[..., RedisServer]) -> None:
    redis = make_redis("--maxmemory", "1", "--maxmemory-policy", "noeviction")
    redis.start()
    async with sharing(redis, "a", log_limits=LogLimits(keep_s=0.0)) as (a,):
        async with a.chat(key="k") as call:
            await until(lambda: bool(a.engine.generations))
            say(a, "one ")
            await until(lambda: call.status == 200)
            a.engine.finish()
            await call.task
        assert text(call.body) == "one "
        await until(lambda: len(writer_of(a)) == 0)
        assert a.app.metrics.streams.unshared == 1
        assert len(a.app.resuming.streams) == 0
        assert a.app.metrics.streams.bytes == 0


@on_loop
async def test_what_the_log_let_go_before_redis_had_it_can_only_be_resumed_here(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", log_limits=LogLimits(max_bytes=4096)) as (a,), a.chat() as call:
        say(a, "one ")
        await settle()
        await written(a)
        assert a.app.resuming.shared is not None
        a.app.resuming.shared.store._shared.timeout_s = 0.1
        redis_server.signal(signal.SIGSTOP)
        try:
            for _ in range(100):
                say(a, "x" * 100)
                await settle(8)
        finally:
            redis_server.signal(signal.SIGCONT)
        await until(lambda: len(writer_of(a)) == 0)
        assert a.app.metrics.streams.unshared == 1
        a.engine.finish()
        await call.task
        assert text(call.body).count("x") == 10_000


@on_loop
async def test_a_server_that_lost_its_lease_writes_no_more(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with sharing(redis_server, "a") as (a,), a.chat() as call:
        say(a, "one ")
        await settle()
        await written(a)
        shared = a.app.resuming.shared
        assert shared is not None
        client = shared.store._shared.client
        id = call.headers["x-headrace-stream"]
        await client.set(f"headrace:stream:{{{id}}}:lease", "somebody else", px=60_000)
        say(a, "two ")
        await until(lambda: len(writer_of(a)) == 0)
        assert text(call.body) == "one two "
        assert "taken over" in caplog.text
        assert await client.xlen(f"headrace:stream:{{{id}}}:log") == 1
        a.engine.finish()
        await call.task


@on_loop
async def test_the_end_of_a_server_hands_over_what_is_left(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b):
        async with a.chat() as call:
            a.engine.say("one ")
            await settle()
            a.app.drain()
            a.app.fail_all(Draining("the end"))
            await call.task
            await a.app.resuming.close()
        assert call.body.count(b'"error"') == 1
        assert b"id: " not in call.body.split(b"\n\n")[1], "the farewell is no part of the stream"
        async with b.get(call.headers["x-headrace-stream"]) as on:
            await until(lambda: bool(b.engine.generations))
            assert b.engine.generations[0].resume == (tuple(b"one "),), "from the text: its tokens were not told"
            b.engine.say("two ")
            b.engine.finish()
            await on.task
        assert text(on.body) == "one two "


def test_without_a_shared_redis_nothing_is_written() -> None:
    assert one().app.resuming.shared is None


@on_loop
async def test_a_server_ends_though_redis_is_gone(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a") as (a,):
        async with a.chat() as call:
            say(a, "one ")
            await settle()
            await written(a)
            redis_server.stop()
            say(a, "two ")
            a.engine.finish()
            await call.task
        assert text(call.body) == "one two "
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.01)

        counting = asyncio.get_running_loop().create_task(count())
        await a.app.resuming.close()
        counting.cancel()
        await asyncio.wait((counting,))
        assert turns > 10, "the loop was free meanwhile"
        assert len(writer_of(a)) == 0


@on_loop
async def test_the_tokens_stay_exact_though_nobody_knows_of_a_write_that_was_made(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a") as (a,):
        async with a.chat() as call:
            token(a, "x", 120)
            await until(lambda: bool(call.sent))
            await written(a)
            assert a.app.resuming.shared is not None
            store, lost = a.app.resuming.shared.store, asyncio.Event()
            put = store.put

            async def silent(puts: Sequence[Put]) -> list[int] | None:
                answer = await put(puts)
                if any(one.entries for one in puts):
                    lost.set()
                    return None
                return answer

            for letter in "yz":
                store.put = silent  # type: ignore[method-assign]
                lost.clear()
                token(a, letter, ord(letter))
                await lost.wait()
                store.put = put  # type: ignore[method-assign]
                if letter == "z":
                    token(a, "", 0xC3)  # there is nothing to be written for it
                    await settle()
                await written(a)
            token(a, "é", 0xA9)
            await settle()
            await written(a)
            id = call.headers["x-headrace-stream"]
            mirror = Mirror(StreamLog("m", "o", max_bytes=1 << 20, grown=lambda change: None), ORIGIN, ANYBODY)
            mirror.take(await store.entries(id, 0) or [])
            told = mirror.told()
            assert told is not None
            assert (told.text, told.ids) == ("xyzé", tuple("xyzé".encode()))
            a.engine.finish()
            await call.task
