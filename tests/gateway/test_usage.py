from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import threading
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from headrace.gateway.shared import SharedRedis
from headrace.gateway.usage import (
    CHUNK,
    FIGURES,
    FLUSH_S,
    MOST_TOKENS,
    Batch,
    FileUsage,
    RedisUsage,
    Rows,
    Usage,
    UsageStore,
)
from headrace.observe.record import OUTCOMES
from headrace.testing import ManualClock
from redis_server import RedisServer
from server.asgi_driver import on_loop
from server.socket_client import until
from virtual_time import run

DAY = date(2027, 1, 15)
NEXT = DAY + timedelta(days=1)
IDS = itertools.count()


class Wall:
    """Noon, until moved."""

    def __init__(self) -> None:
        self.at = datetime(2027, 1, 15, 12, tzinfo=UTC).timestamp()

    def __call__(self) -> float:
        return self.at


def books(store: UsageStore, wall: Wall | None = None, *, days: int = 10) -> Usage:
    return Usage(store, wall or Wall(), lambda: f"{os.getpid()}-{next(IDS)}", days=days)


def row(key: str, model: str, day: date = DAY, **figures: Any) -> dict[str, Any]:
    return {"day": day.isoformat(), "key": key, "model": model, **dict.fromkeys(FIGURES, 0), **figures}


async def rows(usage: Usage, first: date = DAY, last: date = NEXT, key: str | None = None) -> list[dict[str, Any]]:
    table = await usage.table(first, last, key)
    assert table.complete
    return table.rows


async def keeps(store: UsageStore) -> None:
    """What both must do."""
    wall = Wall()
    one, two = books(store, wall), books(store, wall)
    one.book("a", "m", "ok", 10, 4, 3)
    two.book("a", "m", "cancelled", 5, 0, 1)
    one.book("a", "n", "limited")
    two.book("b", "m", "error", 1, 1, 1)
    assert await two.flush()
    assert await one.flush()
    wall.at += 86_400.0
    one.book("a", "m", "invalid")
    assert await one.flush()
    both: dict[str, Any] = {"prompt_tokens": 15, "cached_tokens": 4, "completion_tokens": 4}
    expected = [
        row("a", "m", requests=2, ok=1, cancelled=1, **both),
        row("a", "n", limited=1),
        row("b", "m", requests=1, error=1, prompt_tokens=1, cached_tokens=1, completion_tokens=1),
        row("a", "m", NEXT, requests=1, invalid=1),
    ]
    assert await rows(one) == expected
    assert await rows(books(store, wall)) == expected, "after a restart"
    assert await rows(one, NEXT) == expected[3:]
    assert await rows(one, key="b") == [expected[2]]
    assert await rows(one, key="none") == []
    assert await rows(one, date(2026, 1, 1), date(2026, 1, 2)) == []
    for usage in (one, two):
        await usage.close()


@on_loop
async def test_a_folder_keeps_it(tmp_path: Path) -> None:
    await keeps(FileUsage(tmp_path / "x"))
    assert sorted(os.listdir(tmp_path / "x")) == ["2027-01-15.json", "2027-01-16.json"]
    assert (tmp_path / "x" / "2027-01-15.json").stat().st_mode & 0o777 == 0o600


@on_loop
async def test_redis_keeps_it(redis_server: RedisServer) -> None:
    shared = SharedRedis(redis_server.url, ManualClock(), timeout_s=30.0)
    await keeps(RedisUsage(shared, 10))
    client: Redis = Redis.from_url(redis_server.url)
    assert 86_400 < await client.ttl("headrace:usage:{2027-01-15}") <= 11 * 86_400
    await client.aclose()
    await shared.close()


@on_loop
async def test_redis_adds_a_batch_once_however_often_it_is_sent(redis_server: RedisServer) -> None:
    shared = SharedRedis(redis_server.url, ManualClock(), timeout_s=30.0)
    store = RedisUsage(shared, 10)
    figures = [1] + [0] * (len(FIGURES) - 1)
    for id in ("x", "x", "y", "x"):
        assert await store.add(Batch(id, DAY, {("a", "m"): figures}))
    assert await store.read(DAY) == {("a", "m"): [2, *figures[1:]]}
    await shared.close()


@on_loop
async def test_redis_adds_nothing_of_a_batch_that_failed_and_all_of_it_later(redis_server: RedisServer) -> None:
    shared = SharedRedis(redis_server.url, clock := ManualClock(), timeout_s=30.0)
    store, figures = RedisUsage(shared, 10), [2] + [0] * (len(FIGURES) - 1)
    batch, day = Batch("x", DAY, {("a", "m"): figures}), "headrace:usage:{2027-01-15}"
    await shared.client.set(day, "somebody else's")
    assert not await store.add(batch)
    await shared.client.delete(day)
    clock.advance(60.0)
    assert await store.add(batch)
    assert await store.read(DAY) == {("a", "m"): figures}
    await shared.close()


@on_loop
async def test_in_redis_a_figure_that_is_none_is_left_alone_and_the_others_are_added_once(
    redis_server: RedisServer,
) -> None:
    shared = SharedRedis(redis_server.url, ManualClock(), timeout_s=30.0)
    store, day = RedisUsage(shared, 10), "headrace:usage:{2027-01-15}"
    await shared.client.hset(day, mapping={'["a","m","ok"]': "x", "nonsense": 1, '["b","m","ok"]': 2**63 - 1})
    for _ in range(3):
        assert await store.add(Batch("x", DAY, {(key, "m"): [1] * len(FIGURES) for key in "abc"}))
    found = await store.read(DAY) or {}
    assert found["c", "m"] == [1] * len(FIGURES)
    assert found["a", "m"] == [1, 0] + [1] * (len(FIGURES) - 2)
    assert found["b", "m"] == [1, 2**63 - 1] + [1] * (len(FIGURES) - 2)
    await shared.close()


@on_loop
async def test_figures_stay_within_what_redis_can_add(redis_server: RedisServer) -> None:
    shared = SharedRedis(redis_server.url, ManualClock(), timeout_s=30.0)
    usage = books(RedisUsage(shared, 10))
    usage.book("a", "m", "ok", 10**30, -5, 7)
    assert await rows(usage) == [row("a", "m", requests=1, ok=1, prompt_tokens=MOST_TOKENS, completion_tokens=7)]
    await usage.close()
    await shared.close()


class Failing(FileUsage):
    """Does what it is told until it is told not to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.works = True
        self.ids: list[str] = []

    async def add(self, batch: Batch) -> bool:
        self.ids.append(batch.id)
        return self.works and await super().add(batch)

    async def read(self, day: date) -> Rows | None:
        return await super().read(day) if self.works else None


@on_loop
async def test_what_could_not_be_kept_is_tried_again_under_the_same_id(tmp_path: Path) -> None:
    store = Failing(tmp_path)
    usage = books(store)
    usage.book("a", "m", "ok", 10, 0, 1)
    store.works = False
    assert not await usage.flush()
    usage.book("a", "m", "ok", 20, 0, 2)
    table = await usage.table(DAY, DAY)
    assert not table.complete
    assert table.rows == [row("a", "m", requests=2, ok=2, prompt_tokens=30, completion_tokens=3)], "what is known"
    store.works = True
    usage.book("a", "m", "ok", 40, 0, 4)
    assert await rows(usage) == [row("a", "m", requests=3, ok=3, prompt_tokens=70, completion_tokens=7)]
    assert len(set(store.ids)) == 3
    assert store.ids[0] == store.ids[1]
    await usage.close()


@on_loop
async def test_many_rows_go_in_pieces(tmp_path: Path) -> None:
    store = Failing(tmp_path)
    usage = books(store)
    for number in range(CHUNK + 1):
        usage.book(f"k{number}", "m", "ok")
    assert len(await rows(usage)) == CHUNK + 1
    assert len(store.ids) == 2
    await usage.close()


def test_it_is_kept_by_itself_off_the_path_and_again_if_that_failed(tmp_path: Path) -> None:
    async def check() -> None:
        store, loop = Failing(tmp_path), asyncio.get_running_loop()
        store.works = False
        usage = books(store)
        usage.book("a", "m", "ok")
        assert store.ids == []
        await asyncio.sleep(FLUSH_S + 0.001)
        assert len(store.ids) == 1
        await asyncio.sleep(FLUSH_S)
        assert len(store.ids) == 2
        await asyncio.sleep(10 * FLUSH_S)
        assert len(store.ids) == 12
        usage._store = _Taking()
        await asyncio.sleep(FLUSH_S)
        assert not usage._sealed
        assert usage._timer is None, "nothing to do, nothing is due"
        assert loop.time() < 200
        await usage.close()

    run(check())


class _Taking:
    """In memory, because a virtual loop does not wait for threads."""

    def __init__(self) -> None:
        self.forgot: list[date] = []

    async def add(self, batch: Batch) -> bool:
        return True

    async def read(self, day: date) -> Rows | None:
        return {}

    async def forget(self, before: date) -> None:
        self.forgot.append(before)


@on_loop
async def test_old_days_are_forgotten(tmp_path: Path) -> None:
    for name in ("2027-01-04.json", "2027-01-05.json", "notes.json"):
        (tmp_path / name).write_text("[]")
    usage = books(FileUsage(tmp_path), days=10)
    usage.book("a", "m", "ok")
    await usage.close()
    assert sorted(os.listdir(tmp_path)) == ["2027-01-05.json", "2027-01-15.json", "notes.json"]


@on_loop
async def test_a_file_that_is_damaged_is_put_aside_and_counting_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "2027-01-15.json"
    file.write_text("[[")
    usage = books(FileUsage(tmp_path))
    assert not (await usage.table(DAY, DAY)).complete
    usage.book("a", "m", "ok")
    with caplog.at_level(logging.WARNING, "headrace"):
        assert await rows(usage) == [row("a", "m", requests=1, ok=1)]
    assert "cannot be read" in caplog.text
    assert file.with_suffix(".unreadable").read_text() == "[["
    file.write_text("[[[")
    usage.book("a", "m", "ok")
    assert await rows(usage) == [row("a", "m", requests=1, ok=1)]
    assert file.with_suffix(".unreadable").read_text() == "[[", "the first one is there still"
    assert file.with_suffix(".unreadable-2").read_text() == "[[["
    await usage.close()


@on_loop
async def test_a_file_that_cannot_be_read_for_a_moment_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = books(FileUsage(tmp_path))
    usage.book("a", "m", "ok")
    assert await usage.flush()
    usage.book("a", "m", "ok")

    def busy(path: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", busy)
        assert not await usage.flush()
        assert not (await usage.table(DAY, DAY)).complete
    assert os.listdir(tmp_path) == ["2027-01-15.json"]
    assert await rows(usage) == [row("a", "m", requests=2, ok=2)]
    await usage.close()


@on_loop
async def test_who_gives_up_a_flush_does_not_have_it_done_twice(tmp_path: Path) -> None:
    store = _Slow(tmp_path)
    usage = books(store)
    usage.book("a", "m", "ok")
    task = asyncio.ensure_future(usage.table(DAY, DAY))
    await until(store.began.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    store.go.set()
    assert await rows(usage) == [row("a", "m", requests=1, ok=1)]
    await usage.close()


class _Slow(FileUsage):
    """Its thread waits to be let on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.began, self.go = threading.Event(), threading.Event()

    def _add(self, batch: Batch) -> None:
        self.began.set()
        assert self.go.wait(30.0)
        super()._add(batch)


@on_loop
async def test_a_clock_that_leaps_ahead_for_a_while_makes_nobody_forget(tmp_path: Path) -> None:
    wall = Wall()
    usage = books(FileUsage(tmp_path), wall)
    for ahead in (0, 40, 41, 0, 40, 0):
        wall.at += ahead * 86_400.0
        usage.book("a", "m", "ok")
        assert await usage.flush()
        wall.at -= ahead * 86_400.0
    assert sorted(os.listdir(tmp_path)) == ["2027-01-15.json", "2027-02-24.json", "2027-02-25.json"]
    assert await rows(usage) == [row("a", "m", requests=3, ok=3)]
    await usage.close()


def test_a_clock_that_stays_ahead_is_believed_after_a_day() -> None:
    async def check() -> None:
        loop, wall, store = asyncio.get_running_loop(), Wall(), _Taking()
        start = wall.at - loop.time()
        ahead = 0.0
        usage = books(store, wall)
        for day in range(4):
            if day == 1:
                ahead = 40 * 86_400.0
            wall.at = start + loop.time() + ahead
            usage.book("a", "m", "ok")
            assert await usage.flush()
            await asyncio.sleep(86_400.0)
        first = DAY - timedelta(days=10)
        assert store.forgot == [first, first + timedelta(days=42), first + timedelta(days=43)]
        await usage.close()

    run(check())


@on_loop
async def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    usage = books(FileUsage(tmp_path / "file" / "x"))
    usage.book("a", "m", "ok")
    with caplog.at_level(logging.WARNING, "headrace"):
        await usage.close()
    assert "could not be kept" in caplog.text


@on_loop
async def test_without_redis_it_waits(make_redis: Callable[..., RedisServer]) -> None:
    shared = SharedRedis(make_redis().url, ManualClock(), timeout_s=1.0)
    usage = books(RedisUsage(shared, 10))
    usage.book("a", "m", "ok")
    table = await usage.table(DAY, DAY)
    assert (table.complete, table.rows) == (False, [row("a", "m", requests=1, ok=1)])
    await usage.close()
    await shared.close()


def test_every_outcome_has_its_column() -> None:
    assert set(OUTCOMES) < set(FIGURES)
