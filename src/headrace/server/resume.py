"""Streams that outlive their connection: begun, taken up again, stopped.

    POST ─▶ a generation of its own ─▶ log ◀─ reader ─▶ the client that asked
    GET /v1/streams/{id}, POST again ──▶ │ ◀─ reader ─▶ the client that is back, or another one
    DELETE ─▶ stop ──────────────────────┘

Rules: what was asked twice is generated once: an event id or an idempotency key that is known leads to its log, never
to an engine. What fails before the head is an honest status for whoever waits for it, and leaves no log. A client that
leaves before the head knows no id: its generation ends with it, unless it has a key to come back with.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from urllib.parse import parse_qsl

import msgspec

from headrace.core.clock import Clock
from headrace.core.errors import (
    Abandoned,
    Conflict,
    Draining,
    Gone,
    HeadraceError,
    InternalError,
    InvalidRequest,
    RateLimited,
    ServiceError,
    Stopped,
)
from headrace.core.request import Ask
from headrace.gateway.guard import Caller
from headrace.gateway.shared import SharedRedis
from headrace.observe.fault import report_fault
from headrace.observe.stream_metrics import How
from headrace.protocol.block import is_position, parse_id
from headrace.protocol.plain_events import plain_error_event
from headrace.server.attempts import LONG_BODY, Attempts, Encoding, openai_answer
from headrace.server.exchange import ClientGone, Exchange
from headrace.server.live import Live
from headrace.server.log_redis import Origin
from headrace.server.outlet import LogOutlet
from headrace.server.plain import PATH as PLAIN_PATH
from headrace.server.plain import plain_encoding
from headrace.server.production import Producer, Production
from headrace.server.reader import Reader
from headrace.server.shared_logs import SharedLogs
from headrace.server.stream import STREAM_NAME, StreamLimits
from headrace.server.streamlog import Ended, StreamLog
from headrace.server.streams import Streams, not_found, owner_of
from headrace.server.ticker import Ticker

MAX_KEY = 255
"""Characters of an idempotency key."""
CLOSE_S = 2.0
"""At the end of the server: for what still runs to end, to fail, and to be cancelled, each."""

log = logging.getLogger(__name__)


class Resuming:
    """What `producer` makes, as far as it outlives its requests."""

    def __init__(
        self,
        streams: Streams,
        producer: Producer,
        limits: StreamLimits,
        ticker: Ticker,
        clock: Clock,
        shared: SharedRedis | None,
        *,
        lease_s: float,
    ) -> None:
        self.streams = streams
        self.shared = None if shared is None else SharedLogs(shared, streams, self._adopt, clock, lease_s=lease_s)
        self._producer = producer
        producer.began = self.began
        self._limits = limits
        self._ticker = ticker
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    # Routes ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def post(self, exchange: Exchange, ask: Ask, identity: tuple[str, int], encoding: Encoding) -> None:
        """A request for a resumable stream: a new one, or one that is known."""
        owner, key, last = owner_of(exchange.caller), _key(exchange), _last_event(exchange)
        digest, request = await self._encoded(exchange.path, ask)
        if last is not None:
            found = await self._find(last[0], exchange.caller)
            if found is None:
                raise not_found()
            await self._again(exchange, found, digest, last[1])
            return
        known = self.streams.with_key(owner, key) if key else None
        if known is not None:
            await self._again(exchange, known, digest, 0)
            return
        source = self.streams.open(owner, key=key, digest=digest)
        source.request = request
        if exchange.path == PLAIN_PATH:
            source.error_event = plain_error_event
        if key and self.shared is not None:
            elsewhere = await self._claim(source, exchange.caller)
            if elsewhere is not None:
                await self._again(exchange, elsewhere, digest, 0)
                return
        self._begin(exchange, source, ask, identity, encoding)
        await self._follow(exchange, source, 0, left=None if key else lambda: _leave(source))

    async def get(self, exchange: Exchange) -> None:
        """`GET /v1/streams/{id}?after=N`, or with `Last-Event-ID`, which is newer where both are given."""
        id = exchange.path.removeprefix("/v1/streams/")
        last = _last_event(exchange)
        if last is not None and last[0] != id:
            raise InvalidRequest("Last-Event-ID names another stream than the path")
        after = _after(exchange) if last is None else last[1]
        source = await self._find(id, exchange.caller)
        if source is None or source.refusal is not None:
            raise not_found()
        await self._resume(exchange, source, after)

    async def delete(self, exchange: Exchange) -> None:
        """Stop it. Again, or after its end, it says how it ended."""
        id, owner = exchange.path.removeprefix("/v1/streams/"), owner_of(exchange.caller)
        error = Stopped("the stream was stopped")
        plain = self.streams.plain(id, owner)
        if plain is not None:
            plain(error)
            await _tell(exchange, id, "stopped")
            return
        source = self.streams.find(id, owner)
        if source is not None and (source.kept or source.ended is not None):
            if source.ended is None:
                source.fail(error)
            await _tell(exchange, id, source.ended or "stopped")
            return
        ended = None if self.shared is None else await self.shared.stop(id, exchange.caller)
        if ended is None:
            raise not_found()
        await _tell(exchange, id, ended)

    # Life ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def began(self, production: Production, live: Live, attempts: Attempts) -> None:
        """A generation of its own life is about to be given to an engine."""
        source = production.log
        assert source is not None
        outlet = production.outlet
        assert isinstance(outlet, LogOutlet)
        source.writer = outlet.live = live
        if source.unwanted:
            live.leave()
        if source.stopping is not None:
            live.fail(source.stopping)
        if self.shared is not None:
            shared = self.shared
            outlet.passing_on = lambda: isinstance(live.failure, Draining) and shared.writer.has(source)
            shared.write(source, live, attempts, production.identity, outlet.record, ids=production.ids)

    def drain(self) -> None:
        """What is written elsewhere can be read elsewhere too."""
        if self.shared is not None:
            self.shared.mirrors.drain()

    async def close(self) -> None:
        """After the last request: what other servers need is handed over, nothing is left. It takes a few CLOSE_S at
        most, whatever the generations that are still there wait for."""
        ended = Draining("the server is shutting down and could not finish this answer")
        for end in (None, lambda: self._producer.fail_all(ended), self._cancel):
            if end is not None and self._tasks:
                end()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=CLOSE_S)
        if self.shared is not None:
            await self.shared.close()
        self.streams.close()

    # ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _encoded(self, path: str, ask: Ask) -> tuple[bytes, bytes | None]:
        """What tells the request from others, and what other servers must know of it, if there are any."""
        kept = self.shared is not None and ask.size <= self.streams.limits.max_bytes
        if ask.size < LONG_BODY:
            return _encode(path, ask, kept)
        return await asyncio.get_running_loop().run_in_executor(None, _encode, path, ask, kept)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _find(self, id: str, caller: Caller) -> StreamLog | None:
        """In this process, or at another server."""
        found = self.streams.find(id, owner_of(caller))
        if found is None and self.shared is not None:
            found = await self.shared.open(id, caller)
        return found

    async def _claim(self, source: StreamLog, caller: Caller) -> StreamLog | None:
        """Take the key for all servers; the log that has it already, if there is one. Raises Conflict."""
        assert self.shared is not None
        try:
            id = await self.shared.claim(source)
            if id is None:
                return None
        except BaseException:
            self._withdraw(source)
            raise
        self._withdraw(source)
        found = await self.shared.open_soon(id, caller)
        if found is None:
            raise _busy()
        return found

    def _withdraw(self, source: StreamLog) -> None:
        """It is not begun. Whoever asked with the same key meanwhile may ask again."""
        source.refuse(_busy())
        self.streams.end(source)

    async def _again(self, exchange: Exchange, source: StreamLog, digest: bytes, after: int) -> None:
        """The same request once more."""
        if source.digest != digest:
            self.streams.release(source)
            raise Conflict("this Idempotency-Key or Last-Event-ID belongs to another request; use a new key")
        await self._resume(exchange, source, after)

    async def _resume(self, exchange: Exchange, source: StreamLog, after: int) -> None:
        try:
            source.check_end(after)
        except Gone:
            self.streams.release(source)
            raise
        how: How = "elsewhere" if not source.kept else "live" if source.ended is None else "finished"
        self.streams.figures.resumed[how] += 1
        if source.ended is not None and after == source.last and not source.farewell:
            # Nothing more: to an EventSource this status says that it need not come again.
            self.streams.release(source)
            await exchange.start(204, ((STREAM_NAME, source.name),))
            await exchange.write(b"", more=False)
            return
        exchange.record.stream = True
        await self._follow(exchange, source, after)

    async def _follow(
        self, exchange: Exchange, source: StreamLog, after: int, *, left: Callable[[], None] | None = None
    ) -> None:
        reader = Reader(exchange, source, after, self._limits, self._clock, left=left)
        self.streams.join(source, reader)
        try:
            await reader.run(self._ticker)
        finally:
            self.streams.leave(source, reader)

    def _begin(
        self, exchange: Exchange, source: StreamLog, ask: Ask, identity: tuple[str, int], encoding: Encoding
    ) -> None:
        """A generation that does not end with the exchange."""
        outlet = LogOutlet(source, exchange.request_id, exchange.hand_over(), exchange.timeline)
        self._run(Production(outlet, ask, identity, source.id, encoding, log=source), exchange.caller)

    def _adopt(
        self, source: StreamLog, origin: Origin, ask: Ask, caller: Caller, refusal: HeadraceError | None, ids: int
    ) -> None:
        """Go on with what a server gone began; its log is here, with all that was said."""
        record, timeline = origin.record(self._clock())
        outlet = LogOutlet(source, origin.request_id, record, timeline)
        encoding = plain_encoding(timeline, self._clock) if origin.plain else openai_answer
        production = Production(
            outlet, ask, origin.identity, source.id, encoding,
            family=origin.family, log=source, refusal=refusal, ids=ids,
        )  # fmt: skip
        self._run(production, caller)

    def _run(self, production: Production, caller: Caller) -> None:
        task = asyncio.get_running_loop().create_task(self._produce(production, caller))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _produce(self, production: Production, caller: Caller) -> None:
        """Make it, and bring its log to an end, whatever happens."""
        source, outlet = production.log, production.outlet
        assert source is not None
        assert isinstance(outlet, LogOutlet)
        refusal: HeadraceError | None = None
        try:
            if production.refusal is not None:
                raise production.refusal
            await self._producer.outlive(production, caller)
        except asyncio.CancelledError:
            refusal = Draining("the server is shutting down")
            raise
        except ClientGone:
            refusal = Abandoned("nobody waits for this stream")
        except HeadraceError as error:
            # Its traceback holds this very frame, and with it the whole request, until garbage is collected.
            refusal = error.with_traceback(None)
        except Exception as error:
            report_fault(log, error, outlet.request_id)
            refusal = InternalError(f"internal error; request {outlet.request_id}")
        finally:
            try:
                if refusal is not None and not source.begun and self.shared is not None:
                    await self.shared.free(source)  # before it is told: whoever hears of it may ask again at once
            finally:
                self._end(source, outlet, refusal)

    def _end(self, source: StreamLog, outlet: LogOutlet, refusal: HeadraceError | None) -> None:
        """`refusal`: why there was no stream, or, of one that another server began, why it cannot be gone on with."""
        source.writer = None
        if refusal is not None and source.begun and source.stopping is not None:
            refusal = source.stopping  # nobody goes on with it
        if refusal is None:
            source.end("lost" if outlet.farewell else _reason(outlet), outlet.farewell)
        elif not source.begun:
            source.refuse(refusal)
        elif isinstance(refusal, ServiceError | RateLimited):
            source.end("lost", source.error_event(refusal))  # another server, or a later try, may do better
        else:
            source.append(source.error_event(refusal))
            source.end(_why(refusal) or "failed")
        self.streams.end(source)
        if self.shared is not None:
            self.shared.writer.over(source)


def _reason(outlet: LogOutlet) -> Ended:
    failure = None if outlet.live is None else outlet.live.failure
    return _why(failure) or ("done" if outlet.record.outcome == "ok" else "failed")


def _why(error: HeadraceError | None) -> Ended | None:
    """How a log ended that ended with that error, if it was wished."""
    if isinstance(error, Stopped):
        return "abandoned" if isinstance(error, Abandoned) else "stopped"
    return None


def _busy() -> Conflict:
    return Conflict("a request with this Idempotency-Key is just being begun elsewhere; try again")


def _leave(source: StreamLog) -> None:
    """The only one who could ever read it goes."""
    source.unwanted = True
    if source.writer is not None:
        source.writer.leave()


def _key(exchange: Exchange) -> str:
    """The idempotency key, "" if there is none. Raises InvalidRequest."""
    given = exchange.values(b"idempotency-key")
    if not given:
        return ""
    if len(given) > 1 or not 0 < len(given[0]) <= MAX_KEY:
        raise InvalidRequest(f"give one Idempotency-Key of 1 to {MAX_KEY} characters")
    return given[0].decode("latin-1")


def _last_event(exchange: Exchange) -> tuple[str, int] | None:
    """What `Last-Event-ID` says: stream and position. Raises InvalidRequest."""
    given = [value for value in exchange.values(b"last-event-id") if value]
    if not given:
        return None
    last = parse_id(given[0].decode("latin-1")) if len(given) == 1 else None
    if last is None:
        raise InvalidRequest("Last-Event-ID must be the id of an event of ours: STREAM-NUMBER")
    return last


def _after(exchange: Exchange) -> int:
    """`?after=N`, 0 if it is not there. Raises InvalidRequest."""
    given = [value for name, value in parse_qsl(exchange.query.decode("latin-1"), True) if name == "after"]
    if not given:
        return 0
    if len(given) > 1 or not is_position(given[0]):
        raise InvalidRequest("after must be a whole number, the one at the end of an event's id", param="after")
    return int(given[0])


def _encode(path: str, ask: Ask, kept: bool) -> tuple[bytes, bytes | None]:
    """A digest that is the same however the request's JSON is written; and that JSON, in its order, if `kept`."""
    digest = hashlib.sha256(msgspec.json.encode([path, ask.fields], order="deterministic")).digest()[:16]
    return digest, msgspec.json.encode(ask.fields) if kept else None


async def _tell(exchange: Exchange, id: str, status: str) -> None:
    body = {"id": id, "object": "headrace.stream", "status": status}
    await exchange.answer(200, msgspec.json.encode(body))
