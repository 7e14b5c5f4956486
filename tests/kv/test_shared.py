"""Against a real Redis. Time is by hand; only the client's own timeout is real."""

from __future__ import annotations

import random
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import redis

from headrace.core.errors import StartupError
from headrace.kv.blob import Block, blocks, fingerprint, pack
from headrace.kv.disk import Disk
from headrace.kv.shared import Shared
from headrace.kv.store import Store
from headrace.testing import ManualClock
from redis_server import RedisServer, free_port

ENGINE = fingerprint("x")
KV = random.Random(7).randbytes(50_000)
PATIENT, HASTY = 30.0, 0.3
"""Timeouts for servers that answer and for those that shall not."""


def block(i: int) -> Block:
    return blocks(ENGINE, "", [i] * 256)[0]


def client(url: str, clock: ManualClock | None = None, *, timeout: float = PATIENT, spread: float = 0.5) -> Shared:
    return Shared(url, ENGINE, clock or ManualClock(), timeout=timeout, ttl=1000.0, random=lambda: spread)


def raw(server: RedisServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, protocol=2)


# --- a server that answers


def test_what_one_writes_another_reads(redis_server: RedisServer) -> None:
    one, other = client(redis_server.url), client(redis_server.url)
    assert one.put(block(1), KV) > len(KV)
    assert other.get(block(1).key) == (block(1), KV)
    assert other.get(block(2).key) is None
    assert (other.errors, other.damaged, other.down, other.willing) == (0, 0, False, True)
    assert raw(redis_server).keys() == [f"headrace:kv:{ENGINE.hex()}:{block(1).key.hex()}".encode()]
    one.close()
    other.close()


def test_entries_do_not_all_expire_together(redis_server: RedisServer) -> None:
    left = []
    for i, spread in enumerate((0.0, 0.5, 0.999)):
        shared = client(redis_server.url, spread=spread)
        shared.put(block(i), KV)
        shared.close()
        left.append(raw(redis_server).pttl(f"headrace:kv:{ENGINE.hex()}:{block(i).key.hex()}"))
    for milliseconds, most in zip(left, (900_000, 1_000_000, 1_099_800), strict=True):
        assert isinstance(milliseconds, int)
        assert most - PATIENT * 1000 < milliseconds <= most


@pytest.mark.parametrize("garbage", [b"", b"?", KV], ids=["empty", "a byte", "noise"])
def test_garbage_counts_once_and_is_removed(redis_server: RedisServer, garbage: bytes) -> None:
    shared = client(redis_server.url)
    name = f"headrace:kv:{ENGINE.hex()}:{block(1).key.hex()}"
    raw(redis_server).set(name, garbage)
    assert [shared.get(block(1).key) for _ in range(3)] == [None] * 3
    assert (shared.damaged, shared.errors) == (1, 0)
    assert not raw(redis_server).exists(name)
    shared.close()


def test_an_entry_of_another_type_is_no_harm(redis_server: RedisServer) -> None:
    shared = client(redis_server.url)
    raw(redis_server).lpush(f"headrace:kv:{ENGINE.hex()}:{block(1).key.hex()}", "x")
    assert shared.get(block(1).key) is None
    shared.close()


# --- one that does not


def test_nobody_there(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    shared = client(f"redis://:hunter2@127.0.0.1:{free_port()}", clock)
    assert [shared.get(block(1).key) for _ in range(50)] == [None] * 50
    assert [shared.put(block(1), KV) for _ in range(50)] == [0] * 50
    assert (shared.errors, shared.down, shared.willing) == (1, True, False), "asked once"
    for _ in range(600):  # a minute
        clock.advance(0.1)
        shared.get(block(1).key)
    assert shared.errors == 7, "after 0.5, 1, 2, 4, 8, 16 and 30 s"
    lines = [record.getMessage() for record in caplog.records if record.name == "headrace.kv.shared"]
    assert 1 < len(lines) <= 7
    assert not any("hunter2" in line or "127.0.0.1" in line for line in lines)
    shared.close()


def test_killed_in_the_middle_and_back(redis_server: RedisServer) -> None:
    clock = ManualClock()
    shared = client(redis_server.url, clock)
    shared.put(block(1), KV)
    redis_server.stop()
    assert [shared.get(block(1).key) for _ in range(20)] == [None] * 20
    assert (shared.errors, shared.down) == (1, True)
    clock.advance(20.0)
    shared.get(block(1).key)
    assert shared.errors == 2
    redis_server.start()
    clock.advance(30.0)
    assert shared.put(block(1), KV) > 0
    assert shared.get(block(1).key) == (block(1), KV)
    assert not shared.down
    shared.close()


def test_frozen_costs_one_timeout(redis_server: RedisServer) -> None:
    clock = ManualClock()
    shared = client(redis_server.url, clock, timeout=HASTY)
    redis_server.signal(signal.SIGSTOP)
    assert [shared.get(block(1).key) for _ in range(1000)] == [None] * 1000
    assert shared.errors == 1, "a thousand timeouts would take five minutes"
    redis_server.signal(signal.SIGCONT)
    shared.close()
    patient = client(redis_server.url, clock)
    assert patient.put(block(1), KV) > 0
    patient.close()


def test_a_wrong_password(make_redis: Callable[..., RedisServer], caplog: pytest.LogCaptureFixture) -> None:
    server = make_redis("--requirepass", "right")
    server.start()
    for url in (server.url, server.url.replace("//", "//:wrong@")):
        shared = client(url)
        assert [shared.get(block(1).key) for _ in range(20)] == [None] * 20
        assert (shared.errors, shared.down) == (1, True)
        shared.close()
    assert len(caplog.records) == 2
    assert "wrong" not in caplog.text
    shared = client(server.url.replace("//", "//:right@"))
    assert shared.put(block(1), KV) > 0
    shared.close()


def test_no_memory_left(make_redis: Callable[..., RedisServer]) -> None:
    server = make_redis("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    server.start()
    clock = ManualClock()
    shared = client(server.url, clock)
    written = [shared.put(block(i), KV) > 0 for i in range(200)]
    full = written.index(False)
    assert full > 5
    assert not any(written[full:])
    assert shared.errors == 1, "it is not asked again at once"
    assert shared.get(block(0).key) == (block(0), KV), "what is there can be read"
    assert not shared.down
    raw(server).flushall()
    clock.advance(10.0)
    assert shared.put(block(7), KV) > 0
    shared.close()


def test_something_else_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        shared = client(f"redis://127.0.0.1:{listener.getsockname()[1]}")
        assert [shared.get(block(1).key) for _ in range(5)] == [None] * 5
        assert shared.errors == 1
        thread.join()
        shared.close()


@pytest.mark.parametrize("url", ["http://x", "localhost:6379", "redis://x:port", "?"])
def test_an_address_of_something_else_is_refused_at_start(url: str) -> None:
    with pytest.raises(StartupError, match=r"tiers\.redis_url") as refused:
        client(url)
    assert url not in refused.value.message


# --- behind a store


def kv(b: Block) -> bytes:
    return b"".join(pack([i]) * 5 for i in range(b.start, b.end))


def fetched(store: Store, keys: tuple[bytes, ...]) -> Mapping[bytes, bytes]:
    over, got = threading.Event(), dict[bytes, bytes]()

    def done(found: Mapping[bytes, bytes]) -> None:
        got.update(found)
        over.set()

    store.fetch(keys, done)
    assert over.wait(PATIENT)
    return got


def started(engine: bytes, shared: Shared) -> Store:
    store = Store(engine, 10**6, ManualClock(), shared=shared)
    store.start()
    return store


def test_two_servers_share_full_blocks(redis_server: RedisServer) -> None:
    tokens = list(range(700))
    one = started(ENGINE, client(redis_server.url))
    for new in one.missing(tokens, "tenant"):
        one.put(new, kv(new))
    assert one.flush(PATIENT)
    one.close(PATIENT)
    assert one.stats.redis_written > 0
    other = started(ENGINE, client(redis_server.url))
    assert fetched(other, other.beyond(tokens, "", other.match(tokens))) == {}, "another tenant"
    keys = other.beyond(tokens, "tenant", other.match(tokens, "tenant"))
    assert len(keys) == 2, "the third is not full"
    assert len(fetched(other, keys)) == 2
    hit = other.match(tokens, "tenant")
    assert hit.length == 512
    assert [other.get(part.block.key) for part in hit.parts] == [kv(part.block) for part in hit.parts]
    assert other.beyond(tokens, "tenant", hit) == ()
    assert (other.stats.redis_hits, other.stats.redis_misses) == (2, 1)
    other.close(PATIENT)
    changed = fingerprint("other weights")
    stranger = started(changed, Shared(redis_server.url, changed, ManualClock(), timeout=9, ttl=9, random=lambda: 0.5))
    assert fetched(stranger, stranger.beyond(tokens, "tenant", stranger.match(tokens))) == {}
    stranger.close(PATIENT)


def test_a_tenant_gets_its_own_chain_behind_what_is_public(redis_server: RedisServer) -> None:
    template, tokens = list(range(300)), list(range(300)) + list(range(5000, 5700))
    one = started(ENGINE, client(redis_server.url))
    for new in one.missing(tokens, "tenant"):
        one.put(new, kv(new))
    assert one.flush(PATIENT)
    one.close(PATIENT)
    other = started(ENGINE, client(redis_server.url))
    common = other.missing(template)
    for new in common:
        other.put(new, kv(new))
    assert other.flush(PATIENT)
    other.pin([new.key for new in common], public=300)
    hit = other.match(tokens, "tenant")
    assert hit.length == 300
    keys = other.beyond(tokens, "tenant", hit)
    assert keys == tuple(b.key for b in blocks(ENGINE, "tenant", tokens) if b.full)
    assert len(fetched(other, keys)) == 3
    hit = other.match(tokens, "tenant")
    assert hit.length == 768
    assert other.beyond(tokens, "tenant", hit) == ()
    other.close(PATIENT)


def test_behind_what_is_public_the_own_chain_is_got_from_the_disk_too(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    template, tokens = list(range(600)), list(range(600)) + list(range(5000, 5400))
    own = [b for b in blocks(ENGINE, "tenant", tokens) if b.full]
    there = client(redis_server.url)
    for block_ in own:
        there.put(block_, kv(block_))
    there.close()
    disk = Disk(tmp_path, 10**6, ENGINE)
    disk.open()
    disk.write(own[0], kv(own[0]), lambda _key: False)
    store = Store(ENGINE, 10**6, ManualClock(), disk=Disk(tmp_path, 10**6, ENGINE), shared=client(redis_server.url))
    store.start()
    assert store.opened(PATIENT)
    common = store.missing(template)
    for new in common:
        store.put(new, kv(new))
    store.pin([new.key for new in common], public=600)
    hit = store.match(tokens, "tenant")
    assert (hit.length, hit.cold) == (600, ())
    keys = store.beyond(tokens, "tenant", hit)
    assert keys == tuple(b.key for b in own)
    assert len(fetched(store, keys)) == len(own)
    hit = store.match(tokens, "tenant")
    assert (hit.length, hit.cold) == (768, ())
    store.close(PATIENT)


def test_a_store_with_a_dead_server_is_one_without(redis_server: RedisServer) -> None:
    redis_server.stop()
    store = started(ENGINE, client(redis_server.url))
    tokens = list(range(300))
    keys = store.beyond(tokens, "", store.match(tokens))
    assert fetched(store, keys) == {}
    assert store.beyond(tokens, "", store.match(tokens)) == (), "nobody waits for it any more"
    for new in store.missing(tokens):
        assert store.put(new, kv(new))
    assert store.match(tokens).length == 300
    assert store.flush(PATIENT)
    assert (store.stats.redis_down, store.stats.redis_errors) == (True, 1)
    store.close(PATIENT)
