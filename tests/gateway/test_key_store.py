from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from headrace.core.errors import StartupError
from headrace.gateway.key_store import ABSENT, HASH, HIDDEN, FileKeys, KeyStore, RedisKeys
from headrace.gateway.keys import Key, Record, hash_of
from headrace.gateway.shared import SharedRedis
from headrace.testing import ManualClock
from redis_server import RedisServer
from server.asgi_driver import on_loop


def key(name: str) -> Key:
    return Key(name, Record(hash_of(name), rpm=5))


def adding(name: str) -> Callable[[dict[str, Key]], None]:
    return lambda keys: keys.update({name: key(name)})


async def keeps(store: KeyStore) -> None:
    """What both must do."""
    assert await store.version() == ABSENT
    assert await store.read() == {}
    versions = set()
    for name in ("a", "b"):
        await store.change(adding(name))
        versions.add(await store.version())
    assert await store.read() == {"a": key("a"), "b": key("b")}
    await store.change(lambda keys: keys.__delitem__("a"))
    versions.add(await store.version())
    assert await store.read() == {"b": key("b")}
    assert len(versions - {ABSENT, None}) == 3, "each change can be seen"

    def refuse(keys: dict[str, Key]) -> None:
        keys.clear()
        raise StartupError("no")

    with pytest.raises(StartupError, match="no"):
        await store.change(refuse)
    assert await store.read() == {"b": key("b")}
    await store.change(dict.clear)
    assert await store.read() == {}
    assert await store.version() != ABSENT, "there were keys once"


@on_loop
async def test_a_file_keeps_keys(tmp_path: Path) -> None:
    store = FileKeys(tmp_path / "x" / "keys.toml")
    await keeps(store)
    assert store.file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(store.file.parent) == ["keys.toml"]


@on_loop
async def test_changes_of_a_file_at_once_are_all_kept(tmp_path: Path) -> None:
    stores = [FileKeys(tmp_path / "keys.toml") for _ in range(8)]
    await asyncio.gather(*(store.change(adding(f"k{i}")) for i, store in enumerate(stores)))
    assert await stores[0].read() == {f"k{i}": key(f"k{i}") for i in range(8)}


@pytest.mark.parametrize(
    ("data", "message"), [(b"\xff", "is not UTF-8 at byte 1"), (b"[keys", "not valid TOML"), (None, "is a directory")]
)
@on_loop
async def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, data: bytes | None, message: str) -> None:
    file = tmp_path / "keys.toml"
    if data is None:
        file.mkdir()
    else:
        file.write_bytes(data)
    for work in (FileKeys(file).read(), FileKeys(file).change(adding("a"))):
        with pytest.raises(StartupError) as caught:
            await work
        assert caught.value.message.startswith(f"{file}: ")
        assert message in caught.value.message
    if data is not None:
        assert file.read_bytes() == data


@on_loop
async def test_a_place_that_cannot_be_looked_at_is_not_an_absent_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    assert await FileKeys(tmp_path / "file" / "keys.toml").version() == ABSENT
    for error, version in ((PermissionError(), HIDDEN), (OSError(), None)):

        def stat(path: Path, error: OSError = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", stat)
            assert await FileKeys(tmp_path / "keys.toml").version() == version
    with pytest.raises(StartupError, match="cannot be written"):
        await FileKeys(tmp_path / "file" / "keys.toml").change(adding("a"))


@on_loop
async def test_redis_keeps_keys(redis_server: RedisServer) -> None:
    shared = SharedRedis(redis_server.url, ManualClock(), timeout_s=30.0)
    await keeps(RedisKeys(shared))
    await shared.close()


@on_loop
async def test_in_redis_nonsense_is_nobody_s_key_and_the_others_stay(redis_server: RedisServer) -> None:
    shared = SharedRedis(redis_server.url, ManualClock(), timeout_s=30.0)
    store = RedisKeys(shared)
    await store.change(adding("a"))
    client: Redis = Redis.from_url(redis_server.url)
    await client.hset(HASH, "bad", "{}")
    await client.hset(HASH, "worse name", '{"hash": "x"}')
    await client.hset(HASH, b"\xff", b"\xff")
    assert await store.read() == {"a": key("a")}
    await client.aclose()
    await shared.close()


@on_loop
async def test_of_two_changes_in_redis_at_once_none_is_lost_without_a_word(redis_server: RedisServer) -> None:
    shared = SharedRedis(redis_server.url, ManualClock(), timeout_s=30.0)
    other = SharedRedis(redis_server.url, ManualClock(), timeout_s=30.0)
    both = await asyncio.gather(
        *(RedisKeys(each).change(adding(name)) for each, name in ((shared, "a"), (other, "b"))), return_exceptions=True
    )
    third = SharedRedis(redis_server.url, ManualClock(), timeout_s=30.0)
    kept = await RedisKeys(third).read() or {}
    assert len(kept) == sum(outcome is None for outcome in both) >= 1
    for each in (shared, other, third):
        await each.close()


@on_loop
async def test_a_redis_that_is_not_there_is_no_empty_one(make_redis: Callable[..., RedisServer]) -> None:
    store = RedisKeys(SharedRedis(make_redis().url, ManualClock(), timeout_s=1.0))
    assert await store.version() is None
    assert await store.read() is None
    with pytest.raises(StartupError, match=r"shared\.redis_url"):
        await store.change(adding("a"))


@on_loop
async def test_a_redis_that_lost_its_data_does_not_look_as_before(redis_server: RedisServer) -> None:
    shared = SharedRedis(redis_server.url, ManualClock(), timeout_s=30.0)
    store, versions = RedisKeys(shared), set()
    for name in ("a", "b", "c"):
        await store.change(adding(name))
        versions.add(await store.version())
        await shared.client.flushall()
    assert len(versions - {None}) == 3
    await shared.close()
