"""What was sent of one stream, so that it can be sent again: to whoever lost it, or reads along.

    stream ── append ──▶ [ block block … ] ──▶ any number of readers, each from where it is
                          └ oldest go first when there are too many bytes

Rules: everything on the event loop's thread; a reader never holds up an append. A log begins once (`begin`) or was
refused (`refuse`), and it ends once, with a reason that stays. What a reader is pushed goes straight on to its socket
if it keeps up; else it reads from the log at its own pace, which costs no memory beyond the log's own.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from typing import Literal, Protocol

from headrace.core.errors import Gone, HeadraceError
from headrace.protocol.block import cut, weight_of
from headrace.protocol.envelope import error_event

OVERHEAD = 96
"""Bytes that a block costs beside its own: objects and their places in two lists."""

Ended = Literal["done", "stopped", "abandoned", "failed", "lost"]
"""Why a log has an end: the answer was complete; `DELETE`; nobody read it any more; it failed, and the log says how; it
cannot be read any further here, which says nothing of the answer."""


class Follower(Protocol):
    """A reader. Hashable by identity."""

    def push(self, start: int, end: int, frame: bytes) -> None:
        """A block was appended: from position `start` to `end`, with its id in front. Does not raise."""
        ...

    def wake(self) -> None:
        """Something else happened: begin, end."""
        ...


class Writer(Protocol):
    """A generation, as those who read what it says can act on it."""

    def fail(self, error: HeadraceError, /) -> None:
        """End it with that error."""
        ...

    def leave(self) -> None:
        """Nobody waits for it."""
        ...


class StreamLog:
    """One stream's events. `owner`: whom it belongs to; `grown` is told by how many bytes it grew or shrank."""

    def __init__(self, id: str, owner: str, *, max_bytes: int, grown: Callable[[int], None]) -> None:
        self.id = id
        self.owner = owner
        self.name = id.encode()
        self.last = 0
        """Where the last block ends."""
        self.first = 0
        """Where the first block that is still there begins."""
        self.bytes = 0
        self.begun = False
        self.headers: tuple[tuple[bytes, bytes], ...] = ()
        self.refusal: HeadraceError | None = None
        """Why there is no stream: it was refused before it began."""
        self.ended: Ended | None = None
        self.farewell = b""
        """A last word that is no part of the log: whoever resumes elsewhere does not see it."""
        self.readers: set[Follower] = set()
        self.writer: Writer | None = None
        """The generation that writes it. None: that is not here, has not begun, or is over."""
        self.stopping: HeadraceError | None = None
        """Why its generation is to end; one that has not begun yet ends with its beginning."""
        self.unwanted = False
        """Whoever asked for it left before its generation began."""
        self.changed: Callable[[StreamLog], None] | None = None
        """Told of blocks and of the end."""
        self.due: float | None = None
        """When something must be done about it: its end is old, or nobody reads it."""
        self.error_event = error_event
        """How an error is said in it."""
        self.digest = b""
        """Of the request that it answers."""
        self.request: bytes | None = None
        """Its JSON, for other servers; None: too large to be kept."""
        self.key = ""
        """The idempotency key it was asked with."""
        self.shared_key = ""
        """What other servers know that key by."""
        self.kept = True
        """A generation goes on without readers, and what it said stays; else the log is only read along."""
        self._max_bytes = max_bytes
        self._grown = grown
        self._blocks: list[bytes] = []
        self._ends: list[int] = []
        self._gone = 0
        """Blocks at the front of both lists that are no longer there."""
        self._prefix = f"id: {id}-".encode()

    def __repr__(self) -> str:
        return f"<StreamLog [{self.first}…{self.last}, {self.ended or 'open'}]>"

    # What writes ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        """The head is known: there will be a stream."""
        self.begun = True
        self.headers = headers
        self._wake()

    def refuse(self, error: HeadraceError) -> None:
        """There will be none."""
        self.refusal = error
        self._wake()

    def append(self, block: bytes, end: int | None = None) -> None:
        """One event. `end`: its position, where it was given one elsewhere."""
        start = self.last
        self.last = end = start + weight_of(block) if end is None else end
        self._blocks.append(block)
        self._ends.append(end)
        self._count(len(block) + OVERHEAD)
        if self.readers:
            frame = self._frame(end, block)
            for reader in tuple(self.readers):
                reader.push(start, end, frame)
        if self.bytes > self._max_bytes:
            self.shrink(self._max_bytes)
        if self.changed is not None:
            self.changed(self)

    def end(self, reason: Ended, farewell: bytes = b"") -> None:
        """Nothing more comes. Only the first call counts."""
        if self.ended is not None:
            return
        self.ended = reason
        self.farewell = farewell
        self.writer = None
        self._wake()
        if self.changed is not None:
            self.changed(self)

    def fail(self, error: HeadraceError) -> None:
        """Let its generation end with that error, now or as soon as it begins. Only the first call counts."""
        self.stopping = self.stopping or error
        if self.writer is not None:
            self.writer.fail(self.stopping)

    def shrink(self, limit: int) -> None:
        """Let the oldest blocks go until `limit` bytes are left; the last block stays."""
        while self.bytes > limit and self._gone < len(self._blocks) - 1:
            self._count(-len(self._blocks[self._gone]) - OVERHEAD)
            self._blocks[self._gone] = b""
            self.first = self._ends[self._gone]
            self._gone += 1
        if self._gone * 2 > len(self._blocks):
            del self._blocks[: self._gone], self._ends[: self._gone]
            self._gone = 0

    def clear(self) -> None:
        """Forget everything: nobody can find it any more."""
        self._count(-self.bytes)
        self._blocks, self._ends, self._gone = [], [], 0
        self.first = self.last

    # What reads ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, after: int, limit: int) -> tuple[bytes, int]:
        """What comes after that position, about `limit` bytes at most, framed with ids; and where that ends. A block
        that `after` is inside of gives its rest. Raises Gone if some of it is no longer there."""
        if after < self.first:
            raise Gone("the beginning of this stream is no longer kept; what is asked for lies before it")
        parts: list[bytes] = []
        size = 0
        index = bisect_right(self._ends, after, self._gone)
        while index < len(self._ends) and size < limit:
            block, end = self._blocks[index], self._ends[index]
            start = self._ends[index - 1] if index > self._gone else self.first
            if start < after:
                block = cut(block, after - start)
            parts.append(self._frame(end, block))
            size += len(block)
            after = end
            index += 1
        return b"".join(parts), after

    def check_end(self, position: int) -> None:
        """Raises Gone if the stream has ended before that position."""
        if self.ended is not None and not self.farewell and position > self.last:
            raise Gone(f"this stream ended at {self.last}; what is asked for begins at {position}")

    def since(self, after: int) -> list[tuple[int, bytes]]:
        """(end, block) of what comes after that position. Raises Gone."""
        if after < self.first:
            raise Gone("the beginning of this stream is no longer kept")
        index = bisect_right(self._ends, after, self._gone)
        return list(zip(self._ends[index:], self._blocks[index:], strict=True))

    def _frame(self, end: int, block: bytes) -> bytes:
        return b"%b%d\n%b" % (self._prefix, end, block)

    def _count(self, change: int) -> None:
        self.bytes += change
        self._grown(change)

    def _wake(self) -> None:
        for reader in tuple(self.readers):
            reader.wake()


class Bell:
    """Lets one task wait for something that is told by plain calls."""

    __slots__ = ("_rung", "_waiter")

    def __init__(self) -> None:
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def waiting(self) -> bool:
        """Somebody waits, and nothing was told."""
        return self._waiter is not None and not self._rung

    def ring(self) -> None:
        self._rung = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Until a `ring` since the last `wait`."""
        if not self._rung:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._rung = False
