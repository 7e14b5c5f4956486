"""Sends one planned request and says what happened to it.

    send ─► idle connection, or a new one ─► request ─► Exchange hears the response ─► Record

Rules: nothing is sent twice, with one exception: a kept connection that turns out closed at once, before a byte of the
response came, is replaced by a new one, once, and the record then says `resent` and that it was not reused; one that
closes later had the request, and a server that drops requests is measured as such; whatever a server does is an
outcome, not an exception; one stamp a socket read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace_bench.client.answer import Answer, Head
from headrace_bench.client.connection import Ask, Clock, Line
from headrace_bench.client.pool import Pool
from headrace_bench.client.target import Target
from headrace_bench.load.schedule import Planned
from headrace_bench.record import Outcome, Record

LINGER_S = 0.5
"""A message that has no end so long after its [DONE] will not get one: the connection is given up."""

STALE_S = 0.1
"""A kept connection that was closed while it was idle says so within a round trip of the request. Later, the server has
taken the request and dropped it."""

_encode = msgspec.json.Encoder().encode


class Client:
    """Sends requests to one server. Belongs to one event loop; `clock` counts seconds from the start of the load."""

    def __init__(self, target: Target, clock: Clock) -> None:
        self._target = target
        self._clock = clock
        self._pool = Pool(target.place, clock, http2=target.http2, keep_alive=target.keep_alive)
        self._ask = Ask(target.place, "POST", "/v1/chat/completions", target.key, target.keep_alive)
        self._fields: dict[str, Any] = {
            "model": target.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.headrace and target.timings:
            self._fields["headrace"] = {"timings": True}
        self._flying: set[Exchange] = set()

    async def send(self, planned: Planned, messages: Sequence[dict[str, str]], keep_text: bool = False) -> Record:
        """Sends `messages` with the plan's limits, and waits for the end of the answer.

        Never raises for what a server does. Who cancels it gets CancelledError and no record; `abandon` gives one.
        """
        dispatched = self._clock()
        answer = Answer(planned, dispatched, keep_text=keep_text, headrace=self._target.headrace)
        exchange = Exchange(answer, self._clock, self._target.timeout_s, planned.hang_up)
        self._flying.add(exchange)
        try:
            await self._exchange(exchange, self._body(planned, messages))
        finally:
            self._flying.discard(exchange)
            exchange.stop()
        return answer.record()

    def abandon(self) -> None:
        """End every request that is under way, now: their records come back as `unfinished`."""
        for exchange in list(self._flying):
            exchange.give_up("unfinished", None)

    async def close(self) -> None:
        """Give up all connections, and what is under way."""
        self.abandon()
        await self._pool.close()

    def _body(self, planned: Planned, messages: Sequence[dict[str, str]]) -> bytes:
        fields = {**self._fields, "messages": messages, "max_tokens": planned.max_tokens}
        for name, value in planned.extra.items():
            given = fields.get(name)
            # A request that has something to add to ours (stream_options, headrace) does not take it away.
            fields[name] = {**given, **value} if isinstance(given, dict) and isinstance(value, dict) else value
        return _encode(fields)

    async def _exchange(self, exchange: Exchange, body: bytes) -> None:
        line = self._pool.idle()
        if line is not None:
            await exchange.by(line, self._ask, body, reused=True)
            if not exchange.stale:
                return
            exchange.renew()
        line = await self._connected(exchange)
        while line is not None and line.full:
            line = await self._connected(exchange)
        if line is not None:
            await exchange.by(line, self._ask, body, reused=False)

    async def _connected(self, exchange: Exchange) -> Line | None:
        """A new connection; None: there is none, or nobody waits for it any more, and the exchange is over."""
        opening = asyncio.get_running_loop().create_task(self._pool.open())
        try:
            waited: list[asyncio.Future[Any]] = [opening, exchange.over]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not opening.done():
                opening.cancel()
        if exchange.over.done():
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                self._pool.keep(opening.result())
            return None
        try:
            line = opening.result()
        except OSError as error:
            exchange.give_up("connect", reason(error))
            return None
        exchange.answer.connected = self._clock()
        return line


class Exchange:
    """One request under way: a connection's listener, and its timers."""

    def __init__(self, answer: Answer, clock: Clock, timeout_s: float, hang_up: float | None) -> None:
        self.answer = answer
        self._clock = clock
        self._timeout_s = timeout_s
        self._hang_up = hang_up
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        """Done when this attempt is over."""
        self.stale = False
        """The kept connection was closed at once: nothing has happened yet."""
        self._leave: Callable[[], None] | None = None
        self._heard = clock()
        self._silence = self._loop.call_later(timeout_s, self._is_silent)
        self._ending: list[asyncio.TimerHandle] = []

    async def by(self, line: Line, ask: Ask, body: bytes, *, reused: bool) -> None:
        """Send it on `line`, and wait for its end."""
        self.answer.reused = reused
        self._leave = line.send(ask, body, self)
        await self.over

    def renew(self) -> None:
        """Once more from the start, on another connection."""
        self.stale, self._leave = False, None
        self.answer.sent, self.answer.reused, self.answer.resent = None, False, True
        for timer in self._ending:
            timer.cancel()
        self._ending.clear()
        self.over = self._loop.create_future()

    def stop(self) -> None:
        """Its timers end, and so does a request that is still under way."""
        self._silence.cancel()
        for timer in self._ending:
            timer.cancel()
        if self._leave is not None and self.answer.over is None:
            self._leave()
        self._leave = None

    def give_up(self, outcome: Outcome, why: str | None) -> None:
        """Ends here and now, by our own will."""
        if self.answer.over is None:
            leave, self._leave = self._leave, None
            if leave is not None:
                leave()
            self.answer.broken(self._clock(), outcome, why)
            self._finish()

    # What a connection says ─────────────────────────────────────────────────────────────────────────────────────────
    def sent(self, at: float) -> None:
        self.answer.sent = self._heard = at
        if self._hang_up is not None:
            wait = self._hang_up - (self._clock() - at)
            self._ending.append(self._loop.call_later(wait, self.give_up, "hung_up", None))

    def head(self, head: Head, at: float) -> None:
        self._heard = at
        self.answer.head(head, at)

    def body(self, data: bytes, at: float) -> None:
        self._heard = at
        done_before = self.answer.done is not None
        self.answer.body(data, at)
        if self.answer.done is not None and not done_before:
            self._ending.append(self._loop.call_later(LINGER_S, self._has_lingered))

    def ended(self, at: float) -> None:
        if self.answer.over is None:
            self.answer.ended(at)
            self._finish()

    def broken(self, at: float, outcome: Outcome, why: str, untouched: bool) -> None:
        if self.answer.over is not None:
            return
        if untouched and self.answer.reused and outcome == "truncated" and self._at_once(at):
            self.stale = True
        else:
            self.answer.broken(at, outcome, why)
        self._finish()

    def _at_once(self, at: float) -> bool:
        """So soon after it was sent, or before, that nobody has worked on it."""
        return self.answer.sent is None or at - self.answer.sent <= STALE_S

    def _finish(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def _has_lingered(self) -> None:
        if self.answer.over is None:
            leave, self._leave = self._leave, None
            if leave is not None:
                leave()
            self.answer.stood_open()
            self._finish()

    def _is_silent(self) -> None:
        """The timer is set once, and again for what is left of the time: not with every read."""
        left = self._heard + self._timeout_s - self._clock()
        if left > 0.001:
            self._silence = self._loop.call_later(left, self._is_silent)
        elif self._leave is None:
            self.give_up("connect", f"no connection within {self._timeout_s:g} s")
        else:
            self.give_up("timeout", f"not a byte for {self._timeout_s:g} s")


def reason(error: OSError) -> str:
    """In a few words, without addresses and numbers."""
    return " ".join(str(error.strerror or error).split()) or type(error).__name__
