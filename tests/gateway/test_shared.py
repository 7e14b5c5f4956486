"""Against a real Redis. Time is by hand; only the timeout is real."""

from __future__ import annotations

import asyncio
import signal

import pytest
from redis.asyncio import Redis

from headrace.core.errors import StartupError
from headrace.gateway.shared import PLACES, SharedRedis
from headrace.testing import ManualClock
from redis_server import RedisServer
from server.asgi_driver import on_loop


async def ping(client: Redis) -> bool:
    return bool(await client.ping())


@on_loop
async def test_an_answer_comes_through(redis_server: RedisServer) -> None:
    shared = SharedRedis(redis_server.url, ManualClock(), timeout_s=30.0)
    assert await shared.call(ping) is True
    assert (shared.down, shared.errors) == (False, 0)
    await shared.close()


@on_loop
async def test_a_frozen_server_costs_one_timeout_and_is_tried_again_later(redis_server: RedisServer) -> None:
    clock = ManualClock()
    shared = SharedRedis(redis_server.url, clock, timeout_s=0.1)
    redis_server.signal(signal.SIGSTOP)
    try:
        assert await shared.call(ping) is None
        assert (shared.down, shared.errors) == (True, 1)
        assert await shared.call(ping) is None
        assert shared.errors == 1, "nobody asked it"
    finally:
        redis_server.signal(signal.SIGCONT)
    clock.advance(60.0)
    assert await shared.call(ping, timeout_s=30.0) is True
    assert not shared.down
    await shared.close()


@on_loop
async def test_a_trial_that_fails_by_itself_is_not_the_last_one(redis_server: RedisServer) -> None:
    clock = ManualClock()
    shared = SharedRedis(redis_server.url, clock, timeout_s=30.0)

    async def wrong(client: Redis) -> bool:
        raise ValueError("what it gave cannot be read")

    redis_server.signal(signal.SIGSTOP)
    try:
        assert await shared.call(ping, timeout_s=0.1) is None
    finally:
        redis_server.signal(signal.SIGCONT)
    clock.advance(60.0)
    with pytest.raises(ValueError, match="cannot be read"):
        await shared.call(wrong)
    assert await shared.call(ping) is True
    assert not shared.down
    await shared.close()


@on_loop
async def test_who_gives_up_a_call_leaves_the_breaker_as_it_was(redis_server: RedisServer) -> None:
    shared = SharedRedis(redis_server.url, ManualClock(), timeout_s=30.0)

    async def never(client: Redis) -> None:
        await asyncio.Event().wait()

    task = asyncio.get_running_loop().create_task(shared.call(never))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not shared.down
    await shared.close()


def test_an_address_that_is_none_is_refused_without_showing_it() -> None:
    with pytest.raises(StartupError) as caught:
        SharedRedis("http://user:s3cret@x", ManualClock(), timeout_s=1.0)
    assert "s3cret" not in caught.value.message


@on_loop
async def test_a_burst_waits_for_places_and_is_answered(redis_server: RedisServer) -> None:
    shared = SharedRedis(redis_server.url, ManualClock(), timeout_s=30.0)
    assert await asyncio.gather(*(shared.call(ping) for _ in range(300))) == [True] * 300
    assert (shared.down, shared.errors) == (False, 0)
    assert len(await shared.client.client_list()) <= PLACES
    await shared.close()


@on_loop
async def test_who_finds_no_place_in_time_says_nothing_of_the_server(redis_server: RedisServer) -> None:
    shared = SharedRedis(redis_server.url, ManualClock(), timeout_s=0.05)
    done = asyncio.Event()

    async def long(client: Redis) -> bool:
        return await done.wait()

    tasks = [asyncio.ensure_future(shared.call(long, timeout_s=30.0)) for _ in range(PLACES)]
    await asyncio.sleep(0)
    assert await shared.call(ping) is None
    assert (shared.down, shared.errors) == (False, 1)
    assert await shared.call(ping, timeout_s=30.0, listens=True) is True, "needs no place"
    done.set()
    assert await asyncio.gather(*tasks) == [True] * PLACES
    assert await shared.call(ping, timeout_s=30.0) is True
    await shared.close()


@on_loop
async def test_half_a_timeout_is_no_proof_either(redis_server: RedisServer) -> None:
    shared = SharedRedis(redis_server.url, ManualClock(), timeout_s=30.0)
    done = asyncio.Event()

    async def long(client: Redis) -> bool:
        return await done.wait()

    async def never(client: Redis) -> bool:
        return await asyncio.Event().wait()

    tasks = [asyncio.ensure_future(shared.call(long)) for _ in range(PLACES)]
    await asyncio.sleep(0)
    waits = asyncio.ensure_future(shared.call(never, timeout_s=0.05))
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert await waits is None
    assert not shared.down
    await asyncio.wait(tasks)
    assert await shared.call(never, timeout_s=0.01) is None
    assert shared.down, "it had all of its time"
    await shared.close()
