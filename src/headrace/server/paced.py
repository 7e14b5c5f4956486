"""An event stream whose text is released in windows or evenly, because its client asked for that.

    mailbox ─▶ encode ─▶ pacer ── due ──▶ write
                           └── not yet ── timer ──▶ the loop looks again

Rules: everything else is `Stream`'s: what is encoded takes a detour, and only that. What the pacer holds counts as held
in the mailbox, so a slow reader bounds it as ever. At the last end and at a failure nothing is held back any more. A
continuing engine is told what was encoded, held or not: both leave in order, before what it adds.
Such a stream needs to be woken between events, to the millisecond; so it has a timer of its own, one at a time. The
ticker looks four times a second, which is right for all that merely must not be forgotten.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.core.clock import Clock
from headrace.core.events import Answered, Delta, Finished, Relayed
from headrace.core.pacer import Pacer, Unit, split
from headrace.server.attempts import Attempts
from headrace.server.exchange import Exchange
from headrace.server.live import Live
from headrace.server.stream import Stream, StreamLimits
from headrace.server.ticker import Ticker

_EVENT = re.compile(rb".+?(?:\r\n\r\n|\n\n|\r\r|\Z)", re.DOTALL)
"""An event of a stream with the blank line that ends it."""


class PacedStream(Stream):
    """See the module."""

    def __init__(self, exchange: Exchange, live: Live, attempts: Attempts, limits: StreamLimits, clock: Clock) -> None:
        super().__init__(exchange, live, attempts, limits, clock)
        self._adaptive = self._options.pacing.adaptive
        self._timer: asyncio.TimerHandle | None = None
        self._begin()

    def _begin(self) -> None:
        """Nothing was encoded yet."""
        self._pacer = Pacer(self._options.pacing)
        self._exchange.record.delays = self._pacer.delays
        self._begun = False
        """There was text."""

    async def run(self, ticker: Ticker) -> None:
        try:
            await super().run(ticker)
        finally:
            self._disarm()
            self._live.timeline.pace = self._pacer.summary()

    def _listen(self) -> None:
        """Every piece goes through the pacer."""

    def _encode(self, events: list[Answered]) -> None:
        live, now = self._live, self._clock()
        for event in events:
            if isinstance(event, Finished) and live.remaining == 1:
                # The timeline on the last chunk says what pacing cost, so everything is out before it is made.
                self._release(self._pacer.flush(now))
                live.timeline.pace = self._pacer.summary()
                super()._encode([event])
                continue
            for part, tokens in self._parts(event):
                self._put(part, tokens, now)
        if live.failure is not None or live.remaining == 0:
            self._release(self._pacer.flush(now))
            live.timeline.pace = self._pacer.summary()
        else:
            self._release(self._pacer.take(now))
        self._arm(now)

    def _parts(self, event: Answered) -> Iterator[tuple[Answered, float]]:
        """Several tokens in one event are several pieces, each of its share; but the first text goes as it came."""
        tokens = max(1, event.tokens) if isinstance(event, Delta | Relayed) else 0
        if not isinstance(event, Delta) or tokens < 2 or not self._spread or event.logprobs:
            yield event, tokens
            return
        first, *others = split(event.text, tokens)
        share = tokens / (1 + len(others))
        yield msgspec.structs.replace(event, text=first), share
        for text in others:
            yield Delta(event.rid, event.index, text, 0), share

    @property
    def _spread(self) -> bool:
        """Whether what came together leaves one by one."""
        return self._adaptive and self._begun

    def _put(self, event: Answered, tokens: float, now: float) -> None:
        """Encode, but let the pacer have what comes of it."""
        ready, ready_text = self._out, self._text
        self._out, self._text = [], False
        try:
            super()._encode([event])
        finally:
            data, text = b"".join(self._out), self._text
            self._out, self._text = ready, ready_text
        if not data:
            return
        pieces = _EVENT.findall(data) if isinstance(event, Relayed) and self._spread else [data]
        for piece in pieces:
            self._pacer.put(piece, tokens / len(pieces) if text else 0, now)
        self._begun = self._begun or text

    def _release(self, units: list[Unit]) -> None:
        self._out += [unit.data for unit in units]
        self._text = self._text or any(unit.tokens for unit in units)

    async def _recover(self) -> bool:
        recovered = await super()._recover()
        if recovered and self._live.timeline.delivered is None:
            self._begin()
        return recovered

    async def _break_off(self, error: Any) -> None:
        self._release(self._pacer.flush(self._clock()))
        await super()._break_off(error)

    def _left(self) -> None:
        self._live.mailbox.written(len(self._pacer), self._pacer.size)

    def _arm(self, now: float) -> None:
        """Be there when the next piece is due."""
        self._disarm()
        due = self._pacer.due
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - now), self._live.mailbox.wake)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def stream_of(exchange: Exchange, live: Live, attempts: Attempts, limits: StreamLimits, clock: Clock) -> Stream:
    """The stream that the request asked for."""
    kind = Stream if attempts.ask.options.pacing.off else PacedStream
    return kind(exchange, live, attempts, limits, clock)
