r"""One connection that reads a log, from any position, live or after its end.

    log ── push ──▶ keeps up: straight to the socket
        ── read ──▶ does not: as much as fits, when the socket takes it

Rules: a reader is sent each block once and in order, and ends when the log does. It is never silent for longer than a
heartbeat: `: hb\n`, without an empty line, because a client that has seen an id takes each of those for an event. A
reader that takes nothing is dropped; neither the log nor other readers notice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import Gone
from headrace.server.exchange import ClientGone, Exchange, Receive
from headrace.server.stream import STREAM_HEADERS, STREAM_NAME, StreamLimits
from headrace.server.streamlog import Bell, StreamLog
from headrace.server.ticker import Ticker

BEAT = b": hb\n"
PIECE = 256 * 1024
"""Bytes from which on a write is not made larger."""

log = logging.getLogger(__name__)


class Reader:
    """`after`: the position it has. `left`: called when the client leaves before there was a head."""

    def __init__(
        self,
        exchange: Exchange,
        source: StreamLog,
        after: int,
        limits: StreamLimits,
        clock: Clock,
        *,
        left: Callable[[], None] | None = None,
    ) -> None:
        self.position = after
        self._exchange = exchange
        self._log = source
        self._limits = limits
        self._clock = clock
        self._left = left
        self._bell = Bell()
        self._gone = False
        self._beat_due = False
        self._writing: float | None = None
        self._last_write = 0.0
        self._early = 0.0
        self._dropped = False
        self._task: asyncio.Task[Any] | None = None

    async def run(self, ticker: Ticker) -> None:
        """Write to the end. Raises ClientGone, and before the head what the stream was refused for, or Gone."""
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._early = ticker.interval
        on_gone, watcher = self._exchange.on_gone, None
        if on_gone is not None:
            on_gone(self._leave)
        else:
            watcher = loop.create_task(self._watch(self._exchange.receive))
        ticker.add(self)
        try:
            await self._run()
        except asyncio.CancelledError:
            if not self._dropped or self._task is None:
                raise
            self._task.uncancel()
            raise ClientGone from None
        finally:
            ticker.remove(self)
            if on_gone is not None:
                on_gone(None)
            if watcher is not None:
                watcher.cancel()
                await asyncio.wait((watcher,))

    # Follower, Ticking ────────────────────────────────────────────────────────────────────────────────────────────────

    def push(self, start: int, end: int, frame: bytes) -> None:
        channel = self._exchange.channel
        if start == self.position and self._bell.waiting and not self._beat_due and self._exchange.started:
            if channel is not None and channel.ready():
                self.position = end
                self._last_write = self._clock()
                channel.write(frame)
                return
        self._bell.ring()

    def wake(self) -> None:
        self._bell.ring()

    def tick(self, now: float) -> float | None:
        """See whether a heartbeat or the end of our patience is due at `now`. When to look again: no write that begins
        or ends after `now` brings anything due sooner."""
        limits = self._limits
        until = now + min(limits.heartbeat_s, limits.write_timeout_s)
        if self._writing is not None:
            due = self._writing + limits.write_timeout_s
            if now >= due:
                self._drop()
                return None
        elif not self._exchange.started:
            return until
        else:
            due = self._last_write + limits.heartbeat_s
            if now + self._early >= due:
                channel = self._exchange.channel
                if channel is None or not self._bell.waiting or not channel.ready():
                    self._beat_due = True
                    self._bell.ring()
                    return None
                # Without waking the task: of ten thousand silent readers many are due at the same time.
                channel.write(BEAT)
                self._last_write = now
                due = now + limits.heartbeat_s
        return min(until, due)

    # ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        source = self._log
        while not source.begun:
            if source.refusal is not None:
                raise source.refusal
            if self._gone:
                if self._left is not None:
                    self._left()
                raise ClientGone
            await self._bell.wait()
        pending, _ = source.read(self.position, PIECE)
        await self._exchange.start(200, self._headers())
        if self._exchange.method == "HEAD":
            await self._exchange.write(b"", more=False)
            return
        self._last_write = self._clock()
        # Some proxies keep a head back until a body follows: it gets a comment.
        self._beat_due = not pending
        while True:
            if self._gone:
                raise ClientGone
            try:
                body, position = source.read(self.position, PIECE)
                source.check_end(position)
            except Gone as error:
                # It was too slow for what is kept, or what it had of a server gone did not come again.
                self._exchange.record.outcome = "error"
                await self._write(self._log.error_event(error), more=False)
                return
            ended = source.ended is not None and position >= source.last
            if body or ended:
                self.position = position
                await self._write(body + source.farewell if ended else body, more=not ended)
                if ended:
                    return
            elif self._beat_due:
                await self._write(BEAT, more=True)
            else:
                await self._bell.wait()

    def _headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return self._log.headers or (*STREAM_HEADERS, (STREAM_NAME, self._log.name))

    async def _write(self, body: bytes, *, more: bool) -> None:
        self._writing = self._clock()
        await self._exchange.write(body, more=more)
        self._writing = None
        self._last_write = self._clock()
        self._beat_due = False

    async def _watch(self, receive: Receive) -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        except Exception as error:
            log.debug("receive failed: %s", type(error).__name__)
        self._leave()

    def _leave(self) -> None:
        self._gone = True
        self._bell.ring()

    def _drop(self) -> None:
        """It takes nothing: give up on it."""
        if self._dropped:
            return
        self._dropped = True
        log.warning("request %s: the reader took nothing for %g s and was dropped",
                    self._exchange.request_id, self._limits.write_timeout_s)  # fmt: skip
        self._gone = True
        if self._exchange.abort is not None:
            self._exchange.abort()
        elif self._task is not None:
            self._task.cancel()
