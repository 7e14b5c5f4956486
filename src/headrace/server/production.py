"""Answers being made, from the permit to the last byte, wherever they are written to.

    answer    for the client that waits: its leaving stops it
    outlive   into a log: it goes on without anybody, and accounts for itself

Rules: an answer leaves nothing behind, whatever happens: no lease, no permit, no rid, no shadow. What refuses it is
raised as long as nothing was written.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from headrace.core.clock import Clock
from headrace.core.errors import Draining, HeadraceError, Overloaded, RateLimited
from headrace.core.request import Ask
from headrace.gateway.backend import Fleet
from headrace.gateway.guard import Caller, Guard, Permit
from headrace.gateway.mirror import Mirror, Shadow
from headrace.observe.metrics import Metrics
from headrace.observe.record import Outcome, Record, outcome_of
from headrace.server.attempts import Attempts, Encoding, openai_answer
from headrace.server.exchange import ClientGone, Exchange
from headrace.server.live import Live
from headrace.server.mirroring import compare
from headrace.server.outlet import Outlet
from headrace.server.paced import stream_of
from headrace.server.stream import StreamLimits
from headrace.server.streamlog import StreamLog
from headrace.server.streams import Streams, owner_of
from headrace.server.ticker import Ticker
from headrace.server.whole import answer_whole


@dataclass(frozen=True, slots=True)
class Production:
    """An answer to be made."""

    outlet: Outlet
    ask: Ask
    identity: tuple[str, int]
    """`id` and `created` of the answer."""
    name: str
    """Of the stream."""
    encoding: Encoding = openai_answer
    family: str = ""
    """Of the engine that began it, for one that is gone on with."""
    log: StreamLog | None = None
    """Where it is written to, if it is resumable."""
    refusal: HeadraceError | None = None
    """Why it cannot be gone on with, if that is known."""
    ids: int = 0
    """Tokens that other servers know of."""


class Producer:
    """`account` is told of an answer that outlived its request, when it is over."""

    def __init__(
        self,
        fleet: Fleet,
        guard: Guard,
        streams: Streams,
        ticker: Ticker,
        limits: StreamLimits,
        clock: Clock,
        metrics: Metrics,
        account: Callable[[Caller, Record], None],
        *,
        mirror: Mirror | None = None,
    ) -> None:
        self.began: Callable[[Production, Live, Attempts], None] | None = None
        """Told of one that outlives its request before an engine has it."""
        self.draining = False
        self.fleet = fleet
        self._guard = guard
        self._streams = streams
        self._ticker = ticker
        self._limits = limits
        self._clock = clock
        self._metrics = metrics
        self._account = account
        self._mirror = mirror
        self._rids = itertools.count(1)
        self._live: set[Live] = set()
        self._quiet = asyncio.Event()

    # Life ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> int:
        """Answers being made."""
        return len(self._live)

    def drain(self) -> None:
        """Take no new work from now on."""
        self.draining = True
        if not self._live:
            self._quiet.set()

    async def quiet(self) -> None:
        """Until `drain` was called and no answer is being made any more."""
        await self._quiet.wait()

    def fail_all(self, error: HeadraceError) -> None:
        """End every answer with `error`."""
        for live in tuple(self._live):
            live.fail(error)

    # Answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def answer(self, exchange: Exchange, ask: Ask, identity: tuple[str, int], encoding: Encoding) -> None:
        """The client waits for it. Raises what refused it, and ClientGone."""
        permit = await self._admit(exchange.caller, ask)
        production = Production(exchange, ask, identity, self._streams.new_id(), encoding)
        await self._make(production, permit)

    async def outlive(self, production: Production, caller: Caller) -> None:
        """It goes on when its client has left. Raises what refused it."""
        record = production.outlet.record
        try:
            await self._make(production, await self._admit(caller, production.ask))
        except HeadraceError as error:
            record.outcome = outcome_of(error)
            if record.outcome != "cancelled":
                record.status = error.status
            record.reason = error.reason if isinstance(error, Overloaded) else None
            record.limit = error.limit if isinstance(error, RateLimited) else None
            raise
        finally:
            self._account(caller, record)

    async def _admit(self, caller: Caller, ask: Ask) -> Permit:
        if self.draining:
            raise Draining("the server is shutting down; try again shortly")
        permit = await self._guard.admit(caller, ask)
        if self.draining:
            # It waited for its permit meanwhile, and nobody waits for it who waits for those that run.
            permit.close(0, 0, 0, "rejected")
            raise Draining("the server is shutting down; try again shortly")
        return permit

    async def _make(self, production: Production, permit: Permit) -> None:
        """The leaving of a client stops it if it is written to that client, and not if it goes into a log."""
        outlet, ask, record = production.outlet, production.ask, production.outlet.record
        live = Live(
            outlet.timeline,
            self._clock,
            max_pending=self._limits.max_pending_events,
            queue_timeout_s=self._limits.queue_timeout_s,
        )
        attempts = Attempts(
            self.fleet, live, ask, record, self._clock, self._rids,
            identity=production.identity, encoding=production.encoding, family=production.family,
        )  # fmt: skip
        shadow: Shadow | None = None
        self._live.add(live)
        if not ask.options.stream:
            self._ticker.add(live)  # a stream looks after its own
        try:
            if isinstance(outlet, Exchange):
                live.watch(outlet.receive, outlet.on_gone)
            elif self.began is not None:
                self.began(production, live, attempts)
            await attempts.begin()
            if production.log is not None and production.log.stopping is not None:
                live.fail(production.log.stopping)  # also if an engine was left for another one meanwhile
            if self._mirror is not None and ask.told is None:
                shadow = self._mirror.offer(ask, record.engine)
            if ask.options.stream:
                await self._stream(production, live, attempts)
            else:
                assert isinstance(outlet, Exchange)
                await answer_whole(outlet, live, attempts, self._clock)
        except BaseException as error:
            record.outcome = _ending(error)
            raise
        finally:
            usage = live.usage()
            record.prompt_tokens = usage.prompt_tokens
            record.cached_tokens = usage.cached_tokens
            record.completion_tokens = usage.completion_tokens
            permit.close(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, record.outcome)
            self._live.discard(live)
            self._ticker.remove(live)
            if self.draining and not self._live:
                self._quiet.set()
            if shadow is not None:
                compare(shadow, live, record)
            attempts.close()
            await live.close()

    async def _stream(self, production: Production, live: Live, attempts: Attempts) -> None:
        outlet, name = production.outlet, production.name
        stream = stream_of(outlet, live, attempts, self._limits, self._clock, name)
        self._metrics.open_streams += 1
        if isinstance(outlet, Exchange):
            self._streams.register(name, owner_of(outlet.caller), live.fail)
        try:
            await stream.run(self._ticker)
        finally:
            self._streams.unregister(name)
            self._metrics.open_streams -= 1


def _ending(error: BaseException) -> Outcome:
    """How a request ended that was broken off by that."""
    if isinstance(error, HeadraceError):
        return outcome_of(error)
    return "cancelled" if isinstance(error, ClientGone | asyncio.CancelledError) else "error"
