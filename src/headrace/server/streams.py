"""All streams of this process: found by their id or by the key they were asked with, stopped, and forgotten in time.

    open ─▶ written ──────────▶ ended ── keep_s ──▶ forgotten
              │ nobody reads         ▲    └ sooner, oldest first, when all together are over total_bytes
              └── grace_s ─ stopped ─┘

Rules: whoever is not the owner finds nothing, as if it had never been. What is due is done by `sweep`, which looks at
nothing else; one timer, armed only while something will be due. Of what has ended the oldest makes room first, whoever
still reads it: a slow reader must not cost others their streams.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.core.clock import Clock
from headrace.core.errors import Abandoned, HeadraceError, StreamNotFound
from headrace.gateway.guard import Caller
from headrace.observe.stream_metrics import StreamFigures
from headrace.server.streamlog import Follower, StreamLog

MIB = 2**20


@dataclass(frozen=True, slots=True)
class LogLimits:
    """What resumable streams may cost."""

    grace_s: float = 30.0
    """How long a generation goes on that nobody reads."""
    keep_s: float = 300.0
    """How long a log can be read after its end."""
    max_bytes: int = 4 * MIB
    """Of one stream; its oldest events go first."""
    total_bytes: int = 256 * MIB
    """Of all streams."""


def owner_of(caller: Caller) -> str:
    """Whom a stream belongs to; it tells neither salt nor name."""
    whole = "\0".join((caller.salt, caller.name, caller.owner))
    return hashlib.sha256(whole.encode()).hexdigest()[:32]


def not_found() -> StreamNotFound:
    return StreamNotFound("there is no such stream, or it is no longer kept")


class Streams:
    """`new_id` makes ids that cannot be guessed: letters, digits and `_` only."""

    def __init__(
        self,
        limits: LogLimits,
        clock: Clock,
        figures: StreamFigures,
        *,
        new_id: Callable[[], str] = lambda: secrets.token_hex(12),
    ) -> None:
        self.limits = limits
        self.new_id = new_id
        self.figures = figures
        self.unread: Callable[[StreamLog], None] | None = None
        """Told of a log that is only read along, and by nobody any more."""
        self._clock = clock
        self._logs: dict[str, StreamLog] = {}
        self._keys: dict[tuple[str, str], StreamLog] = {}
        self._plain: dict[str, tuple[str, Callable[[HeadraceError], None]]] = {}
        # Both in the order of their `due`, because what is added last has as long to wait as all before it.
        self._ended: OrderedDict[StreamLog, None] = OrderedDict()
        self._unread: OrderedDict[StreamLog, None] = OrderedDict()
        self._lingering: OrderedDict[StreamLog, None] = OrderedDict()
        """Forgotten, and still read, or written elsewhere."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0

    def __len__(self) -> int:
        return len(self._logs)

    def __iter__(self) -> Iterator[StreamLog]:
        return iter(tuple(self._logs.values()))

    # Logs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, owner: str, *, id: str | None = None, key: str = "", digest: bytes = b"") -> StreamLog:
        """A new log; it can be found from now on."""
        limits = self.limits
        log = StreamLog(id or self.new_id(), owner, max_bytes=limits.max_bytes, grown=self._grown)
        log.key, log.digest = key, digest
        self._logs[log.id] = log
        if key:
            self._keys[owner, key] = log
        self.figures.open += 1
        return log

    def find(self, id: str, owner: str) -> StreamLog | None:
        log = self._logs.get(id)
        return log if log is not None and log.owner == owner else None

    def with_key(self, owner: str, key: str) -> StreamLog | None:
        """The log that was asked for with that idempotency key."""
        return self._keys.get((owner, key))

    def end(self, log: StreamLog) -> None:
        """Called once for each log: when it has ended or was refused."""
        self.figures.open -= 1
        self.figures.kept += 1
        if log.refusal is not None or log.ended == "lost":
            self.forget(log)
            return
        if log.kept:
            self.figures.ended[log.ended or "failed"] += 1
        self._unread.pop(log, None)
        self._due(log, self._ended, self.limits.keep_s)
        self._shrink()

    def forget(self, log: StreamLog) -> None:
        """Nobody finds it any more; those who read it are not disturbed."""
        if self._logs.get(log.id) is not log:
            return
        del self._logs[log.id]
        if log.key and self._keys.get((log.owner, log.key)) is log:
            del self._keys[log.owner, log.key]
        self.figures.kept -= 1
        log.due = None
        self._ended.pop(log, None)
        self._unread.pop(log, None)
        self._lingering[log] = None
        self.tidy(log)

    def tidy(self, log: StreamLog) -> None:
        """Give the memory back of one that nobody finds, reads or writes elsewhere any more."""
        if self._logs.get(log.id) is not log and not log.readers and log.changed is None:
            self._lingering.pop(log, None)
            log.clear()

    # Readers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def join(self, log: StreamLog, reader: Follower) -> None:
        log.readers.add(reader)
        self.figures.readers += 1
        if log.ended is None:
            log.due = None
            self._unread.pop(log, None)

    def leave(self, log: StreamLog, reader: Follower) -> None:
        log.readers.discard(reader)
        self.figures.readers -= 1
        if log.readers:
            return
        if self._logs.get(log.id) is not log:
            self.tidy(log)
        elif log.ended is None and log.kept:
            self._due(log, self._unread, self.limits.grace_s)
        else:
            self.release(log)

    def release(self, log: StreamLog) -> None:
        """Who looked it up is done with it: one that is only read along goes with its last reader."""
        if not log.kept and not log.readers:
            if log.ended is not None:
                self.forget(log)
            elif self.unread is not None:
                self.unread(log)

    # Streams that cannot be resumed ───────────────────────────────────────────────────────────────────────────────────

    def register(self, id: str, owner: str, stop: Callable[[HeadraceError], None]) -> None:
        """One that can only be stopped."""
        self._plain[id] = (owner, stop)

    def unregister(self, id: str) -> None:
        self._plain.pop(id, None)

    def plain(self, id: str, owner: str) -> Callable[[HeadraceError], None] | None:
        """What stops it."""
        found = self._plain.get(id)
        return found[1] if found is not None and found[0] == owner else None

    # Time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def sweep(self, now: float) -> None:
        """Do what is due at `now`."""
        while (log := _first_due(self._ended, now)) is not None:
            self.forget(log)
        while (log := _first_due(self._unread, now)) is not None:
            del self._unread[log]
            log.due = None
            grace = self.limits.grace_s
            log.fail(Abandoned(f"nobody read this stream for {grace:g} s, so it was stopped"))

    def close(self) -> None:
        """No timer is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self, log: StreamLog, queue: OrderedDict[StreamLog, None], seconds: float) -> None:
        log.due = self._clock() + seconds
        queue[log] = None
        queue.move_to_end(log)
        if self._timer is None or log.due < self._timer_due:
            self._arm(log.due)

    def _arm(self, due: float) -> None:
        self.close()
        self._timer_due = due
        self._timer = asyncio.get_running_loop().call_later(max(0.01, due - self._clock()), self._fire)

    def _fire(self) -> None:
        self._timer = None
        self.sweep(self._clock())
        firsts = [next(iter(queue)).due for queue in (self._ended, self._unread) if queue]
        if firsts:
            self._arm(min(due for due in firsts if due is not None))

    # Bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _grown(self, change: int) -> None:
        self.figures.bytes += change
        if change > 0 and self.figures.bytes > self.limits.total_bytes:
            self._shrink()

    def _shrink(self) -> None:
        """Below the bound of all: first what has ended, the oldest first; then the largest lose their oldest events."""
        figures, most = self.figures, self.limits.total_bytes
        if figures.bytes <= most:
            return
        most -= most // 16  # so that not every further event has to make room
        for log in (*self._lingering, *self._ended):
            if figures.bytes <= most:
                return
            self.forget(log)
            self._lingering.pop(log, None)
            log.clear()  # who still reads it is told so
        for log in sorted(self, key=lambda log: -log.bytes):
            if figures.bytes <= most:
                return
            log.shrink(max(0, log.bytes - (figures.bytes - most)))


def _first_due(queue: OrderedDict[StreamLog, None], now: float) -> StreamLog | None:
    """The first one, if its time has come."""
    first = next(iter(queue), None)
    return None if first is None or first.due is None or now < first.due else first
