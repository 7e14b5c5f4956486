"""The calls against a real Redis: who may write, that repeating changes nothing, that everything ends some day."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import msgspec

from headrace.core.request import Sampling, Told
from headrace.gateway.shared import SharedRedis
from headrace.server.log_redis import Entry, LogStore, Origin, Put, State, key_hash
from headrace.server.log_writer import packed
from redis_server import RedisServer
from server.asgi_driver import on_loop

ORIGIN = Origin(
    "o", b"d", "", True, "m", b'{"model": "m", "x": 1e9, "stream": true}', 9, 42, 1, ("id", 7), "f", "r", "POST",
    "/v1/chat/completions", "ann",
)  # fmt: skip


@contextlib.asynccontextmanager
async def stores(redis: RedisServer, count: int = 1, *, lease_s: float = 30.0) -> AsyncIterator[list[LogStore]]:
    shared = [SharedRedis(redis.url, time.monotonic, timeout_s=10.0) for _ in range(count)]
    yield [LogStore(one, f"token{number}", lease_s=lease_s) for number, one in enumerate(shared)]
    for one in shared:
        await one.close()


def put(*entries: Entry, written: int = 0, first: int = 0, hold: bool = True, origin: bool = True) -> Put:
    return Put("s", "", packed(ORIGIN) if origin else b"", written, first, hold, 60.0, entries)


def entry(position: int, state: State | None = None) -> Entry:
    return Entry(position, b"data: %d\n\n" % position, state)


async def endless(redis: RedisServer) -> Sequence[bytes]:
    """Keys that would never go."""
    shared = SharedRedis(redis.url, time.monotonic, timeout_s=10.0)
    keys = [key async for key in shared.client.scan_iter("*")]
    left = [key for key in keys if await shared.client.pttl(key) < 0]
    await shared.close()
    return left


@on_loop
async def test_what_is_written_is_read(redis_server: RedisServer) -> None:
    async with stores(redis_server) as (store,):
        state = State((1, 2), True, True, 2)
        assert await store.put([put(entry(3), entry(5, state))]) == [1]
        assert await store.entries("s", 0) == [entry(3), entry(5, state)]
        assert await store.entries("s", 3) == [entry(5, state)]
        assert await store.newest("s") == entry(5, state)
        assert await store.wait("s", 3, 0.01) == [entry(5, state)]
        assert await store.wait("s", 5, 0.01) == []
        assert await store.origin("s") == ORIGIN
        assert await store.held("s") is True
        assert await endless(redis_server) == []


@on_loop
async def test_writing_again_changes_nothing(redis_server: RedisServer) -> None:
    async with stores(redis_server) as (store,):
        for answer in (1, 2, 2):
            assert await store.put([put(entry(3), entry(5))]) == [answer]
        assert await store.put([put(entry(5), entry(6), written=3)]) == [1]
        assert await store.entries("s", 0) == [entry(3), entry(5), entry(6)]


@on_loop
async def test_only_who_has_the_lease_writes(redis_server: RedisServer) -> None:
    async with stores(redis_server, 2) as (a, b):
        assert await a.put([put(entry(3))]) == [1]
        assert await b.put([put(entry(4), written=3)]) == [0]
        assert await b.take("s") is False
        assert await a.put([put(entry(5), written=3, hold=False)]) == [1]
        assert await a.held("s") is False
        assert await b.take("s") is True
        assert await b.take("s") is False
        assert await a.put([put(entry(6), written=5)]) == [0]
        assert await b.put([put(entry(7), written=5)]) == [1]
        assert await endless(redis_server) == []


@on_loop
async def test_a_store_that_lost_what_it_had_says_so(redis_server: RedisServer) -> None:
    async with stores(redis_server) as (store,):
        assert await store.put([put(entry(3), entry(5))]) == [1]
        redis_server.stop()
        redis_server.start()
        store._shared._breaker.success()
        assert await store.put([put(entry(6), written=5)]) is None, "its connection is gone"
        store._shared._breaker.success()
        assert await store.put([put(entry(6), written=5)]) == [-1]
        assert await store.entries("s", 0) == []


@on_loop
async def test_the_front_goes_when_the_log_lets_it_go(redis_server: RedisServer) -> None:
    async with stores(redis_server) as (store,):
        await store.put([put(entry(3), entry(5), entry(9))])
        assert await store.put([put(entry(11), written=9, first=5)]) == [1]
        assert await store.entries("s", 0) == [entry(9), entry(11)]


@on_loop
async def test_a_key_leads_to_one_stream(redis_server: RedisServer) -> None:
    async with stores(redis_server, 2) as (a, b):
        hash = key_hash("o", "secret key")
        assert await a.claim(hash, "s", 60.0) == "s"
        assert await b.claim(hash, "t", 60.0) == "s"
        assert key_hash("p", "secret key") != hash
        assert key_hash("p", "") == ""
        await a.put([replace(put(entry(1)), key=hash)])
        assert await endless(redis_server) == []
        await a.drop("s", hash)
        assert await b.claim(hash, "t", 60.0) == "t"
        assert await b.origin("s") is False


@on_loop
async def test_a_key_is_there_again_with_the_next_write_and_nobody_elses_is_touched(redis_server: RedisServer) -> None:
    async with stores(redis_server, 2) as (a, b):
        hash, client = key_hash("o", "k"), a._shared.client
        assert await a.claim(hash, "s", 60.0) == "s"
        assert await a.put([replace(put(entry(1)), key=hash)]) == [1]
        await client.flushall()
        assert await a.put([replace(put(entry(1)), key=hash)]) == [1]
        assert await b.claim(hash, "t", 60.0) == "s"
        await client.set(f"headrace:stream-key:{hash}", "t", px=60_000)
        assert await a.put([replace(put(entry(2), written=1), key=hash)]) == [1]
        await a.free(hash, "s")
        await a.drop("s", hash)
        assert await b.claim(hash, "u", 60.0) == "t"
        assert await endless(redis_server) == []


@on_loop
async def test_who_was_taken_for_gone_writes_no_more_though_nobody_holds_the_lease(redis_server: RedisServer) -> None:
    async with stores(redis_server, 2, lease_s=0.05) as (a, b):
        assert await a.put([put(entry(3))]) == [1]
        await until_free(b)
        assert await b.take("s") is True
        await until_free(b)
        assert await a.put([put(entry(5), written=3)]) == [0], "between the taking and the first write"
        assert await b.put([put(entry(4), entry(5, State(end="done")), written=3, hold=False)]) == [1]
        assert await a.put([put(entry(9), written=3)]) == [0]
        assert [one.position for one in await a.entries("s", 0) or ()] == [3, 4, 5]


@on_loop
async def test_nothing_is_written_behind_an_end(redis_server: RedisServer) -> None:
    async with stores(redis_server) as (store,):
        end = Entry(4, b"", State(end="done"))
        for answer in (1, 2):
            assert await store.put([put(entry(3), end, hold=False)]) == [answer]
        assert await store.put([put(entry(5), written=3)]) == [0]
        assert await store.newest("s") == end


async def until_free(store: LogStore) -> None:
    """Nobody holds the lease any more."""
    while await store.held("s"):
        pass


@on_loop
async def test_stops_are_seen(redis_server: RedisServer) -> None:
    async with stores(redis_server, 2) as (a, b):
        assert await a.stops(["s", "t"]) == []
        assert await b.ask_stop("t", 60.0)
        assert await a.stops(["s", "t"]) == ["t"]
        assert await endless(redis_server) == []


@on_loop
async def test_names_that_are_none_of_ours_are_not_asked_for(redis_server: RedisServer) -> None:
    async with stores(redis_server) as (store,):
        for id in ("", "a/b", "a b", "{a}", "x" * 65, "ü"):
            assert await store.origin(id) is False


def test_an_origin_gives_the_request_it_was_made_of() -> None:
    told = Told("x", (1,), 1)
    ask = ORIGIN.ask("salt", told)
    assert (ask.model, ask.seed, ask.salt, ask.told, ask.options.priority, ask.options.stream) == (
        "m", 42, "salt", told, 1, True,
    )  # fmt: skip
    record, timeline = ORIGIN.record(5.0)
    assert (record.request_id, record.key, record.status, timeline.first_byte) == ("r", "ann", 200, 5.0)


def test_how_an_answer_is_drawn_goes_along_once_it_was_begun() -> None:
    origin = msgspec.structs.replace(ORIGIN, sampling=Sampling(temperature=0.2))
    kept = msgspec.msgpack.decode(packed(origin), type=Origin)
    assert kept.ask("", Told("a", None, 1)).sampling == Sampling(temperature=0.2)
    assert kept.ask("", None).sampling is None, "nothing was said, so whoever takes it begins anew"
    older = msgspec.msgpack.encode(msgspec.msgpack.decode(packed(ORIGIN))[:-1])
    assert msgspec.msgpack.decode(older, type=Origin) == ORIGIN, "a server of the release before wrote it"
