"""Keys for acceptance tests: a file of them, and the guard of it with everything behind."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from headrace.core.clock import Clock
from headrace.gateway.key_store import FileKeys
from headrace.gateway.keyring_guard import KeyringGuard
from headrace.gateway.keys import Record, checked, hash_of, write_records
from headrace.gateway.limits import Limiter
from headrace.gateway.usage import FileUsage, Usage
from headrace.gateway.whole_file import replace_file


def put_keys(file: Path, **records: dict[str, Any]) -> None:
    """A file with these: `secret` and the fields of a Record. Names with dots and dashes cannot be given here."""
    keys = [
        checked(name, Record(hash=hash_of(fields["secret"]), **{k: v for k, v in fields.items() if k != "secret"}))
        for name, fields in records.items()
    ]
    replace_file(file, write_records(keys).encode())


@contextlib.asynccontextmanager
async def keyed(
    folder: Path, *, clock: Clock = time.monotonic, **options: Any
) -> AsyncIterator[tuple[KeyringGuard, Usage]]:
    """The guard of `folder`/keys.toml, and the books of `folder`/usage."""
    ids = itertools.count()
    limiter = Limiter(clock, lambda: str(next(ids)))
    usage = Usage(FileUsage(folder / "usage"), time.time, lambda: str(next(ids)), days=10)
    guard = KeyringGuard(FileKeys(folder / "keys.toml"), limiter, usage, clock, time.time, **options)
    await guard.start()
    try:
        yield guard, usage
    finally:
        await limiter.close()
        await usage.close()
