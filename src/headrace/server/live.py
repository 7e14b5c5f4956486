"""The generations of one response while they run, and the client they run for.

    client ── receive ──▶ watcher ──┐ leaves
    server ── fail ─────────────────┤                 ┌▶ cancel ──▶ engine
    engine ── events ──▶ mailbox ───┴▶ the response ──┘

Rules: one watcher a response, from before the submit to the end, so that a client that leaves stops the engine at
once and not at the next write. Whatever way a response ends, `close` leaves no live rid and no watcher behind.
Tokens are counted here and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import math

from headrace.core.clock import Clock
from headrace.core.errors import Draining, EngineFailed, EngineUnavailable, HeadraceError, Overloaded, ServiceError
from headrace.core.events import Admitted, Delta, Event, Failed, Finished
from headrace.core.timeline import Timeline
from headrace.engines.base import StreamEngine
from headrace.protocol.answer import Usage
from headrace.server.exchange import ClientGone, Receive
from headrace.server.mailbox import Mailbox
from headrace.server.model import Job

MAX_PENDING_EVENTS = 256
MAX_PENDING_TEXT = 256 * 1024

log = logging.getLogger(__name__)

_ERRORS: dict[str | None, type[ServiceError]] = {
    error.code: error for error in (Overloaded, EngineUnavailable, Draining, EngineFailed)
}


class Live:
    """One response's share of an engine. Owned by the task that answers; sinks and watcher run on the same loop."""

    def __init__(
        self,
        engine: StreamEngine,
        timeline: Timeline,
        clock: Clock,
        *,
        max_pending: int = MAX_PENDING_EVENTS,
        queue_timeout_s: float = math.inf,
    ) -> None:
        self.timeline = timeline
        self.mailbox = Mailbox(
            max_events=max_pending, max_text=MAX_PENDING_TEXT, pause=self._pause, resume=self._resume
        )
        self.gone = False
        """The client left."""
        self.failure: HeadraceError | None = None
        """Why there will be no more events, if that is so."""
        self.remaining = 0
        """Choices without a `Finished`."""
        self.queued = True
        """The engine has not begun with any of it."""
        self._queue_timeout_s = queue_timeout_s
        self._engine = engine
        self._clock = clock
        self._open: dict[int, int] = {}
        """rid → choices of it that are not finished."""
        self._base: dict[int, int] = {}
        """rid → choice index of its first choice."""
        self._cached = 0
        self._drawn: list[int] = []
        self._watcher: asyncio.Task[None] | None = None

    def watch(self, receive: Receive) -> None:
        """Start to look out for the client's leaving. The body must have been read."""
        self._watcher = asyncio.get_running_loop().create_task(self._watch(receive))

    def submit(self, job: Job) -> None:
        """Hand everything to the engine. Raises the engine's refusal; what it took until then is cancelled."""
        timeline = self.timeline
        self.remaining = job.choices
        self._drawn = [0] * job.choices
        timeline.prompt_tokens = job.prompt_tokens
        timeline.tokenized = self._clock()
        try:
            base = 0
            for generation in job.generations:
                self._base[generation.rid] = base
                self._open[generation.rid] = generation.n
                base += generation.n
                self._engine.submit(generation, self.mailbox.put)
        except BaseException:
            self.cancel()
            raise
        if not job.generations:
            # Nothing was asked for beyond the prompt itself: every choice is complete as it stands.
            for index in range(job.choices):
                self.mailbox.put(Finished(rid=0, index=index, reason="length", completion_tokens=0))

    def book(self, event: Event) -> int:
        """Take an event into account; its choice's index in the response, -1 for `Failed`."""
        kind = type(event)
        if kind is Failed:
            assert isinstance(event, Failed)
            self._open.pop(event.rid, None)
            self.failure = _ERRORS.get(event.code, EngineFailed)(event.message)
            return -1
        assert not isinstance(event, Failed)
        self.queued = False
        index = self.index(event)
        if isinstance(event, Delta):
            self._drawn[index] += event.tokens
            if event.marks is not None and self.timeline.scheduled is None:
                self.timeline.mark(event.marks, self._engine.clock_offset)
        elif isinstance(event, Finished):
            self._drawn[index] = event.completion_tokens
            self.remaining -= 1
            self._release(event.rid)
        elif isinstance(event, Admitted) and event.index == 0:
            # The choices of a prompt share it: only the first says what the cache was worth.
            self._cached += event.cached
            self.timeline.cached_tokens = self._cached
        return index

    def index(self, event: Admitted | Delta | Finished) -> int:
        """The event's choice in the response."""
        return self._base.get(event.rid, 0) + event.index

    def check(self) -> None:
        """Raises ClientGone, or the failure."""
        if self.gone:
            raise ClientGone
        if self.failure is not None:
            raise self.failure

    def tick(self, now: float) -> None:
        """Give up on an engine that did not begin in time; at `now` nothing of the response has been sent yet."""
        submitted = self.timeline.tokenized
        if not self.queued or submitted is None or self.failure is not None or not self._open:
            return
        if now - submitted >= self._queue_timeout_s:
            self.fail(
                Overloaded(
                    f"no place became free in {now - submitted:.0f} s, the limit is {self._queue_timeout_s:g} s; "
                    "try again later",
                    reason="queue_timeout",
                )
            )

    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            prompt_tokens=self.timeline.prompt_tokens, completion_tokens=sum(self._drawn), cached_tokens=self._cached
        )

    def leave(self) -> None:
        """The client is gone: stop the engine, tell the response."""
        self.gone = True
        self.cancel()
        self.mailbox.wake()

    def fail(self, error: HeadraceError) -> None:
        """End the response with an error from outside."""
        if self.failure is None:
            self.failure = error
        self.cancel()
        self.mailbox.wake()

    def cancel(self) -> None:
        """Stop everything that still runs."""
        while self._open:
            rid, _ = self._open.popitem()
            self._engine.cancel(rid)

    async def close(self) -> None:
        """Stop everything, the watcher too, whatever the state."""
        self.cancel()
        watcher = self._watcher
        if watcher is not None:
            watcher.cancel()
            await asyncio.wait((watcher,))

    async def _watch(self, receive: Receive) -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        except Exception as error:
            # A server that cannot say what its client does has lost it.
            log.debug("receive failed: %s", type(error).__name__)
        self.leave()

    def _release(self, rid: int) -> None:
        left = self._open.get(rid, 0) - 1
        if left > 0:
            self._open[rid] = left
        else:
            self._open.pop(rid, None)

    def _pause(self) -> None:
        for rid in self._open:
            self._engine.pause(rid)

    def _resume(self) -> None:
        for rid in self._open:
            self._engine.resume(rid)
