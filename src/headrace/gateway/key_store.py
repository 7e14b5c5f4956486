"""Where the records of keys are kept: a file, or the Redis that servers share.

Rules: a change is one step for whoever reads, and two that are made at once are both kept. A reader asks for `version`,
which is cheap, and reads everything only if that differs. What cannot be read is None and never "no keys" for that
reason; a file that is not there, or a Redis that answers and has none, does say "no keys".
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Protocol

import msgspec
from redis.asyncio import Redis

from headrace.core.errors import StartupError
from headrace.gateway.keys import Key, Record, checked, read_records, write_records
from headrace.gateway.shared import SharedRedis
from headrace.gateway.whole_file import alone, replace_file

HASH = "headrace:keys"
VERSION = "headrace:keys:version"
ABSENT = "absent"
HIDDEN = "hidden"
"""Version of a file that we may not even look for: reading it says so."""

log = logging.getLogger(__name__)

Change = Callable[[dict[str, Key]], None]
"""Changes the keys in place; raises StartupError if it must not be."""


class KeyStore(Protocol):
    """For a server, on its event loop; for the command line, one call after the other."""

    async def version(self) -> Hashable | None:
        """Differs whenever something was changed; ABSENT: there was never a key; None: that cannot be told now."""
        ...

    async def read(self) -> dict[str, Key] | None:
        """All keys by name; None: they cannot be read now. Raises StartupError if they make no sense."""
        ...

    async def change(self, change: Change) -> None:
        """Raises StartupError if that cannot be done; then nothing has changed."""
        ...


class FileKeys:
    """In a TOML file that only its owner may read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __repr__(self) -> str:
        return f"<FileKeys [{self.file}]>"

    async def version(self) -> Hashable | None:
        # Not on a thread: to look at a file takes microseconds, and it is done once a second.
        try:
            found = self.file.stat()
        except (FileNotFoundError, NotADirectoryError):
            return ABSENT
        except PermissionError:
            return HIDDEN
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    async def read(self) -> dict[str, Key] | None:
        return await asyncio.to_thread(self._read)

    async def change(self, change: Change) -> None:
        await asyncio.to_thread(self._change, change)

    def _read(self) -> dict[str, Key]:
        try:
            return read_records(self.file.read_bytes().decode())
        except FileNotFoundError:
            return {}
        except UnicodeDecodeError as error:
            raise StartupError(f"{self.file}: is not UTF-8 at byte {error.start + 1}") from None
        except OSError as error:
            raise StartupError(f"{self.file}: {(error.strerror or 'cannot be read').lower()}") from None
        except StartupError as error:
            raise StartupError(f"{self.file}: {error.message}") from None

    def _change(self, change: Change) -> None:
        try:
            with alone(self.file.resolve().parent):
                keys = self._read()
                change(keys)
                replace_file(self.file, write_records(keys.values()).encode())
        except OSError as error:
            raise StartupError(f"{self.file}: cannot be written: {(error.strerror or 'unknown').lower()}") from None


class RedisKeys:
    """In a hash, a JSON object a key; beside it stands what differs after every change.

    Drawn by lot, not counted: a Redis that lost its data would count to the same number again.
    """

    def __init__(self, shared: SharedRedis) -> None:
        self._shared = shared

    def __repr__(self) -> str:
        return f"<RedisKeys [{self._shared!r}]>"

    async def version(self) -> Hashable | None:
        async def look(client: Redis) -> bytes | str:
            return await client.get(VERSION) or ABSENT

        return await self._shared.call(look)

    async def read(self) -> dict[str, Key] | None:
        async def fetch(client: Redis) -> dict[Any, Any]:
            return await client.hgetall(HASH)

        rows = await self._shared.call(fetch)
        return None if rows is None else {key.name: key for key in _decoded(rows)}

    async def change(self, change: Change) -> None:
        async def transact(client: Redis) -> bool:
            async with client.pipeline(transaction=True) as pipe:
                await pipe.watch(VERSION, HASH)
                old = {key.name: key for key in _decoded(await pipe.hgetall(HASH))}
                new = dict(old)
                change(new)
                pipe.multi()  # type: ignore[no-untyped-call]
                gone = [name for name in old if name not in new]
                if gone:
                    pipe.hdel(HASH, *gone)
                for name, key in new.items():
                    if old.get(name) != key:
                        pipe.hset(HASH, name, msgspec.json.encode(key.record))
                pipe.set(VERSION, secrets.token_hex(16))
                await pipe.execute()
            return True

        if await self._shared.call(transact) is None:
            raise StartupError("shared.redis_url: no answer, or somebody else changes keys: nothing was changed")


def _decoded(rows: dict[Any, Any]) -> list[Key]:
    """One that makes no sense is nobody's key; the others stay."""
    keys = []
    for raw, row in rows.items():
        name = raw.decode(errors="replace")
        try:
            keys.append(checked(name, msgspec.json.decode(row, type=Record)))
        except (msgspec.DecodeError, StartupError) as error:
            log.warning("a key in Redis is left out: %s", type(error).__name__)
    return sorted(keys, key=lambda key: key.name)
