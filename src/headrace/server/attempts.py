"""The engines that one response is tried on, one after the other.

    begin ─▶ engine a ── refuses, breaks, is silent ──▶ engine b ── … ──▶ nobody left: the error
                └── first text is out ── breaks ──▶ engine c of the same family goes on ──▶ …

Rules: before the first text is written any engine of the alias may take over, from the beginning; after it only one
that can go on from exactly there, and none is left for being slow. What the client did wrong is told at once and tried
nowhere else; what one engine cannot do, or has no room for, another one may. One lease at a time, closed with what
became of it; every attempt stands in the timeline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from headrace.core.clock import Clock
from headrace.core.errors import (
    ContextExceeded,
    Draining,
    HeadraceError,
    Overloaded,
    RequestError,
    ServiceError,
    Stopped,
    TooSlow,
    Unsupported,
)
from headrace.core.request import Ask
from headrace.core.timeline import Attempt
from headrace.gateway.backend import End, Fleet, Lease, Work
from headrace.observe.record import Record
from headrace.protocol.answer import Answer, ChatAnswer, CompletionAnswer, Encoder
from headrace.server.live import Live

LONG_BODY = 100_000
"""Bytes from which on a body is parsed on a thread."""

ELSEWHERE = (ServiceError, Unsupported, ContextExceeded)
"""What another engine need not answer."""

Encoding = Callable[[str, int, Ask, Work], Encoder]
"""(id, created, request, work) → the encoder of its answer"""

log = logging.getLogger(__name__)


def openai_answer(id: str, created: int, ask: Ask, work: Work) -> Answer:
    """What the request's own path answers with."""
    options = work.options or ask.options
    if ask.chat:
        return ChatAnswer(id, created, ask.model, options=options)
    return CompletionAnswer(id, created, ask.model, options=options, echo=work.echo)


class Attempts:
    """For one response; owned by its task. `identity`: `id` and `created` of an answer that we begin, or, with
    `ask.told`, go on with; `family`: of the engine that began that one."""

    def __init__(
        self,
        fleet: Fleet,
        live: Live,
        ask: Ask,
        record: Record,
        clock: Clock,
        rids: Iterator[int],
        *,
        identity: tuple[str, int],
        family: str = "",
        encoding: Encoding = openai_answer,
    ) -> None:
        self.ask = ask
        self.answer: Encoder
        """The encoder of what is not relayed as it is."""
        self._fleet = fleet
        self._live = live
        self._record = record
        self._clock = clock
        self._rids = rids
        self._identity = identity
        self._encoding = encoding
        self._lease: Lease | None = None
        self.family = family
        """Of the engine that has it."""
        self.sampling = ask.sampling
        """How the answer is drawn, as the engine of ours that began it reads the request; None: it is another
        server's."""
        self._work: Work | None = None
        """What the encoder was made for."""
        self._tried: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self) -> None:
        """Give the request to an engine. Raises what refuses it: the first engine's refusal, if all do."""
        first: HeadraceError | None = None
        family = None
        if self.ask.told is not None:
            self._live.prime(self.ask.told)
            family = self.family or None
        while True:
            try:
                lease = self._fleet.lease(self.ask, without=self._tried, family=family)
            except ServiceError as error:
                raise (first or error) from None
            try:
                await self._try(lease, self.ask)
                return
            except ELSEWHERE as error:
                first = first or error
                if not self._again(error):
                    raise first from None

    async def recover(self) -> bool:
        """After `live.failure`: did another engine take over? Before the first text is written from the beginning:
        then what was encoded and not written is void. Raises ClientGone."""
        live, error = self._live, self._live.failure
        assert error is not None
        committed = live.committed
        told = live.told if committed else None
        if not self._again(error) or (committed and told is None):
            return False
        ask = replace(self.ask, told=told, sampling=self.sampling if committed else None)
        while True:
            try:
                lease = self._fleet.lease(ask, without=self._tried, family=self.family if committed else None)
            except HeadraceError:
                live.fail(error)
                return False
            live.give_up(forget=not committed)
            try:
                await self._try(lease, ask)
            except HeadraceError as refused:
                log.debug("engine %s does not take over: %s", lease.engine, type(refused).__name__)
                continue
            log.info("request %s: %s goes on after %s", self._record.request_id, lease.engine, type(error).__name__)
            return True

    def close(self) -> None:
        """The response is over, in whatever way."""
        live = self._live
        if live.gone:
            self._end("cancelled")
        elif live.failure is None and live.over:
            self._end("ok")
        else:
            self._end("cancelled" if live.failure is None else _end_of(live.failure))

    def _more(self, ask: Ask) -> bool:
        return self._fleet.others(ask, without=self._tried)

    async def _try(self, lease: Lease, ask: Ask) -> None:
        """One attempt's beginning. Raises what refuses it; then the lease is closed and its engine tried."""
        self._lease, self.family = lease, lease.family
        self._tried.add(lease.engine)
        self._record.engine = lease.engine
        timeline = self._live.timeline
        timeline.attempts.append(Attempt(lease.engine, self._clock(), continued=ask.told is not None))
        backend = lease.backend
        try:
            parsed = await self._parse(lease, ask)
            if timeline.routed is None:
                timeline.routed = self._clock()
            work = await self._prepare(lease, ask, parsed)
            self.sampling = ask.sampling if work.options is None else work.options.sampling
            self._live.check_gone()
            # The body of another server's whole answer comes when it is complete: how soon it began nobody hears.
            heard = ask.options.stream or backend.kind != "openai"
            self._live.first_text = lease.first_text if heard else None
            self._answer(work)
            self._live.submit(backend, work)
        except HeadraceError as error:
            self._end(_end_of(error))
            raise
        if heard and not self._live.committed:
            self._arm(lease)

    async def _parse(self, lease: Lease, ask: Ask) -> object:
        if ask.size < LONG_BODY:
            return lease.backend.parse(ask)
        return await asyncio.get_running_loop().run_in_executor(None, lease.backend.parse, ask)

    async def _prepare(self, lease: Lease, ask: Ask, parsed: object) -> Work:
        if ask.told is None:
            return await lease.backend.prepare(ask, parsed, self._rids)
        # To continue, another server is asked first, which may take seconds: not for a client that left.
        task = asyncio.get_running_loop().create_task(_work(lease, ask, parsed, self._rids))
        self._live.leaving = task.cancel
        try:
            return await task
        except asyncio.CancelledError:
            self._live.check_gone()
            raise
        finally:
            task.cancel()
            self._live.leaving = None

    def _answer(self, work: Work) -> None:
        """The encoder: it stays the same while one answer goes on, and takes over the identity that was begun with."""
        live = self._live
        if live.committed and live.identity is None and self._work is not None:
            return
        self._work = work
        self._encode(*((live.identity if live.committed else None) or self._identity))
        if live.committed:
            self.answer.begin(0)
            live.identity = None

    def closing(self) -> Encoder:
        """The encoder for the end of an answer that is broken off, whoever's bytes it was made of."""
        live = self._live
        if live.identity is not None:
            self._encode(*live.identity)
            live.identity = None
            for index in range(live.choices):
                self.answer.begin(index)
        return self.answer

    def _encode(self, id: str, created: int) -> None:
        assert self._work is not None
        self.answer = self._encoding(id, created, self.ask, self._work)

    def _again(self, error: HeadraceError) -> bool:
        """Close the attempt; is another one to be made?"""
        self._end(_end_of(error))
        mine = isinstance(error, ELSEWHERE) and not isinstance(error, Draining)
        return mine and not self._live.gone

    def _end(self, end: End) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lease, self._lease = self._lease, None
        if lease is not None:
            attempt = self._live.timeline.attempts[-1]
            attempt.ended, attempt.end = self._clock(), end
            lease.close(end)

    def _arm(self, lease: Lease) -> None:
        """Be there when the first text is not in time."""
        seconds = lease.ttft_timeout_s
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._slow, seconds)

    def _slow(self, seconds: float) -> None:
        """An engine that is slow is better than none: it is left only for another one, from the beginning."""
        self._timer = None
        if self._live.begun is None and self._live.failure is None and self._more(self.ask):
            self._live.fail(TooSlow(f"the engine gave no text within {seconds * 1e3:g} ms"))


async def _work(lease: Lease, ask: Ask, parsed: object, rids: Iterator[int]) -> Work:
    return await lease.backend.prepare(ask, parsed, rids)


def _end_of(error: HeadraceError) -> End:
    if isinstance(error, TooSlow):
        return "slow"
    if isinstance(error, Stopped):
        return "cancelled"
    # A full queue of ours has a reason, and is no sign of illness; what another server means by 503 nobody knows.
    full = isinstance(error, Overloaded) and error.reason is not None
    return "refused" if full or isinstance(error, RequestError | Draining) else "failed"
