"""`headrace keys add|list|show|revoke`: who may use a server. The only place where a key is ever shown is `add`."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import TypeVar

from headrace.cli.output import console
from headrace.core.errors import StartupError
from headrace.entrance import make_key_store, make_shared
from headrace.gateway.key_store import KeyStore
from headrace.gateway.keys import Key, Record, checked, hash_of, new_secret
from headrace.settings import Config

DAY_S = 86400
PATIENT_MS = 2000.0
"""For a Redis: nobody's request waits here."""

T = TypeVar("T")


def add(
    config: Config,
    name: str,
    models: tuple[str, ...] | None,
    rights: Mapping[str, int | str | None],
    days: int | None,
) -> int:
    """Raises StartupError; then there is no new key."""
    secret, now = new_secret(), int(time.time())
    record = Record(
        hash=hash_of(secret),
        created=now,
        expires=0 if days is None else now + days * DAY_S,
        models=models,
        **rights,  # type: ignore[arg-type]
    )
    key = checked(name, record)

    def change(keys: dict[str, Key]) -> None:
        if name in keys:
            raise StartupError(f"keys.{name}: is there already: revoke it first, or choose another name")
        keys[name] = key

    _with_store(config, lambda store: store.change(change))
    console(sys.stdout).print(secret)
    err = console(sys.stderr)
    err.print(f"This is the key of {name}. It is shown this once and kept nowhere: only its hash is.")
    err.print("A running server takes it within seconds.")
    return 0


def show_all(config: Config) -> int:
    """`list`: a line a key. Raises StartupError."""
    out, keys = console(sys.stdout), _read(config)
    if not keys:
        out.print("There are no keys")
        return 0
    width = max(map(len, keys))
    for name, key in sorted(keys.items()):
        out.print(f"{name:<{width}}  {', '.join(_rights(key))}")
    return 0


def show(config: Config, name: str) -> int:
    """Raises StartupError."""
    key, out = _known(_read(config), name), console(sys.stdout)
    record = key.record
    out.print(f"{name}:")
    rows = (
        ("models", ", ".join(record.models) if record.models is not None else "all"),
        ("requests a minute", _limit(record.rpm)),
        ("tokens a minute", _limit(record.tpm)),
        ("at the same time", _limit(record.streams)),
        ("priority", record.priority),
        ("tenant", record.tenant or "its own"),
        ("made", _day(record.created)),
        ("expires", _day(record.expires) if record.expires else "never"),
        ("hash", record.hash),
    )
    for label, value in rows:
        out.print(f"  {label:<18}{value}")
    return 0


def revoke(config: Config, name: str) -> int:
    """Raises StartupError."""

    def change(keys: dict[str, Key]) -> None:
        _known(keys, name)
        del keys[name]

    _with_store(config, lambda store: store.change(change))
    console(sys.stdout).print(f"{name} is revoked; running servers refuse it within seconds")
    return 0


def listed(text: str | None) -> tuple[str, ...] | None:
    """`a,b` → names; None: all. Raises StartupError."""
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise StartupError("--models: should read A,B with the aliases that the key may use")
    return names


def _rights(key: Key) -> Iterator[str]:
    """What differs from a key that may do everything."""
    record = key.record
    yield "all models" if record.models is None else "models " + " ".join(record.models)
    for count, unit in ((record.rpm, "requests/min"), (record.tpm, "tokens/min"), (record.streams, "at once")):
        if count is not None:
            yield f"{count} {unit}" if count else f"no limit of {unit}"
    if record.priority == "batch":
        yield "batch"
    if record.tenant:
        yield f"tenant {record.tenant}"
    if record.expires:
        yield f"{'expired' if key.over(time.time()) else 'expires'} {_day(record.expires)}"


def _limit(value: int | None) -> str:
    return "the server's default" if value is None else str(value) if value else "no limit"


def _day(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).date().isoformat()


def _known(keys: Mapping[str, Key], name: str) -> Key:
    if name not in keys:
        raise StartupError(f"keys.{name}: there is no such key; there are: {', '.join(sorted(keys)) or 'none'}")
    return keys[name]


def _read(config: Config) -> dict[str, Key]:
    keys = _with_store(config, lambda store: store.read())
    if keys is None:
        raise StartupError("shared.redis_url: no answer")
    return keys


def _with_store(config: Config, work: Callable[[KeyStore], Awaitable[T]]) -> T:
    shared = dataclasses.replace(config.shared, redis_timeout_ms=max(PATIENT_MS, config.shared.redis_timeout_ms))
    patient = dataclasses.replace(config, shared=shared)

    async def run() -> T:
        redis = make_shared(patient)
        try:
            store = make_key_store(patient, redis)
            if store is None:
                raise StartupError("there is no home directory for keys: set XDG_CONFIG_HOME or keys.file")
            return await work(store)
        finally:
            if redis is not None:
                await redis.close()

    return asyncio.run(run())
