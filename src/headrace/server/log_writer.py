"""Writes the logs of this process to Redis, behind their readers' backs.

    append ─▶ log ──▶ reader                    at once
               └─ bell ─▶ writer ─▶ Redis       50 ms later, a few streams a turn

Rules: the queue is the logs themselves, so it is bounded as they are, and a Redis that is away for a while is caught up
with. One task for all streams, which is there only while something is written. What Redis could not be told of before
the log let it go, or that another server has taken over, is counted and left alone: it can be resumed here only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace.core.clock import Clock
from headrace.core.errors import Gone, Stopped
from headrace.core.request import Sampling
from headrace.observe.fault import report_fault
from headrace.server.live import Live
from headrace.server.log_redis import Entry, LogStore, Put, State
from headrace.server.streamlog import Bell, StreamLog
from headrace.server.streams import Streams

FLUSH_S = 0.05
POLL_S = 0.25
"""How often it is asked whether somebody wants a stream stopped."""
TURN_BYTES = 256 * 1024
"""Bytes that one turn hands over, about."""
TURN_STREAMS = 16
"""Streams of one turn: some 20 µs each, in which no token can leave."""
CLOSE_S = 2.0

log = logging.getLogger(__name__)


Begun = tuple[str, Sampling | None]
"""The family of the engine that began an answer, and how it draws; see `Ask`."""


@dataclass(slots=True, eq=False)
class Writing:
    """One log on its way to Redis."""

    log: StreamLog
    live: Live
    origin: Callable[[], bytes]
    begun: Callable[[], Begun]
    """What of the origin an engine decides."""
    key: str
    written: int = 0
    """Position up to which Redis has it."""
    ids: int = 0
    """Tokens that it was told."""
    known: Begun | None = None
    """That part of the origin that it was told, with the rest of it; None: it has none."""
    dirty: bool = True
    over: bool = False
    refreshed: float = 0.0


class LogWriter:
    """On one event loop."""

    def __init__(self, store: LogStore, streams: Streams, clock: Clock) -> None:
        self._store = store
        self._streams = streams
        self._clock = clock
        self._writings: dict[str, Writing] = {}
        self._bell = Bell()
        self._task: asyncio.Task[None] | None = None
        self._polled = 0.0
        self._closing = False

    def __len__(self) -> int:
        return len(self._writings)

    def add(self, writing: Writing) -> None:
        """From now on it is written, its lease is kept."""
        self._writings[writing.log.id] = writing
        writing.log.changed = self._changed
        self._bell.ring()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def has(self, source: StreamLog) -> bool:
        return source.id in self._writings

    def free(self, source: StreamLog) -> None:
        """Its key is no longer its own: no further write says so."""
        writing = self._writings.get(source.id)
        if writing is not None:
            writing.key = ""

    def over(self, source: StreamLog) -> None:
        """Its generation has ended."""
        writing = self._writings.get(source.id)
        if writing is not None:
            writing.over = writing.dirty = True
            self._bell.ring()

    async def close(self) -> None:
        """Write what is left, as far as Redis takes it in time."""
        self._closing = True
        self._bell.ring()
        task = self._task
        if task is not None:
            await asyncio.wait((task,), timeout=CLOSE_S)
            task.cancel()
            await asyncio.wait((task,))
        self._writings.clear()

    def _changed(self, source: StreamLog) -> None:
        writing = self._writings.get(source.id)
        if writing is not None and not writing.dirty:
            writing.dirty = True
            self._bell.ring()

    # The task ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        try:
            while self._writings:
                await self._rest()
                now = self._clock()
                due = [one for one in self._writings.values() if self._is_due(one, now)]
                while due:
                    handled = await self._turn(due, now)
                    del due[:handled]
                    if not handled:
                        await asyncio.sleep(POLL_S)  # whatever the hurry: a call that is not made takes no time
                        break
                if any(one.dirty for one in self._writings.values()):
                    self._bell.ring()
                if now - self._polled >= POLL_S:
                    self._polled = now
                    await self._poll()
                if self._closing and not any(one.dirty for one in self._writings.values()):
                    return
        except Exception as error:
            report_fault(log, error, "of the streams")
            for writing in tuple(self._writings.values()):
                self._give_up(writing)
        finally:
            self._task = None

    async def _rest(self) -> None:
        """Until there is something to do; then a little longer, so that there is more of it."""
        try:
            async with asyncio.timeout(min(POLL_S, self._store.lease_s / 4)):
                await self._bell.wait()
        except TimeoutError:
            return
        if not self._closing:
            await asyncio.sleep(FLUSH_S)

    def _is_due(self, writing: Writing, now: float) -> bool:
        return writing.dirty or now - writing.refreshed >= self._store.lease_s / 3

    async def _turn(self, due: list[Writing], now: float) -> int:
        """Hand over what they have; how many of them. 0: Redis did not take it."""
        puts: list[tuple[Writing, Put, int, Begun]] = []
        size = handled = 0
        for writing in due:
            handled += 1
            if writing.log.refusal is not None:
                await self._store.drop(writing.log.id, writing.log.shared_key)
                self._forget(writing)
                continue
            made = self._put(writing)
            if made is None:
                self._give_up(writing)
                continue
            put, ids = made
            puts.append((writing, put, ids, writing.begun()))
            size += sum(len(entry.block) for entry in put.entries)
            if size > TURN_BYTES or len(puts) == TURN_STREAMS:
                break
        if not puts:
            return handled
        answers = await self._store.put([put for _, put, _, _ in puts])
        if answers is None:
            self._lose_old()
            return 0
        for (writing, put, ids, begun), answer in zip(puts, answers, strict=True):
            self._took(writing, put, ids, begun, answer, now)
        return handled

    def _put(self, writing: Writing) -> tuple[Put, int] | None:
        """What to write next of it, and the tokens it tells; None if that is no longer there."""
        source, limits = writing.log, self._streams.limits
        try:
            blocks = source.since(writing.written)
        except Gone:
            return None
        size = count = 0
        while count < len(blocks) and size < TURN_BYTES:
            size += len(blocks[count][1])
            count += 1
        entries = [Entry(end, block, None) for end, block in blocks[:count]]
        complete = count == len(blocks)
        ids: tuple[int, ...] = ()
        if complete and entries:
            ids, exact, whole, tokens, length = writing.live.told_since(writing.ids)
            last = entries[-1]
            entries[-1] = Entry(last.position, last.block, State(ids, exact, whole, tokens, length, start=writing.ids))
        leaving = complete and writing.over and bool(source.farewell)
        ending = complete and source.ended is not None and not leaving
        if ending:
            entries.append(Entry(source.last + 1, b"", State(end=source.ended)))
        writing.dirty = not complete
        origin = b"" if writing.known == writing.begun() else writing.origin()
        ttl = limits.keep_s if ending else limits.keep_s + limits.grace_s
        first = source.first if source.first > 0 else 0
        hold = not (leaving or ending)
        return Put(source.id, writing.key, origin, writing.written, first, hold, max(1.0, ttl), entries), len(ids)

    def _took(self, writing: Writing, put: Put, ids: int, begun: Begun, answer: int, now: float) -> None:
        if answer == 0:
            log.warning("stream taken over by another server while it was still written here")
            self._give_up(writing)
        elif answer < 0:
            # It lost what it had: everything once more.
            writing.written = writing.ids = 0
            writing.known, writing.dirty = None, True
        else:
            writing.known = begun
            writing.refreshed = now
            if answer == 1:  # else it was written before, and which tokens that told is not known: once more
                writing.ids += ids
            if put.entries:
                writing.written = min(put.entries[-1].position, writing.log.last)
            if not put.hold:
                self._forget(writing)

    def _lose_old(self) -> None:
        """Redis is away: what nobody can find here any more need not wait for it."""
        for writing in tuple(self._writings.values()):
            writing.dirty = True
            if writing.over and self._streams.find(writing.log.id, writing.log.owner) is not writing.log:
                self._give_up(writing)

    def _give_up(self, writing: Writing) -> None:
        self._streams.figures.unshared += 1
        self._forget(writing)

    def _forget(self, writing: Writing) -> None:
        if self._writings.get(writing.log.id) is writing:
            del self._writings[writing.log.id]
        writing.log.changed = None
        self._streams.tidy(writing.log)

    async def _poll(self) -> None:
        """See what others want stopped."""
        ids = [one.log.id for one in self._writings.values() if one.log.ended is None]
        for id in (await self._store.stops(ids) or ()) if ids else ():
            writing = self._writings.get(id)
            if writing is not None:
                writing.log.fail(Stopped("the stream was stopped"))


def packed(origin: msgspec.Struct) -> bytes:
    """As it is kept."""
    return msgspec.msgpack.encode(origin)
