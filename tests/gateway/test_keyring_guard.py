from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Hashable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import RateLimited, StartupError, Unauthorized
from headrace.core.request import BATCH, INTERACTIVE, Ask, Options
from headrace.gateway.buckets import Allowance
from headrace.gateway.guard import ANYBODY, NO_PERMIT
from headrace.gateway.key_store import ABSENT, Change, FileKeys
from headrace.gateway.keyring_guard import ANSWER, LOOK_S, KeyringGuard, estimate
from headrace.gateway.keys import SERVER_KEY, Key, Record, hash_of
from headrace.gateway.limits import Limiter
from headrace.gateway.usage import FIGURES, MOST_TOKENS, FileUsage, Usage
from headrace.observe.record import Outcome
from headrace.testing import ManualClock
from server.asgi_driver import on_loop, settle

NOW = 1_800_000_000.0
TODAY = date(2027, 1, 15)
NUMBERS = itertools.count()


class Kept:
    """A store by hand."""

    def __init__(self, **records: Record) -> None:
        self.at: Hashable | None = 1
        self.error: StartupError | None = None
        self.reads = 0
        self.looks = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.put(**records)

    def put(self, **records: Record) -> None:
        self.keys = {name: Key(name, record) for name, record in records.items()}
        self.at = (self.at, "changed")

    async def version(self) -> Hashable | None:
        self.looks += 1
        return self.at

    async def read(self) -> dict[str, Key] | None:
        await self.gate.wait()
        self.reads += 1
        if self.error is not None:
            raise self.error
        return dict(self.keys)

    async def change(self, change: Change) -> None:
        raise NotImplementedError


class House:
    def __init__(self, store: Kept | None, folder: Path | None = None, **options: Any) -> None:
        self.clock = ManualClock()
        self.wall = NOW
        ids = iter(range(10**6))
        self.limiter = Limiter(self.clock, lambda: str(next(ids)))
        self.usage = (
            None if folder is None else Usage(FileUsage(folder), lambda: self.wall, lambda: str(next(ids)), days=10)
        )
        self.guard = KeyringGuard(store, self.limiter, self.usage, self.clock, lambda: self.wall, **options)

    async def who(self, secret: str) -> str:
        return (await self.guard.identify([f"Bearer {secret}".encode()])).name

    async def rows(self) -> list[dict[str, str | int]]:
        assert self.usage is not None
        return (await self.usage.table(TODAY, TODAY)).rows


def ask(size: int = 35, **options: Any) -> Ask:
    return Ask(True, "m", {}, size, Options(**options), 1)


@on_loop
async def test_a_key_stands_for_what_its_record_says() -> None:
    house = House(
        Kept(
            a=Record(hash_of("ka")),
            b=Record(hash_of("kb"), models=("m", "n"), priority="batch", tenant="t"),
            c=Record(hash_of("kc"), tenant="t"),
        )
    )
    a, b, c = [await house.guard.identify([b"Bearer " + secret]) for secret in (b"ka", b"kb", b"kc")]
    assert (a.name, a.models, a.priority) == ("a", None, INTERACTIVE)
    assert (b.name, b.models, b.priority) == ("b", frozenset({"m", "n"}), BATCH)
    assert b.salt == c.salt
    assert a.salt not in ("", b.salt)
    for wrong in (
        [],
        [b"Bearer x"],
        [b"Bearer ka", b"Bearer ka"],
        [b"Basic ka"],
        [b"Bearer  ka"],
        [b"Bearer \xd0\xba"],
    ):
        with pytest.raises(Unauthorized) as caught:
            await house.guard.identify(wrong)
        assert caught.value.status == 401


@on_loop
async def test_without_isolation_all_share() -> None:
    house = House(Kept(a=Record(hash_of("ka")), b=Record(hash_of("kb"), tenant="t")), isolate=False)
    assert [(await house.guard.identify([b"Bearer " + key])).salt for key in (b"ka", b"kb")] == ["", ""]


@on_loop
async def test_the_server_s_own_key_goes_beside() -> None:
    store = Kept()
    store.at = ABSENT
    house = House(store, server_key="s3cret", defaults=Allowance(requests=1))
    assert house.guard.guarded
    caller = await house.guard.identify([b"Bearer s3cret"])
    assert (caller.name, caller.salt, caller.models) == (SERVER_KEY, "", None)
    for _ in range(5):
        await house.guard.admit(caller, ask())
    store.put(a=Record(hash_of("ka")))
    house.clock.advance(LOOK_S)
    assert [await house.who(secret) for secret in ("ka", "s3cret")] == ["a", SERVER_KEY]
    assert "s3cret" not in repr(house.guard)


@on_loop
async def test_without_keys_all_come_in_until_there_is_one() -> None:
    store = Kept()
    store.at = ABSENT
    house = House(store)
    await house.guard.start()
    assert not house.guard.guarded
    assert await house.guard.identify([]) is ANYBODY
    assert await house.guard.admit(ANYBODY, ask()) is NO_PERMIT
    store.put(a=Record(hash_of("ka")))
    assert await house.guard.identify([]) is ANYBODY, "it looks once a second"
    house.clock.advance(LOOK_S)
    with pytest.raises(Unauthorized):
        await house.guard.identify([])
    assert await house.who("ka") == "a"
    for at in (store.at, ABSENT):
        store.put()
        store.at = at if at == ABSENT else store.at
        house.clock.advance(LOOK_S)
        with pytest.raises(Unauthorized):
            await house.guard.identify([])
        assert house.guard.guarded, "the last key was revoked, which is no invitation"


@on_loop
async def test_always_guarded_if_asked_for() -> None:
    store = Kept()
    store.at = ABSENT
    assert House(store, always=True).guard.guarded
    assert not House(None).guard.guarded
    with pytest.raises(Unauthorized):
        await House(None, server_key="x").guard.identify([b"Bearer y"])


@on_loop
async def test_a_revoked_key_is_refused_at_the_next_look_also_after_a_long_rest() -> None:
    store = Kept(a=Record(hash_of("ka")))
    house = House(store)
    caller = await house.guard.identify([b"Bearer ka"])
    store.put()
    house.clock.advance(3600.0)
    store.gate.clear()
    waiting = [asyncio.ensure_future(house.who("ka")) for _ in range(5)]
    await settle()
    assert not any(task.done() for task in waiting), "all wait for the one look"
    store.gate.set()
    for task in waiting:
        with pytest.raises(Unauthorized):
            await task
    assert store.reads == 2
    with pytest.raises(Unauthorized):
        await house.guard.admit(caller, ask())


@on_loop
async def test_it_does_not_look_at_every_request() -> None:
    store = Kept(a=Record(hash_of("ka")))
    house = House(store)
    for _ in range(100):
        await house.who("ka")
    assert (store.looks, store.reads) == (1, 1)
    house.clock.advance(LOOK_S)
    for _ in range(100):
        await house.who("ka")
    assert (store.looks, store.reads) == (2, 1), "it reads only what has changed"


@on_loop
async def test_a_store_that_says_nothing_or_nonsense_leaves_the_keys_as_they_were(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Kept(a=Record(hash_of("ka")))
    house = House(store)
    assert await house.who("ka") == "a"
    for at, error in ((None, None), ("broken", StartupError("keys.toml: not valid TOML"))):
        store.keys, store.at, store.error = {}, at, error
        with caplog.at_level(logging.WARNING, "headrace"):
            for _ in range(3):
                house.clock.advance(LOOK_S)
                assert await house.who("ka") == "a"
    assert caplog.text.count("not valid TOML; those that were known stay") == 1
    store.error = None
    store.put()
    house.clock.advance(LOOK_S)
    with pytest.raises(Unauthorized):
        await house.who("ka")


@on_loop
async def test_keys_that_cannot_be_read_do_not_leave_a_server_open() -> None:
    store = Kept()
    store.at = ABSENT
    house = House(store)
    assert await house.guard.identify([]) is ANYBODY
    store.at, store.error = "hidden", StartupError("keys.toml: permission denied")
    house.clock.advance(LOOK_S)
    with pytest.raises(Unauthorized):
        await house.guard.identify([])


@on_loop
async def test_a_file_that_cannot_even_be_looked_for_stops_the_start(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.symlink_to(file)
    with pytest.raises(StartupError, match=r"keys\.toml: too many levels"):
        await KeyringGuard(FileKeys(file), Limiter(ManualClock(), str), None, ManualClock(), lambda: NOW).start()


@on_loop
async def test_a_store_that_says_nothing_at_the_start_lets_nobody_in() -> None:
    store = Kept(a=Record(hash_of("ka")))
    told, store.at = store.at, None
    keys, house = store.keys, House(store)

    async def read() -> dict[str, Key] | None:
        return None if store.at is None else dict(keys)

    store.read = read  # type: ignore[method-assign]
    await house.guard.start()
    for secret in ("ka", "x"):
        with pytest.raises(Unauthorized):
            await house.who(secret)
    store.at = told
    house.clock.advance(LOOK_S)
    assert await house.who("ka") == "a"


@on_loop
async def test_nonsense_stops_the_start() -> None:
    store = Kept()
    store.error = StartupError("keys.toml: not valid TOML")
    with pytest.raises(StartupError, match=r"keys\.toml"):
        await House(store).guard.start()


@on_loop
async def test_a_key_ends_at_its_time() -> None:
    house = House(Kept(a=Record(hash_of("ka"), expires=int(NOW) + 10)))
    assert await house.who("ka") == "a"
    house.wall += 10.0
    with pytest.raises(Unauthorized, match="has expired"):
        await house.who("ka")


@on_loop
async def test_limits_are_the_key_s_or_else_the_server_s() -> None:
    house = House(
        Kept(a=Record(hash_of("ka")), b=Record(hash_of("kb"), rpm=3), c=Record(hash_of("kc"), rpm=0)),
        defaults=Allowance(requests=2),
    )
    for secret, most in (("ka", 2), ("kb", 3), ("kc", 50)):
        caller = await house.guard.identify([f"Bearer {secret}".encode()])
        count = 0
        while count < 50:
            try:
                await house.guard.admit(caller, ask())
            except RateLimited:
                break
            count += 1
        assert count == most


@on_loop
async def test_what_is_put_by_is_settled_with_what_it_took(tmp_path: Path) -> None:
    house = House(Kept(a=Record(hash_of("ka"), tpm=1000, streams=3)), tmp_path)
    caller = await house.guard.identify([b"Bearer ka"])
    permits = [await house.guard.admit(caller, ask(350, max_tokens=200)) for _ in range(3)]
    with pytest.raises(RateLimited) as caught:
        await house.guard.admit(caller, ask(350, max_tokens=200))
    assert (caught.value.limit, caught.value.retry_after) == ("tokens", 12), "900 of 1000 are put by"
    permits[0].close(100, 50, 10, "ok")
    permits[0].close(100, 50, 10, "ok")
    permits[1].close(100, 0, 0, "rejected")
    permits[2].close(100, 0, 190, "cancelled")
    with pytest.raises(RateLimited) as caught:
        await house.guard.admit(caller, ask(0, max_tokens=2000, n=3))
    assert caught.value.retry_after == 11, "600 are left, 3 * 256 are to be put by"
    assert await house.rows() == [
        {"day": TODAY.isoformat(), "key": "a", "model": "m"}
        | dict.fromkeys(FIGURES, 0)
        | {"requests": 3, "ok": 1, "rejected": 1, "cancelled": 1, "limited": 2}
        | {"prompt_tokens": 200, "cached_tokens": 50, "completion_tokens": 200}
    ]
    assert house.usage is not None
    await house.usage.close()


def test_what_is_put_by() -> None:
    assert estimate(ask(0)) == ANSWER
    assert estimate(ask(36, max_tokens=10, n=2)) == 11 + 20
    assert estimate(ask(35, max_tokens=0)) == 10
    assert estimate(ask(0, max_tokens=10**6)) == ANSWER


@on_loop
async def test_a_name_given_anew_is_somebody_else() -> None:
    store = Kept(a=Record(hash_of("ka"), tenant="t"), b=Record(hash_of("kb")))
    house = House(store)
    old = [await house.guard.identify([b"Bearer " + key]) for key in (b"ka", b"kb")]
    store.put(a=Record(hash_of("new a"), tenant="t"), b=Record(hash_of("new b")))
    house.clock.advance(LOOK_S)
    new = [await house.guard.identify([b"Bearer " + key]) for key in (b"new a", b"new b")]
    assert [caller.name for caller in new] == ["a", "b"]
    assert new[0].salt == old[0].salt, "one tenant"
    assert new[1].salt != old[1].salt
    assert all(was.owner != now.owner for was, now in zip(old, new, strict=True))
    for caller in old:
        with pytest.raises(Unauthorized, match="was revoked"):
            await house.guard.admit(caller, ask())


async def charged(folder: Path, figures: tuple[int, int, int], outcome: Outcome, **options: Any) -> tuple[Any, ...]:
    """(prompt, cached, completion) tokens that are booked; of the limit the same are gone."""
    house = House(Kept(a=Record(hash_of("ka"), tpm=10_000)), folder / f"{next(NUMBERS)}")
    caller = await house.guard.identify([b"Bearer ka"])
    permit = await house.guard.admit(caller, ask(3500, **options))
    permit.close(*figures, outcome)
    (row,) = await house.rows()
    booked = row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]
    left = 10_000 - int(booked[0]) - int(booked[2])
    await house.guard.admit(caller, ask(int(left * 3.5), max_tokens=0))
    with pytest.raises(RateLimited):
        await house.guard.admit(caller, ask(4, max_tokens=0))
    assert house.usage is not None
    await house.usage.close()
    return booked


@on_loop
async def test_what_nobody_told_is_estimated(tmp_path: Path) -> None:
    outcome: Outcome
    for outcome in ("ok", "cancelled", "error"):
        assert await charged(tmp_path, (0, 0, 7), outcome, stream=True) == (1000, 0, 7), "left before the figures came"
        assert await charged(tmp_path, (20, 8, 7), outcome, stream=True) == (20, 8, 7)
    assert await charged(tmp_path, (0, 0, 0), "cancelled", stream=True) == (1000, 0, 0), "nothing of it had come"
    for outcome in ("cancelled", "error"):
        assert await charged(tmp_path, (0, 0, 0), outcome, n=2, max_tokens=30) == (1000, 0, 60), "whole, cut short"
        assert await charged(tmp_path, (20, 0, 0), outcome) == (20, 0, 0), "an own engine knows"
    for outcome in ("rejected", "invalid"):
        assert await charged(tmp_path, (0, 0, 0), outcome) == (0, 0, 0)


@on_loop
async def test_a_stream_that_was_ended_by_the_server_cost_what_had_come(tmp_path: Path) -> None:
    assert await charged(tmp_path, (20, 8, 50), "rejected", stream=True) == (20, 8, 50)
    assert await charged(tmp_path, (0, 0, 50), "rejected", stream=True) == (1000, 0, 50)


@on_loop
async def test_figures_that_cannot_be_are_not_booked(tmp_path: Path) -> None:
    house = House(Kept(a=Record(hash_of("ka"))), tmp_path)
    caller = await house.guard.identify([b"Bearer ka"])
    (await house.guard.admit(caller, ask())).close(10**30, -(10**30), 10**30, "ok")
    (row,) = await house.rows()
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (MOST_TOKENS, 0, MOST_TOKENS)
    assert house.usage is not None
    await house.usage.close()
