"""From the settings to who may come in: keys, their limits, and the books.

Config ─► KeyStore ─┐
   ├────► Limiter  ─┼─► KeyringGuard ─► App
   └────► Usage  ───┘        └──────── all three live as long as the server: Entrance
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from headrace.config import config_home, state_home
from headrace.core.errors import StartupError
from headrace.gateway.buckets import Allowance
from headrace.gateway.key_store import FileKeys, KeyStore, RedisKeys
from headrace.gateway.keyring_guard import KeyringGuard
from headrace.gateway.limits import Limiter
from headrace.gateway.shared import SharedRedis
from headrace.gateway.usage import FileUsage, RedisUsage, Usage
from headrace.settings import Config

USUAL = "keys.toml"


@dataclass(frozen=True, slots=True)
class Entrance:
    """What a server has of it."""

    guard: KeyringGuard
    limiter: Limiter
    usage: Usage | None
    """None: nothing is kept."""

    async def start(self) -> None:
        """Raises StartupError if what is kept of keys makes no sense."""
        await self.guard.start()

    async def close(self) -> None:
        """After the last request: settle and keep what is not yet."""
        await self.limiter.close()
        if self.usage is not None:
            await self.usage.close()


def make_entrance(config: Config, shared: SharedRedis | None) -> Entrance:
    """Not started yet. Raises StartupError."""
    k = config.keys
    limiter, usage = Limiter(time.monotonic, new_name, shared=shared), make_usage(config, shared)
    guard = KeyringGuard(
        make_key_store(config, shared),
        limiter,
        usage,
        time.monotonic,
        time.time,
        server_key=config.server.key,
        defaults=Allowance(k.requests_per_minute, k.tokens_per_minute, k.streams),
        isolate=k.isolate,
        always=_always(config),
    )
    return Entrance(guard, limiter, usage)


def make_shared(config: Config) -> SharedRedis | None:
    """The Redis that servers share, if there is one. Raises StartupError."""
    s = config.shared
    return SharedRedis(s.redis_url, time.monotonic, timeout_s=s.redis_timeout_ms / 1e3) if s.redis_url else None


def make_key_store(config: Config, shared: SharedRedis | None) -> KeyStore | None:
    """Where keys are; None: nowhere, because there is no home directory. Raises StartupError."""
    if config.keys.store == "redis":
        return RedisKeys(_needed(shared))
    home = config_home()
    if config.keys.file:
        return FileKeys(Path(config.keys.file))
    return None if home is None else FileKeys(home / USUAL)


def asks_for_keys(config: Config) -> bool:
    """Do clients need a key from the start? Later also from the first one on that is made."""
    return _always(config) or bool(config.server.key) or _has_usual()


def _always(config: Config) -> bool:
    return config.keys.store == "redis" or bool(config.keys.file)


def _has_usual() -> bool:
    home = config_home()
    try:
        return home is not None and bool((home / USUAL).stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # as the guard has it: whoever hid it did not want an open server


def make_usage(config: Config, shared: SharedRedis | None) -> Usage | None:
    """The books; None: nothing is kept."""
    k, home = config.keys, state_home()
    if not k.usage_days:
        return None
    if k.store == "redis":
        return Usage(RedisUsage(_needed(shared), k.usage_days), time.time, new_name, days=k.usage_days)
    folder = Path(k.usage_path) if k.usage_path else None if home is None else home / "usage"
    return None if folder is None else Usage(FileUsage(folder), time.time, new_name, days=k.usage_days)


def _needed(shared: SharedRedis | None) -> SharedRedis:
    if shared is None:
        raise StartupError("keys.store: redis needs shared.redis_url, which is empty")
    return shared


def new_name() -> str:
    """One that no other server gives."""
    return secrets.token_hex(8)
