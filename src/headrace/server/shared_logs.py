"""Everything that servers behind one load balancer do for each other's streams, in one place."""

from __future__ import annotations

import asyncio
import secrets

from headrace.core.clock import Clock
from headrace.gateway.guard import Caller
from headrace.gateway.shared import SharedRedis
from headrace.observe.record import Record
from headrace.server.attempts import Attempts
from headrace.server.live import Live
from headrace.server.log_mirror import Adopt, LogMirrors, no_answer
from headrace.server.log_redis import LogStore, Origin, key_hash
from headrace.server.log_writer import LogWriter, Writing, packed
from headrace.server.plain import PATH as PLAIN_PATH
from headrace.server.streamlog import StreamLog
from headrace.server.streams import Streams, owner_of

CLAIM_S = 2.0
"""How long a key is taken before anything is known of its stream."""
OPEN_TRIES = 40


class SharedLogs:
    """`adopt` goes on with the stream of a server that is gone."""

    def __init__(self, shared: SharedRedis, streams: Streams, adopt: Adopt, clock: Clock, *, lease_s: float) -> None:
        self.store = LogStore(shared, secrets.token_hex(8), lease_s=lease_s)
        self.writer = LogWriter(self.store, streams, clock)
        self.mirrors = LogMirrors(self.store, streams, adopt, clock)
        self._streams = streams

    def write(
        self, source: StreamLog, live: Live, attempts: Attempts, identity: tuple[str, int], record: Record, *, ids: int
    ) -> None:
        """A generation begins to fill the log. `ids`: tokens that Redis was told of by the server before."""
        ask, key = attempts.ask, source.shared_key
        fields, source.request = source.request, None  # from here on who writes it keeps it

        def origin() -> bytes:
            return packed(
                Origin(
                    source.owner, source.digest, key, ask.chat, ask.model, fields, ask.size,
                    ask.seed, ask.options.priority, identity, attempts.family, record.request_id, record.method,
                    record.route, record.key or "", record.route == PLAIN_PATH, attempts.sampling,
                )
            )  # fmt: skip

        self.writer.add(
            Writing(
                source, live, origin, lambda: (attempts.family, attempts.sampling), key, written=source.last, ids=ids
            )
        )

    async def open(self, id: str, caller: Caller) -> StreamLog | None:
        """See LogMirrors."""
        return await self.mirrors.open(id, caller)

    async def claim(self, source: StreamLog) -> str | None:
        """Take the log's idempotency key; the id of the stream that has it already, None: it is taken now, or nobody
        can tell."""
        source.shared_key = key_hash(source.owner, source.key)
        # Briefly: what is written of the stream prolongs it, and who dies before that must not block the key.
        id = await self.store.claim(source.shared_key, source.id, max(CLAIM_S, self.store.lease_s))
        return None if id == source.id else id

    async def free(self, source: StreamLog) -> None:
        """Give the log's key back: it was refused."""
        hash = source.shared_key
        if hash:
            self.writer.free(source)
            await self.store.free(hash, source.id)

    async def open_soon(self, id: str, caller: Caller) -> StreamLog | None:
        """As `open`, for a stream that is only just being begun at another server."""
        for _ in range(OPEN_TRIES):
            found = await self.open(id, caller)
            if found is not None:
                return found
            await asyncio.sleep(CLAIM_S / OPEN_TRIES)
        return None

    async def stop(self, id: str, caller: Caller) -> str | None:
        """Have it stopped, wherever it is written; how it ended if it has, None if there is none. Raises
        EngineUnavailable if that cannot be told, or done, now."""
        origin = await self.store.origin(id)
        if origin is None:
            raise no_answer()
        if not isinstance(origin, Origin) or origin.owner != owner_of(caller):
            return None
        newest = await self.store.newest(id)
        if newest is None:
            raise no_answer()
        if not isinstance(newest, bool) and newest.state is not None and newest.state.end:
            return newest.state.end
        if not await self.store.ask_stop(id, self._streams.limits.keep_s + 1.0):
            raise no_answer()
        return "stopping"

    async def close(self) -> None:
        await self.mirrors.close()
        await self.writer.close()
