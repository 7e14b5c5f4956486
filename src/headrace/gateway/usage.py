"""What every key used, by day and model.

    book ─▶ figures that wait ── every FLUSH_S ─▶ batch with an id ─▶ file of the day, or Redis
                                                   └── not taken: again later, under the same id

Rules: booking is a sum in memory and nothing else. Days are UTC. What is kept is only ever added to, so servers may
share it; a batch is added once, however often it has to be sent, and whoever gives up waiting for that. A server that
is killed loses what waited. Rows are named by keys and aliases, which are few, and days are forgotten after a while: it
does not grow for ever. A wall clock that has just leapt ahead is not believed for a day, so one that is wrong for an
hour makes nobody forget anything.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from redis.asyncio import Redis

from headrace.gateway.limits import Script
from headrace.gateway.shared import SharedRedis
from headrace.gateway.whole_file import alone, replace_file
from headrace.observe.record import OUTCOMES, Outcome

FLUSH_S = 10.0
CHUNK = 500
"""Rows of a batch, at most."""
REDIS_S = 1.0
"""Nobody waits for it."""
PREFIX = "headrace:usage:"
MOST_TOKENS = 2**31
"""Of one request: more is not believed, since sums have to stay whole numbers everywhere."""

Booked = Outcome | Literal["limited"]
FIGURES = ("requests", *OUTCOMES, "limited", "prompt_tokens", "cached_tokens", "completion_tokens")
"""Of a row. `requests` are those that were let in, and how they ended; `limited` those that were not."""
_AT = {name: at for at, name in enumerate(FIGURES)}

Rows = dict[tuple[str, str], list[int]]
"""(key, model) → figures."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """What is to be added to a day."""

    id: str
    day: date
    rows: Rows


@dataclass(frozen=True, slots=True)
class Table:
    """`rows`: an object each, with `day`, `key`, `model` and the FIGURES."""

    rows: list[dict[str, str | int]]
    complete: bool
    """False: what is kept could not be read, this is only what waits here."""


class UsageStore(Protocol):
    async def add(self, batch: Batch) -> bool:
        """Add it, once. False: try again later."""
        ...

    async def read(self, day: date) -> Rows | None:
        """None: cannot be read now."""
        ...

    async def forget(self, before: date) -> None:
        """Days before that are no longer wanted."""
        ...


class Usage:
    """On one event loop. `wall`: Unix time in s; `new_id` names batches; `days` that are kept."""

    def __init__(
        self,
        store: UsageStore,
        wall: Callable[[], float],
        new_id: Callable[[], str],
        *,
        days: int,
        flush_s: float = FLUSH_S,
    ) -> None:
        self.days = days
        self._store = store
        self._wall = wall
        self._new_id = new_id
        self._flush_s = flush_s
        self._fresh: dict[date, Rows] = {}
        self._sealed: deque[Batch] = deque()
        self._forgot: tuple[date, float] | None = None
        """The day of which the last time was thought, and when that was, on the loop's clock."""
        self._doubted_until = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._flushing: set[asyncio.Task[bool]] = set()
        self._one = asyncio.Lock()

    @property
    def today(self) -> date:
        return datetime.fromtimestamp(self._wall(), UTC).date()

    def book(
        self,
        key: str,
        model: str,
        outcome: Booked,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        completion_tokens: int = 0,
    ) -> None:
        """A request is over."""
        row = self._fresh.setdefault(self.today, {}).setdefault((key, model), [0] * len(FIGURES))
        row[_AT[outcome]] += 1
        row[_AT["requests"]] += outcome != "limited"
        row[_AT["prompt_tokens"]] += _sane(prompt_tokens)
        row[_AT["cached_tokens"]] += _sane(cached_tokens)
        row[_AT["completion_tokens"]] += _sane(completion_tokens)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._flush_s, self._due)

    async def flush(self) -> bool:
        """Have everything kept that waits; False if that did not work."""
        # Who gives up does not stop it: what is written by then would be written again.
        task = asyncio.get_running_loop().create_task(self._flush())
        self._flushing.add(task)
        task.add_done_callback(self._flushing.discard)
        return await asyncio.shield(task)

    async def _flush(self) -> bool:
        async with self._one:
            self._seal()
            while self._sealed:
                if not await self._store.add(self._sealed[0]):
                    return False
                self._sealed.popleft()
            today = self.today
            if (self._forgot is None or self._forgot[0] != today) and self._believed(today):
                await self._store.forget(today - timedelta(days=self.days))
        return True

    def _believed(self, today: date) -> bool:
        """May it be that day, by the time that has passed since the last one?"""
        last, now = self._forgot, asyncio.get_running_loop().time()
        self._forgot = today, now
        if last is not None and (today - last[0]).days > (now - last[1]) / 86400 + 1:
            self._doubted_until = now + 86400
        return now >= self._doubted_until

    async def table(self, first: date, last: date, key: str | None = None) -> Table:
        """The rows of these days, both included, of one key or all."""
        complete = await self.flush()
        rows: list[dict[str, str | int]] = []
        for at in range((last - first).days + 1):
            day = first + timedelta(days=at)
            kept = await self._store.read(day)
            complete = complete and kept is not None
            found = _sum([kept or {}, *(batch.rows for batch in self._sealed if batch.day == day)])
            found = _sum([found, self._fresh.get(day, {})])
            for (name, model), figures in sorted(found.items()):
                if key in (None, name):
                    rows.append(
                        {
                            "day": day.isoformat(),
                            "key": name,
                            "model": model,
                            **dict(zip(FIGURES, figures, strict=True)),
                        }
                    )
        return Table(rows, complete)

    async def close(self) -> None:
        """Have everything kept, if that is possible."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            await asyncio.wait((self._task,))
        if not await self.flush():
            log.warning("usage: what was booked last could not be kept")

    def _due(self) -> None:
        self._timer = None
        self._task = asyncio.get_running_loop().create_task(self._flush_again())

    async def _flush_again(self) -> None:
        if not await self.flush() and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._flush_s, self._due)

    def _seal(self) -> None:
        """Make batches of what is fresh."""
        fresh, self._fresh = self._fresh, {}
        for day, rows in fresh.items():
            names = list(rows)
            for start in range(0, len(names), CHUNK):
                part = {name: rows[name] for name in names[start : start + CHUNK]}
                self._sealed.append(Batch(self._new_id(), day, part))


def _sane(tokens: int) -> int:
    """Another server's figures may be anything."""
    return min(max(0, tokens), MOST_TOKENS)


def _sum(parts: Iterable[Mapping[tuple[str, str], list[int]]]) -> Rows:
    total: Rows = {}
    for part in parts:
        for name, figures in part.items():
            total[name] = [a + b for a, b in zip(total.get(name, [0] * len(FIGURES)), figures, strict=True)]
    return total


class FileUsage:
    """A JSON file a day, in a folder that several servers of one machine may share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def add(self, batch: Batch) -> bool:
        return await self._try(lambda: self._add(batch))

    async def read(self, day: date) -> Rows | None:
        file = self._file(day)
        try:
            return await asyncio.to_thread(self._read, file)
        except (OSError, msgspec.DecodeError):
            log.warning("usage: %s cannot be read", file)
            return None

    async def forget(self, before: date) -> None:
        await self._try(lambda: self._forget(before))

    async def _try(self, work: Callable[[], None]) -> bool:
        try:
            await asyncio.to_thread(work)
        except OSError as error:
            log.warning("usage: %s: %s", self._folder, (error.strerror or "cannot be written").lower())
            return False
        return True

    def _file(self, day: date) -> Path:
        return self._folder / f"{day.isoformat()}.json"

    def _add(self, batch: Batch) -> None:
        with alone(self._folder):
            file = self._file(batch.day)
            try:
                kept = self._read(file)
            except msgspec.DecodeError:
                # Somebody has to look at it; counting goes on.
                aside = _unused(file)
                log.warning("usage: %s makes no sense and is now %s", file, aside.name)
                file.rename(aside)
                kept = {}
            rows = _sum([kept, batch.rows])
            listed = [[*name, dict(zip(FIGURES, figures, strict=True))] for name, figures in sorted(rows.items())]
            replace_file(file, msgspec.json.encode(listed) + b"\n")

    def _read(self, file: Path) -> Rows:
        """Raises OSError, which may pass, and DecodeError, which will not."""
        try:
            listed = msgspec.json.decode(file.read_bytes(), type=list[tuple[str, str, dict[str, int]]])
        except FileNotFoundError:
            return {}
        return {(key, model): [figures.get(name, 0) for name in FIGURES] for key, model, figures in listed}

    def _forget(self, before: date) -> None:
        for file in self._folder.glob("????-??-??.json"):
            if file.stem < before.isoformat():
                file.unlink(missing_ok=True)


def _unused(file: Path) -> Path:
    """A name for what is put aside."""
    aside, number = file.with_suffix(".unreadable"), 1
    while os.path.lexists(aside):
        number += 1
        aside = file.with_suffix(f".unreadable-{number}")
    return aside


# KEYS: the day, the batch's mark. ARGV: seconds to keep the day, then fields and what to add. The mark is set last: a
# batch that failed is not thought to be added. A field that holds no number is left alone, else what stands before it
# would be added at every try; whatever else may fail, fails at the first field.
_ADD = Script(
    """
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
for i = 2, #ARGV, 2 do
  local said = redis.pcall('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1])
  if type(said) == 'table' and said.err and not string.find(said.err, 'integer') and
    not string.find(said.err, 'overflow') then return said end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], '1', 'EX', 86400)
return 1
"""
)


class RedisUsage:
    """A hash a day; a batch that was heard leaves a mark, so that it is not added again."""

    def __init__(self, shared: SharedRedis, days: int) -> None:
        self._shared = shared
        self._keep_s = (days + 1) * 86400

    async def add(self, batch: Batch) -> bool:
        arguments: list[str | int] = [self._keep_s]
        for name, figures in batch.rows.items():
            for figure, count in zip(FIGURES, figures, strict=True):
                if count:
                    arguments += (msgspec.json.encode((*name, figure)).decode(), count)
        keys = _day(batch.day), f"{_day(batch.day)}:{batch.id}"
        return await self._shared.call(lambda c: _ADD(c, keys, *arguments), timeout_s=REDIS_S) is not None

    async def read(self, day: date) -> Rows | None:
        async def fetch(client: Redis) -> dict[Any, Any]:
            return await client.hgetall(_day(day))

        fields = await self._shared.call(fetch, timeout_s=REDIS_S)
        if fields is None:
            return None
        rows: Rows = {}
        for field, count in fields.items():
            try:
                (key, model, figure), number = msgspec.json.decode(field, type=tuple[str, str, str]), int(count)
            except ValueError:
                continue  # nobody here wrote that
            if figure in _AT:
                rows.setdefault((key, model), [0] * len(FIGURES))[_AT[figure]] = number
        return rows

    async def forget(self, before: date) -> None:
        """Redis does that by itself."""


def _day(day: date) -> str:
    return f"{PREFIX}{{{day.isoformat()}}}"
