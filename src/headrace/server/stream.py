"""A response that is written while it is made: an event stream.

The life of a stream:

    submit ─▶ queued: nothing is sent ─▶ admitted ─▶ first text, end or failure ─▶ head + body ─▶ … ─▶ end
                                             └─ header_hold_s without text ─▶ head, comments ─┘

Rules: the head is held until the first text, so that its status is honest and its `Server-Timing` complete; while
the request is queued nothing at all is sent. All events that are there when a write begins go out in that one
write. A stream that was begun ends exactly once: with `[DONE]`, or with one error event. An engine that fails is
replaced if that can be done without the reader seeing it. Time comes from the clock and from `tick`, never from timers:
a timer a token costs more than the token; only a paced stream, which asked to be woken, has one (`paced.PacedStream`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import Abandoned, InternalError, Stopped
from headrace.core.events import Admitted, Answered, Delta, Finished, Relayed
from headrace.observe.fault import report_fault
from headrace.observe.record import outcome_of
from headrace.protocol.sse import COMMENT, DONE
from headrace.server.attempts import Attempts
from headrace.server.exchange import ClientGone
from headrace.server.live import MAX_PENDING_EVENTS, Live
from headrace.server.outlet import Outlet
from headrace.server.ticker import Ticker

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)

MAX_HELD = 64 * 1024
"""Bytes without text that are held for the first text; with more the reader gets them, and no engine can begin anew."""
STREAM_NAME = b"x-headrace-stream"
"""Header: the id of the stream, to stop it, and to take it up again if that was asked for."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What one stream may cost its reader and us."""

    header_hold_s: float = 1.0
    """From admission: how long the head waits for the first text."""
    heartbeat_s: float = 15.0
    """A begun stream is never silent for longer."""
    write_timeout_s: float = 60.0
    """A reader that takes nothing for this long is dropped."""
    max_pending_events: int = MAX_PENDING_EVENTS
    """Unsent events from which on the sequence is paused."""
    queue_timeout_s: float = 30.0
    """A request that waited this long for the engine to begin is refused."""


class Stream:
    """One event stream. `run` writes it; the ticker says when the head or a heartbeat is due and drops dead readers."""

    def __init__(
        self, exchange: Outlet, live: Live, attempts: Attempts, limits: StreamLimits, clock: Clock, *, name: str
    ) -> None:
        """`name`: the stream's id."""
        self._exchange = exchange
        self._name = name
        self._live = live
        self._attempts = attempts
        self._answer = attempts.answer
        self._options = attempts.ask.options
        self._limits = limits
        self._lookahead = min(limits.heartbeat_s, limits.write_timeout_s, limits.queue_timeout_s)
        self._clock = clock
        self._early = 0.0
        """A tick's distance: what would be overdue at the next tick is due now."""
        self._out: list[bytes] = []
        """Encoded, not yet written."""
        self._text = False
        """Some of it is text."""
        self._admitted: float | None = None
        self._head_due = False
        self._beat_due = False
        self._writing: float | None = None
        """Since when the running write waits for its reader."""
        self._last_write = 0.0
        self._last_text: float | None = None
        self._finished: set[int] = set()
        self._relayed = False
        """The bytes of the answer are another server's."""
        self._dropped = False
        self._task: asyncio.Task[Any] | None = None
        self._ticker: Ticker | None = None

    async def run(self, ticker: Ticker) -> None:
        """Write the stream to its end. Raises ClientGone; what fails before the head went out is raised as it is."""
        self._task = asyncio.current_task()
        self._early = ticker.interval
        self._ticker = ticker
        ticker.add(self)
        try:
            await self._run()
        except asyncio.CancelledError:
            if not self._dropped or self._task is None:
                raise
            self._task.uncancel()
            raise ClientGone from None
        except ClientGone:
            raise
        except Exception as error:
            if not self._exchange.started:
                raise
            report_fault(log, error, self._exchange.request_id)
            await self._break_off(InternalError(f"internal error; request {self._exchange.request_id}"))
        finally:
            ticker.remove(self)

    def tick(self, now: float) -> float | None:
        """See what is due at `now`: the head, a heartbeat, or the end of our patience with reader or engine. When to
        look again, or None for soon: nothing that begins after `now` is due within `_lookahead`, but for the head of an
        admission, which asks for a look itself."""
        limits, until = self._limits, now + self._lookahead
        if self._live.queued:
            until = min(until, self._live.tick(now))
        if self._writing is not None:
            due = self._writing + limits.write_timeout_s
            if now >= due:
                self._drop()
                return None
        elif not self._exchange.started:
            if self._admitted is None:
                return until
            due = self._admitted + limits.header_hold_s
            if now + self._early >= due:
                self._head_due = True
                self._live.mailbox.wake()
                return None
        else:
            due = self._last_write + limits.heartbeat_s
            if now + self._early >= due:
                channel = self._exchange.channel
                if channel is None or not channel.ready():
                    self._beat_due = True
                    self._live.mailbox.wake()
                    return None
                # Without waking the task: of ten thousand silent streams many are due at the same time.
                channel.write(COMMENT)
                self._last_write = now
                due = now + limits.heartbeat_s
        return min(until, due)

    async def _run(self) -> None:
        live, exchange = self._live, self._exchange
        self._listen()
        while True:
            self._encode(live.mailbox.take())
            if live.gone:
                raise ClientGone
            if live.failure is not None:
                if await self._recover():
                    continue
                live.check_gone()
                if not exchange.started:
                    raise live.failure
                await self._break_off(live.failure)
                return
            over = live.remaining == 0
            if over:
                self._out.append(self._end())
            if self._due(over):
                await self._write(more=not over)
                if over:
                    return
            else:
                # What gave nothing to write, or is held for the first text, must not count as unread: a reader takes it
                # in no time, and an engine that was paused for it would never come to its first text.
                self._left()
                await live.mailbox.wait()

    def _listen(self) -> None:
        """Take what can be written at once without a detour."""
        if self._exchange.channel is not None:
            self._live.mailbox.direct = self._direct

    def _left(self) -> None:
        """What was taken from the mailbox has left."""
        self._live.mailbox.written()

    async def _recover(self) -> bool:
        """Let another engine take over. Raises ClientGone."""
        if not await self._attempts.recover():
            return False
        if not self._live.committed:
            self._out.clear()
            self._text = False
        self._relayed = False
        self._answer = self._attempts.answer
        return True

    def _end(self) -> bytes:
        """The last bytes of a stream that went well."""
        live, options = self._live, self._options
        usage = live.usage() if options.include_usage else None
        if not self._relayed:
            return self._answer.end(usage)
        # The usage of a relayed answer was in it, if its server counts; it must not come twice.
        usage = None if live.counted else usage
        if usage is None and not options.timings:
            return DONE
        self._stamp()
        answer = self._attempts.closing()
        timing = answer.timing(live.timeline.report()) if options.timings else b""
        return timing + answer.end(usage)

    def _encode(self, events: list[Answered]) -> None:
        """Events → bytes in `_out`."""
        live, answer, out = self._live, self._answer, self._out
        for event in events:
            index = live.book(event)
            if index < 0:
                continue
            if isinstance(event, Relayed):
                self._relayed = answer.passes
                if chunk := answer.relayed(event):
                    out.append(chunk)
                self._text = self._text or bool(event.text)
            elif isinstance(event, Delta):
                self._relayed = False
                event = live.visible(event)
                if chunk := answer.delta(index, event):
                    out.append(chunk)
                self._text = self._text or bool(event.text)
            elif isinstance(event, Finished):
                report = None
                self._finished.add(index)
                if self._options.timings and live.remaining == 0:
                    self._stamp()
                    report = live.timeline.report()
                out.append(answer.finish(index, event.reason, report))
            elif isinstance(event, Admitted) and self._admitted is None:
                self._admitted = self._clock()
                if self._ticker is not None:
                    # The head may be due sooner than the look that was agreed on.
                    self._ticker.remove(self)
                    self._ticker.add(self)

    def _direct(self, event: Answered) -> bool:
        """The common case without a detour: one piece of text for a begun stream whose reader keeps up.

        Through the mailbox the same chunk costs a future, a turn of the loop and six coroutine frames, all with caches
        that the engine has just emptied (server CPU beside a computing engine: 0.25 ms a token, and 0.20 ms this way).
        """
        channel = self._exchange.channel
        kind = type(event)
        if (kind is not Delta and kind is not Relayed) or not event.text or self._out or self._beat_due:  # type: ignore[union-attr]
            return False
        live = self._live
        if channel is None or self._last_text is None or live.failure is not None or live.hiding:
            return False
        if not channel.ready():
            return False
        if kind is Relayed:
            assert isinstance(event, Relayed)
            if event.over or not self._relayed or live.book(event) < 0:
                return False
            chunk = event.raw
        else:
            assert isinstance(event, Delta)
            index = live.book(event)
            if index < 0:
                return True
            chunk = self._answer.delta(index, event)
        now = self._clock()
        self._exchange.record.gaps.append(now - self._last_text)
        self._last_text = self._last_write = now
        channel.write(chunk)
        return True

    def _due(self, over: bool) -> bool:
        """Whether to write now; adds the comment that a silent stream needs."""
        if over:
            return True
        if self._last_text is None and sum(map(len, self._out)) > MAX_HELD:
            self._text = True
        if self._exchange.started:
            if self._beat_due and not self._out and self._last_text is not None:
                self._out.append(COMMENT)
            return self._beat_due or (bool(self._out) and (self._text or self._last_text is not None))
        # Some proxies keep a head back until a body follows: it gets a comment.
        return self._text or self._head_due

    async def _write(self, *, more: bool) -> None:
        """All of `_out` in one piece, after the head if that is still to be sent."""
        self._stamp()
        now = self._clock()
        if self._text:
            if self._last_text is not None:
                self._exchange.record.gaps.append(now - self._last_text)
            self._last_text = now
            self._text = False
        body = self._body(over=not more)
        self._writing = now
        if not self._exchange.started:
            timing = (b"server-timing", self._live.timeline.server_timing().encode())
            await self._exchange.start(200, (*STREAM_HEADERS, (STREAM_NAME, self._name.encode()), timing))
        await self._exchange.write(body, more=more)
        self._writing = None
        self._last_write = now
        self._beat_due = False
        self._left()

    def _body(self, *, over: bool) -> bytes:
        """What is written now. Chunks without text, the role among them, wait for the first text: until that is out
        another engine may begin anew."""
        if over or self._last_text is not None:
            body = self._answer.joined(self._out)
            self._out.clear()
            return body
        return COMMENT

    async def _break_off(self, error: Any) -> None:
        """End a begun stream with one error event; what was encoded before goes first."""
        self._exchange.record.outcome = outcome_of(error)
        if isinstance(error, Stopped) and not isinstance(error, Abandoned):
            self._stop()
        else:
            self._out.append(self._answer.error(error))
        await self._write(more=False)

    def _stop(self) -> None:
        """End it well, though before its time: that was wished."""
        answer, live = self._attempts.closing(), self._live
        for index in range(live.choices):
            if index not in self._finished:
                self._out.append(answer.stopped(index))
        self._out.append(answer.end(live.usage() if self._options.include_usage else None))

    def _stamp(self) -> None:
        """The first text is about to be handed to the socket."""
        timeline = self._live.timeline
        if self._text and timeline.delivered is None:
            timeline.delivered = self._clock()

    def _drop(self) -> None:
        """The reader takes nothing: give up on it."""
        if self._dropped:
            return
        self._dropped = True
        log.warning("request %s: the reader took nothing for %g s and was dropped",
                    self._exchange.request_id, self._limits.write_timeout_s)  # fmt: skip
        self._live.leave()
        if self._exchange.abort is not None:
            self._exchange.abort()  # the connection is lost, so the write that hangs returns
        elif self._task is not None:
            self._task.cancel()
