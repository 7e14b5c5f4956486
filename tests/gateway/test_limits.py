"""In this process with time by hand; against a real Redis with its own clock, where a minute is longer than a test."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from headrace.core.clock import Clock
from headrace.core.errors import RateLimited
from headrace.gateway.buckets import MOST, Allowance
from headrace.gateway.limits import PREFIX, Limiter, Slot
from headrace.gateway.shared import SharedRedis
from headrace.testing import ManualClock
from redis_server import RedisServer
from server.asgi_driver import on_loop, settle
from server.socket_client import until
from virtual_time import run

IDS = itertools.count()


def new_id() -> str:
    return f"place-{next(IDS)}"


async def tries(limiter: Limiter, allowance: Allowance, count: int, *, tokens: int = 1, name: str = "k") -> list[Slot]:
    """Those of `count` requests at once that were let in."""

    async def one() -> Slot | None:
        try:
            return await limiter.take(name, allowance, tokens)
        except RateLimited:
            return None

    return [slot for slot in await asyncio.gather(*(one() for _ in range(count))) if slot is not None]


# --- in this process


@on_loop
async def test_refusals_say_which_limit_and_when_to_come_again() -> None:
    clock = ManualClock()
    limiter = Limiter(clock, new_id)
    allowance = Allowance(requests=2, tokens=600, streams=1)
    slot = await limiter.take("k", allowance, 600)
    with pytest.raises(RateLimited) as caught:
        await limiter.take("k", allowance, 25)
    assert (caught.value.limit, caught.value.retry_after) == ("tokens", 3), "2.5 s, in whole ones"
    assert caught.value.message == (
        "this key may have 600 tokens a minute, prompts and answers together, and they are used up; try again in 3 s"
    )
    clock.advance(3.0)
    with pytest.raises(RateLimited) as caught:
        await limiter.take("k", allowance, 25)
    assert (caught.value.limit, caught.value.retry_after) == ("streams", 1)
    slot.close(600)
    slot.close(10**6)
    assert limiter.running("k") == 0
    await limiter.take("k", allowance, 25)
    with pytest.raises(RateLimited) as caught:
        await limiter.take("k", allowance, 1)
    assert (caught.value.limit, caught.value.retry_after) == ("requests", 27)
    assert "may have 2 requests a minute" in caught.value.message
    await limiter.close()


@on_loop
async def test_after_what_it_said_it_lets_in() -> None:
    clock = ManualClock()
    limiter, allowance = Limiter(clock, new_id), Allowance(requests=7)
    assert len(await tries(limiter, allowance, 50)) == 7
    for _ in range(20):
        with pytest.raises(RateLimited) as caught:
            await limiter.take("k", allowance, 1)
        clock.advance(float(caught.value.retry_after))
        await limiter.take("k", allowance, 1)


@on_loop
async def test_a_key_without_limits_is_not_counted() -> None:
    limiter = Limiter(ManualClock(), new_id)
    slot = await limiter.take("k", Allowance(), 10**9)
    slot.close(1)
    assert limiter.running("k") == 0


# --- shared


class Leaping:
    """The real clock, as Redis has it too; and it can be set forward."""

    def __init__(self) -> None:
        self.by = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.by

    def advance(self, seconds: float) -> None:
        self.by += seconds


def shared_limiter(server: RedisServer, clock: Clock, *, timeout_s: float = 30.0, lease_s: float = 30.0) -> Limiter:
    return Limiter(clock, new_id, shared=SharedRedis(server.url, clock, timeout_s=timeout_s), lease_s=lease_s)


async def end(*limiters: Limiter) -> None:
    for limiter in limiters:
        await limiter.close()
        assert limiter._shared is not None
        await limiter._shared.close()


@on_loop
async def test_two_servers_together_let_in_exactly_what_fits(redis_server: RedisServer) -> None:
    one, two = (shared_limiter(redis_server, ManualClock()) for _ in range(2))
    for allowance, tokens, fits in (
        (Allowance(requests=20), 1, 20),
        (Allowance(tokens=100), 10, 10),
        (Allowance(streams=7), 1, 7),
        (Allowance(requests=9, tokens=1000, streams=30), 100, 9),
    ):
        both = [one, two] * 60
        answers = await asyncio.gather(*(tries(each, allowance, 1, tokens=tokens, name=f"k{fits}") for each in both))
        got = sum(map(len, answers))
        # A trickle may have come while they asked.
        assert fits <= got <= fits + 1
        assert any(answers[0::2])
        assert any(answers[1::2])
    await end(one, two)


@on_loop
async def test_what_comes_back_is_there_for_the_other_server(redis_server: RedisServer) -> None:
    one, two = (shared_limiter(redis_server, ManualClock()) for _ in range(2))
    allowance = Allowance(tokens=60, streams=1)
    slot = await one.take("k", allowance, 60)
    with pytest.raises(RateLimited) as caught:
        await two.take("k", allowance, 60)
    assert caught.value.limit == "tokens"
    assert 58 <= caught.value.retry_after <= 60
    slot.close(0)
    assert one._telling is not None
    await one._telling
    slot = await two.take("k", allowance, 1)
    with pytest.raises(RateLimited) as caught:
        await one.take("k", allowance, 1)
    assert caught.value.limit == "streams"
    slot.close(600)
    assert two._telling is not None
    await two._telling
    with pytest.raises(RateLimited) as caught:
        await one.take("k", allowance, 60)
    assert 595 <= caught.value.retry_after <= 600, "what was really taken is owed"
    await end(one, two)


@on_loop
async def test_keys_vanish_from_redis_when_they_say_nothing_any_more(redis_server: RedisServer) -> None:
    limiter = shared_limiter(redis_server, ManualClock())
    client: Redis = Redis.from_url(redis_server.url)
    await limiter.take("k", Allowance(requests=MOST, tokens=MOST, streams=2), MOST)
    key = f"{PREFIX}{{k}}"
    assert set(await client.keys("*")) == {key.encode(), f"{key}:places".encode()}
    assert 55_000 < await client.pttl(key) <= 61_000
    assert 25_000 < await client.pttl(f"{key}:places") <= 30_000
    assert await client.hget(key, "t") == b"0", "whole numbers, also the largest"
    await client.aclose()
    await end(limiter)


@on_loop
async def test_a_key_that_was_not_limited_so_far_owes_nothing(redis_server: RedisServer) -> None:
    limiter = shared_limiter(redis_server, ManualClock())
    for _ in range(20):
        await limiter.take("k", Allowance(tokens=1000), 1)
    with pytest.raises(RateLimited) as caught:
        await limiter.take("k", Allowance(requests=60, tokens=1000), 1)
    assert caught.value.retry_after == 1
    await end(limiter)


@on_loop
async def test_the_place_of_a_server_that_died_is_free_after_its_lease(redis_server: RedisServer) -> None:
    dead, alive = shared_limiter(redis_server, ManualClock(), lease_s=0.3), shared_limiter(redis_server, ManualClock())
    allowance = Allowance(streams=1)
    await dead.take("k", allowance, 1)
    assert dead._renewing is not None
    dead._renewing.cancel()
    with pytest.raises(RateLimited):
        await alive.take("k", allowance, 1)
    async with asyncio.timeout(30):
        while not await tries(alive, allowance, 1):
            pass  # by Redis's own clock; each try is a round trip
    await end(dead, alive)


@on_loop
async def test_the_place_of_a_long_answer_stays_its_own(redis_server: RedisServer) -> None:
    one, two = shared_limiter(redis_server, ManualClock(), lease_s=0.6), shared_limiter(redis_server, ManualClock())
    allowance = Allowance(streams=1)
    slot = await one.take("k", allowance, 1)
    client: Redis = Redis.from_url(redis_server.url)
    places = f"{PREFIX}{{k}}:places"
    first = float(await client.zscore(places, slot.place) or 0.0)
    async with asyncio.timeout(30):
        while float(await client.zscore(places, slot.place) or 0.0) <= first:
            pass
    with pytest.raises(RateLimited):
        await two.take("k", allowance, 1)
    await client.delete(places)  # as if Redis had started anew
    async with asyncio.timeout(30):
        while not await client.zscore(places, slot.place):
            pass
    await client.aclose()
    await end(one, two)


@on_loop
async def test_a_clock_of_redis_that_went_back_locks_nobody_out(redis_server: RedisServer) -> None:
    limiter = shared_limiter(redis_server, ManualClock())
    client: Redis = Redis.from_url(redis_server.url)
    seconds, _ = await client.time()
    allowance, ahead = Allowance(requests=6000, tokens=600_000), (seconds + 3600) * 1_000_000
    await limiter.take("k", allowance, 1)
    await client.hset(f"{PREFIX}{{k}}", mapping={"at": ahead, "r": 0})
    await client.persist(f"{PREFIX}{{k}}")
    with pytest.raises(RateLimited):
        await limiter.take("k", allowance, 1)
    assert int(await client.hget(f"{PREFIX}{{k}}", "at") or 0) < ahead
    async with asyncio.timeout(30):
        while not await tries(limiter, allowance, 1):  # noqa: ASYNC110 - Redis's own clock
            await asyncio.sleep(0.01)
    await client.zadd(f"{PREFIX}{{p}}:places", {"of the dead": ahead + 30_000_000})
    assert len(await tries(limiter, Allowance(streams=1), 2, name="p")) == 1, "no lease is that long"
    assert await client.zcard(f"{PREFIX}{{p}}:places") == 1
    await client.aclose()
    await end(limiter)


@pytest.mark.parametrize("fault", ["dead", "frozen", "slow", "full"])
def test_without_redis_requests_go_on_within_the_limits(fault: str, make_redis: Callable[..., RedisServer]) -> None:
    server = make_redis("--maxmemory-policy", "noeviction")
    server.start()

    @on_loop
    async def check() -> None:
        clock = Leaping()
        limiter = shared_limiter(server, clock, timeout_s=0.2)
        shared = limiter._shared
        assert shared is not None
        allowance = Allowance(requests=10, streams=8)
        before = await tries(limiter, allowance, 4)
        assert len(before) == 4
        if fault == "dead":
            server.stop()
        elif fault == "frozen":
            server.signal(signal.SIGSTOP)
        else:
            client: Redis = Redis.from_url(server.url)
            if fault == "slow":
                await client.execute_command("CLIENT", "PAUSE", "60000", "WRITE")  # type: ignore[no-untyped-call]
            else:
                await client.config_set("maxmemory", "1")
            await client.aclose()
        try:
            assert len(await tries(limiter, allowance, 9)) == 4, "8 places, 4 of them were taken before"
            assert shared.down
            errors = shared.errors
            for slot in before:
                slot.close(1)
            assert len(await tries(limiter, allowance, 9)) == 2, "10 requests, 8 of them are gone"
            assert shared.errors == errors, "it costs one timeout, not one a request"
            late = clock() + 1.0
            await until(lambda: clock() > late)  # what the frozen one has not read yet nobody waits for any more
        finally:
            if fault == "dead":
                server.start()
            elif fault == "frozen":
                server.signal(signal.SIGCONT)
            else:
                client = Redis.from_url(server.url)
                if fault == "slow":
                    await client.execute_command("CLIENT", "UNPAUSE")  # type: ignore[no-untyped-call]
                else:
                    await client.config_set("maxmemory", "0")
                await client.aclose()
        clock.advance(60.0)
        await settle()
        # A first call may find a connection that is none any more; then the next trial is due later.
        async with asyncio.timeout(30):
            while shared.down:
                await tries(limiter, Allowance(requests=1000), 1, name="other")
                clock.advance(60.0)
        assert len(await tries(limiter, Allowance(requests=1000), 3)) == 3
        assert not shared.down
        await end(limiter)

    check()


@on_loop
async def test_who_leaves_while_redis_thinks_takes_no_place(redis_server: RedisServer) -> None:
    limiter, allowance = shared_limiter(redis_server, ManualClock()), Allowance(streams=1)
    task = asyncio.get_running_loop().create_task(limiter.take("k", allowance, 1))
    await settle(3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: limiter._telling is not None and limiter._telling.done())
    slot = await limiter.take("k", allowance, 1)
    slot.close(0)
    await end(limiter)


PROCESS = """
import asyncio, itertools, sys, time
from headrace.core.errors import RateLimited
from headrace.gateway.buckets import Allowance
from headrace.gateway.limits import Limiter
from headrace.gateway.shared import SharedRedis

async def main(url, name):
    ids = itertools.count()
    shared = SharedRedis(url, time.monotonic, timeout_s=30)
    limiter = Limiter(time.monotonic, lambda: f"{name}-{next(ids)}", shared=shared)
    async def one():
        try:
            await limiter.take("k", Allowance(streams=40), 1)
        except RateLimited:
            return 0
        return 1
    sys.stdin.readline()
    print(sum(await asyncio.gather(*(one() for _ in range(60)))), flush=True)
    sys.stdin.readline()

asyncio.run(main(*sys.argv[1:]))
"""


def test_processes_together_let_in_exactly_what_fits(redis_server: RedisServer) -> None:
    source = str(Path(__file__).parents[2] / "src")
    with_path = [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r})\n{PROCESS}", redis_server.url]
    processes = [
        subprocess.Popen([*with_path, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in ("a", "b", "c")
    ]
    got = []
    for order in range(2):
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        if order == 0:
            got = [int(process.stdout.readline()) for process in processes if process.stdout is not None]
    for process in processes:
        process.communicate(timeout=60)
    assert sum(got) == 40


def test_in_virtual_time_an_hour_of_requests_is_what_the_limit_says() -> None:
    async def hour() -> int:
        loop = asyncio.get_running_loop()
        limiter, allowance, count = Limiter(loop.time, new_id), Allowance(requests=30), 0
        while loop.time() <= 3600:
            try:
                await limiter.take("k", allowance, 1)
                count += 1
            except RateLimited as error:
                await asyncio.sleep(error.retry_after)
        return count

    assert run(hour()) == 30 + 30 * 60
