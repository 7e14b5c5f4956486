"""Streams that other servers write, read here: and gone on with when such a server is gone.

    Redis ── entries ──▶ log ──▶ readers here
      no lease, no end ──▶ take it ──▶ a generation of ours goes on in the same log

Rules: one task a stream, for all its readers here, and only while there are any. A server counts as gone when its lease
is; who takes the lease goes on from the last event that Redis has, nobody else does.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from headrace.core.clock import Clock
from headrace.core.errors import Draining, EngineUnavailable, Gone, HeadraceError
from headrace.core.request import Ask, Told
from headrace.gateway.guard import Caller
from headrace.observe.fault import report_fault
from headrace.protocol.block import ending_of, identity_of, text_of, weight_of
from headrace.protocol.plain_events import plain_error_event
from headrace.server.log_redis import Entry, LogStore, Origin, Put, State
from headrace.server.streamlog import StreamLog
from headrace.server.streams import Streams, owner_of

WAIT_S = 1.0
"""How long one read waits for the next event."""
RETRY_S = 0.1
PATIENCE = 5.0
"""Leases that Redis may be away for before its readers are told."""

log = logging.getLogger(__name__)


class Adopt(Protocol):
    """Makes the rest of an answer, into its log."""

    def __call__(
        self, source: StreamLog, origin: Origin, ask: Ask, caller: Caller, refusal: HeadraceError | None, ids: int, /
    ) -> None: ...


def _draining() -> Draining:
    return Draining("the server is shutting down; go on reading at another one")


def no_answer() -> EngineUnavailable:
    return EngineUnavailable("the store of streams does not answer; try again shortly")


@dataclass(slots=True, eq=False)
class Mirror:
    """What is known of one stream of another server."""

    log: StreamLog
    origin: Origin
    caller: Caller
    """Who reads it, and pays for what is gone on with."""
    ids: list[int] = field(default_factory=list)
    exact: bool = True
    whole: bool = True
    tokens: int = 0
    length: int = 0
    stated: int = 0
    """Position up to which the states tell of it."""
    behind: bool = False
    """What comes next is no longer there."""
    task: asyncio.Task[None] | None = None

    def take(self, entries: list[Entry]) -> None:
        """What Redis has next, up to what is missing. The end, if it is among them, ends the log."""
        source = self.log
        for entry in entries:
            start = entry.position - (weight_of(entry.block) if entry.block else 1)
            if source.last == 0 and start > 0:
                source.first = source.last = start  # its beginning is no longer kept
            elif start > source.last:
                self.behind = True
                return
            if entry.block:
                source.append(entry.block, entry.position)
            state = entry.state
            if state is None:
                continue
            if state.end is not None:
                source.end(state.end)
                return
            self.ids[state.start :] = state.ids
            self.exact, self.whole = self.exact and state.exact, self.whole and state.whole
            self.tokens, self.length, self.stated = state.tokens, state.length, entry.position

    def told(self) -> Told | None:
        """What another engine can go on from; None: nothing was said. Raises HeadraceError if none can."""
        source = self.log
        if not source.last:
            return None
        if not self.whole or source.first > 0 or self.origin.fields is None:
            raise EngineUnavailable("the server that wrote this answer is gone, and nobody can go on with it")
        text = "".join(text_of(block) for _, block in source.since(0))
        exact = self.exact and self.stated == source.last
        exact = exact and len(self.ids) == self.tokens and len(text) == self.length
        return Told(text, tuple(self.ids) if exact else None, self.tokens)


class LogMirrors:
    """`adopt` goes on with a stream whose server is gone."""

    def __init__(self, store: LogStore, streams: Streams, adopt: Adopt, clock: Clock) -> None:
        self._store = store
        self._streams = streams
        self._adopt = adopt
        self._clock = clock
        self._mirrors: dict[str, Mirror] = {}
        self._draining = False
        self._broken = -math.inf
        """When Redis last did not answer."""
        streams.unread = self._unread

    def __len__(self) -> int:
        return len(self._mirrors)

    async def open(self, id: str, caller: Caller) -> StreamLog | None:
        """The log of a stream that another server writes or wrote; None if the caller has none of that name. Raises
        EngineUnavailable if that cannot be told now, and Draining."""
        owner = owner_of(caller)
        self._check_draining()
        origin = await self._store.origin(id)
        entries = await self._store.entries(id, 0) if isinstance(origin, Origin) else []
        if origin is None or entries is None:
            self._broken = self._clock()
            raise no_answer()
        if not isinstance(origin, Origin) or origin.owner != owner:
            return None
        known = self._streams.find(id, owner)
        if known is not None:
            return known
        self._check_draining()
        source = self._streams.open(owner, id=id, digest=origin.digest)
        source.kept = False
        if origin.plain:
            source.error_event = plain_error_event
        source.shared_key, source.request = origin.key, origin.fields
        source.begin(())
        mirror = Mirror(source, origin, caller)
        mirror.take(entries)
        self._mirrors[id] = mirror
        mirror.task = asyncio.get_running_loop().create_task(self._run(mirror))
        return source

    def drain(self) -> None:
        """Send the readers to other servers, those too that are still to come."""
        self._draining = True
        error = _draining()
        for mirror in tuple(self._mirrors.values()):
            mirror.log.end("lost", mirror.log.error_event(error))
            self._unread(mirror.log)

    async def close(self) -> None:
        tasks = [mirror.task for mirror in self._mirrors.values() if mirror.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _check_draining(self) -> None:
        if self._draining:
            raise _draining()

    def _unread(self, source: StreamLog) -> None:
        """At once, so that nobody finds what is about to be given up."""
        mirror = self._mirrors.get(source.id)
        if mirror is not None and mirror.log is source:
            self._close(mirror, b"")
            if mirror.task is not None:
                mirror.task.cancel()

    def _close(self, mirror: Mirror, farewell: bytes) -> None:
        """It is read along no further."""
        del self._mirrors[mirror.log.id]
        mirror.log.end("lost", farewell)
        self._streams.end(mirror.log)

    # The task ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self, mirror: Mirror) -> None:
        source = mirror.log
        farewell = b""
        try:
            if await self._follow(mirror):
                del self._mirrors[source.id]
                return
        except HeadraceError as error:
            farewell = source.error_event(error)
        except Exception as error:
            report_fault(log, error, source.id)
            farewell = source.error_event(EngineUnavailable("the stream cannot be read at the moment; try again"))
        finally:
            if self._mirrors.get(source.id) is mirror:
                self._close(mirror, farewell)

    async def _follow(self, mirror: Mirror) -> bool:
        """To its end, or True: it is ours now. Raises EngineUnavailable, Gone."""
        source, store = mirror.log, self._store
        heard = self._clock()
        if store.down:
            self._broken = heard
        seconds = 0.001  # who is gone already need not be waited for
        while source.ended is None:
            asked = self._clock()
            entries = await store.wait(source.id, source.last, seconds)
            late = asked + seconds + store.lease_s / 4
            seconds = min(WAIT_S, store.lease_s / 2)
            held = True if entries else await store.held(source.id)
            if entries is None or held is None or self._clock() > late:
                self._broken = self._clock()
            if entries is None or held is None:
                if self._clock() - heard > PATIENCE * store.lease_s:
                    raise no_answer()
                await asyncio.sleep(RETRY_S)
                continue
            heard = self._clock()
            mirror.take(entries)
            if mirror.behind:
                raise Gone("what comes next in this stream was let go before this server had it")
            # A Redis that was away took no lease's prolongation: who lives has a lease's time to make up for it.
            known = self._clock() - self._broken >= store.lease_s
            if not held and known and source.ended is None and await self._take(mirror):
                return True
        return False

    async def _take(self, mirror: Mirror) -> bool:
        """The server is gone: go on in its place, unless somebody else does. False: not yet."""
        source, origin = mirror.log, mirror.origin
        if await self._store.take(source.id) is not True:
            return False
        entries: list[Entry] | None = []
        while (
            source.ended is None
            and not mirror.behind
            and (entries := await self._store.entries(source.id, source.last))
        ):
            mirror.take(entries)
        if entries is None or source.ended is not None or mirror.behind:
            return False
        blocks = source.since(source.first)
        if (reason := ending_of([block for _, block in blocks])) is not None:
            # It died between its last event and saying that this was the last: only that is missing.
            end = Entry(source.last + 1, b"", State(end=reason))
            await self._store.put(
                [Put(source.id, origin.key, b"", source.last, 0, False, self._streams.limits.keep_s, [end])]
            )
            mirror.take([end])
            return False
        refusal: HeadraceError | None = None
        told: Told | None = None
        try:
            told = mirror.told()
        except HeadraceError as error:
            refusal = error
        source.kept = True
        self._streams.figures.adopted += 1
        if blocks:
            # The answer's name is what its reader saw: it may be that of a server behind the one that is gone.
            origin = msgspec.structs.replace(origin, identity=identity_of(blocks[0][1]) or origin.identity)
        ids = 0 if told is None or told.ids is None else len(told.ids)
        self._adopt(source, origin, origin.ask(mirror.caller.salt, told), mirror.caller, refusal, ids)
        return True
