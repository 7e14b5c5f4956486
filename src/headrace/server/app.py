"""The server as a raw ASGI application: a path table, and the way of a request through it.

    key ─▶ body ─▶ parse ─▶ model ─▶ limits ─▶ engine ─▶ fields ─▶ tokens, length ─▶ submit ─▶ answer
    401    413     400      404      403, 429  503       400       400               503       200

Rules: nothing is sent before the engine has the request, so every refusal is an honest status, also for a stream.
Whatever happens in here, the client gets an envelope and never a traceback; the log gets where, and never the
user's text. No middleware: what every request needs is in `__call__`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec

from headrace import __version__
from headrace.core.clock import Clock
from headrace.core.errors import (
    Draining,
    EngineUnavailable,
    HeadraceError,
    InternalError,
    ModelNotAllowed,
    ModelNotFound,
    RouteNotFound,
)
from headrace.core.request import Ask
from headrace.gateway.backend import Backend, Fleet
from headrace.gateway.fixed import FixedFleet
from headrace.gateway.guard import Caller, Guard, KeyGuard, OpenGuard
from headrace.gateway.mirror import Mirror
from headrace.gateway.shared import SharedRedis
from headrace.observe.accesslog import AccessLog
from headrace.observe.fault import report_fault
from headrace.observe.metrics import CONTENT_TYPE, Metrics
from headrace.observe.record import OTHER, Record
from headrace.protocol.defaults import report
from headrace.protocol.openai import common_options, model_of, read
from headrace.server.attempts import LONG_BODY, Encoding, openai_answer
from headrace.server.body import read_body
from headrace.server.cors import Cors
from headrace.server.exchange import ClientGone, Exchange, Receive, Scope, Send
from headrace.server.log_redis import LEASE_S
from headrace.server.page import Page
from headrace.server.plain import plain_routes
from headrace.server.production import Producer
from headrace.server.recent import Recent
from headrace.server.resume import Resuming
from headrace.server.route import Route, Routes, not_found
from headrace.server.stream import StreamLimits
from headrace.server.streams import LogLimits, Streams, owner_of
from headrace.server.ticker import Ticker
from headrace.server.tokens import token_routes

BODY_LIMIT = 10 * 2**20

log = logging.getLogger(__name__)


class App:
    """The ASGI callable. `fleet`: aliases and engines; a mapping of models is one where each is its own alias.

    `rows`: further ones of the path table. `guard`: who may ask what; `key` is short for a guard with one key, None: no
    key is asked for. `clock` in s as for everything else, `wall` Unix time in s; `new_id` makes the random part of ids,
    `seed` a seed for requests that bring none. `shared`: the Redis through which other servers can resume our streams;
    `lease_s`: for how long one that died counts as alive.
    """

    def __init__(
        self,
        fleet: Fleet | Mapping[str, Backend],
        metrics: Metrics,
        access_log: AccessLog,
        *,
        key: str | None = None,
        guard: Guard | None = None,
        mirror: Mirror | None = None,
        page: Page | None = None,
        cors: Cors | None = None,
        rows: Iterable[Route] = (),
        body_limit: int = BODY_LIMIT,
        limits: StreamLimits | None = None,
        log_limits: LogLimits | None = None,
        shared: SharedRedis | None = None,
        lease_s: float = LEASE_S,
        clock: Clock = time.monotonic,
        wall: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: secrets.token_hex(12),
        seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self.fleet: Fleet = FixedFleet(fleet) if isinstance(fleet, Mapping) else fleet
        self.metrics = metrics
        self.ticker = Ticker(clock, lag=metrics.lag)
        self._access_log = access_log
        self._guard: Guard = guard or (KeyGuard(key) if key else OpenGuard())
        self._page = page
        self._cors = cors
        self._body_limit = body_limit
        self._clock = clock
        self._wall = wall
        self._new_id = new_id
        self._seed = seed
        self._recent = Recent()
        limits = limits or StreamLimits()
        streams = Streams(log_limits or LogLimits(), clock, metrics.streams)
        self._producer = Producer(
            self.fleet, self._guard, streams, self.ticker, limits, clock, metrics, self._account, mirror=mirror
        )
        self.resuming = Resuming(streams, self._producer, limits, self.ticker, clock, shared, lease_s=lease_s)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="headrace-parse")
        self.operating = (
            Route("/healthz", {"GET": self._health}, public=True),
            Route("/health", {"GET": self._health}, public=True),
            Route("/readyz", {"GET": self._readiness}, public=True),
            Route("/metrics", {"GET": self._metrics}),
        )
        """The rows that an address for operators has too."""
        self.routes = Routes(
            Route("/v1/models", {"GET": self._list_models}),
            Route("/v1/models/{name}", {"GET": self._show_model}),
            Route("/v1/chat/completions", {"POST": self._chat}),
            Route("/v1/completions", {"POST": self._completion}),
            Route("/v1/streams/{name}", {"GET": self.resuming.get, "DELETE": self.resuming.delete}),
            *plain_routes(self, clock),
            *token_routes(self, self.fleet, self._guard),
            Route("/v1/requests/{name}", {"GET": self._show_timeline}),
            Route("/", {"GET": self._show_page}, public=True),
            *self.operating,
            *rows,
        )

    # Life ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> int:
        """Responses being made."""
        return self._producer.running

    def drain(self) -> None:
        """Take no new work from now on."""
        self.resuming.drain()
        self._producer.drain()

    async def quiet(self) -> None:
        """Until `drain` was called and no response is being made any more."""
        await self._producer.quiet()

    def fail_all(self, error: HeadraceError) -> None:
        """End every response with `error`."""
        self._producer.fail_all(error)

    async def finish(self) -> None:
        """After the last request, while there are engines: hand over what other servers need of ours."""
        await self.resuming.close()

    def close(self) -> None:
        """Give up the threads; after the last request."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # The way of a request ─────────────────────────────────────────────────────────────────────────────────────────────

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.serve(self.routes, scope, receive, send)

    async def serve(self, routes: Routes, scope: Scope, receive: Receive, send: Send) -> None:
        """One request to an address that has these routes."""
        first_byte = self._clock()
        if scope["type"] != "http":
            raise NotImplementedError(f"only HTTP is served, not {scope['type']}")
        exchange = Exchange(scope, receive, send, first_byte=first_byte, new_id=self._new_id)
        try:
            await self._answer(exchange, routes)
        except ClientGone:
            exchange.record.outcome = "cancelled"
        except asyncio.CancelledError:
            exchange.record.outcome = "cancelled"
            raise
        finally:
            if exchange.accounted:
                self._account(exchange.caller, exchange.record)

    def _account(self, caller: Caller, record: Record) -> None:
        """A request is over."""
        record.total_s = self._clock() - record.timeline.first_byte
        if record.engine is not None:
            self._recent.add(owner_of(caller), record)
        self.metrics.request(record)
        self._access_log.write(record)

    async def _answer(self, exchange: Exchange, routes: Routes) -> None:
        """Handle, and refuse if that fails. Raises ClientGone."""
        try:
            await self._dispatch(exchange, routes)
            return
        except ClientGone:
            raise
        except HeadraceError as error:
            refusal: HeadraceError = error
        except Exception as error:
            report_fault(log, error, exchange.request_id)
            refusal = InternalError(f"internal error; request {exchange.request_id}")
        if exchange.started:
            exchange.record.outcome = "error"
        else:
            # Its traceback holds this very frame, and with it the whole request, until garbage is collected.
            await exchange.refuse(refusal.with_traceback(None))

    async def _dispatch(self, exchange: Exchange, routes: Routes) -> None:
        route = routes.find(exchange.path)
        if route is not None:
            exchange.record.route = route.path
        if self._cors is not None:
            exchange.extra = self._cors.headers(exchange.values(b"origin"))
            if (answer := self._cors.preflight(exchange, route)) is not None:
                await exchange.confirm(answer)
                return
        check = routes.check(route)
        if route is not None and route.public:
            pass
        elif check is not None:
            check(exchange)
        else:
            exchange.caller = await self._guard.identify(exchange.values(b"authorization"))
            exchange.record.key = exchange.caller.name or None
        if route is None:
            raise not_found()
        await route.handler(exchange.method)(exchange)

    # Answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _chat(self, exchange: Exchange) -> None:
        await self.generate(exchange, self.ask(exchange, *await self.body(exchange), chat=True), "chatcmpl-")

    async def _completion(self, exchange: Exchange) -> None:
        await self.generate(exchange, self.ask(exchange, *await self.body(exchange), chat=False), "cmpl-")

    async def body(self, exchange: Exchange) -> tuple[Mapping[str, Any], int]:
        """The body's object, and its bytes. Raises InvalidRequest, BodyTooLarge, ClientGone."""
        body = await read_body(exchange, limit=self._body_limit)
        exchange.timeline.body = self._clock()
        if len(body) < LONG_BODY:
            return read(body), len(body)
        return await asyncio.get_running_loop().run_in_executor(self._threads, read, body), len(body)

    def ask(self, exchange: Exchange, fields: Mapping[str, Any], size: int, *, chat: bool) -> Ask:
        """A request, as far as it must be known before there is an engine. Raises whatever is wrong with it."""
        if exchange.timeline.body is None:
            exchange.timeline.body = self._clock()
        alias = self.alias(model_of(fields), exchange)
        options, caller = common_options(fields), exchange.caller
        options = replace(options, priority=max(options.priority, caller.priority))
        exchange.record.stream = options.stream
        request_id = exchange.request_id
        return Ask(chat, alias, fields, size, options, self._seed(), caller.salt, request_id=request_id)

    def alias(self, name: str, exchange: Exchange) -> str:
        """`name`, which the caller may use. Raises ModelNotFound, ModelNotAllowed."""
        aliases = self.aliases(exchange)
        if name not in aliases and name in self.fleet.aliases:
            exchange.record.model = name
            allowed = ", ".join(sorted(aliases)) or "none that is served here"
            raise ModelNotAllowed(f"this key may not use that model; it may use: {allowed}", param="model")
        if name not in aliases:
            exchange.record.model = OTHER
            if not self.fleet.aliases:
                raise EngineUnavailable("no model is loaded yet; try again shortly")
            raise ModelNotFound(f"no such model; served here: {', '.join(sorted(aliases))}", param="model")
        exchange.record.model = name
        return name

    def aliases(self, exchange: Exchange) -> Collection[str]:
        """Those that the caller may know of."""
        allowed = exchange.caller.models
        return [name for name in self.fleet.aliases if allowed is None or name in allowed]

    async def generate(self, exchange: Exchange, ask: Ask, prefix: str, encoding: Encoding = openai_answer) -> None:
        """From a request to the last byte of its answer."""
        identity = f"{prefix}{self._new_id()}", int(self._wall())
        if ask.options.stream and ask.options.resume:
            await self.resuming.post(exchange, ask, identity, encoding)
        else:
            await self._producer.answer(exchange, ask, identity, encoding)

    # Everything else ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _list_models(self, exchange: Exchange) -> None:
        data = [self._card(name) for name in self.aliases(exchange)]
        await exchange.answer(200, msgspec.json.encode({"object": "list", "data": data}))

    async def _show_model(self, exchange: Exchange) -> None:
        alias = self.alias(exchange.path.removeprefix("/v1/models/"), exchange)
        await exchange.answer(200, msgspec.json.encode(self._card(alias)))

    def _card(self, alias: str) -> dict[str, Any]:
        card = {"id": alias, "object": "model", "created": self.fleet.created(alias), "owned_by": "headrace"}
        sampling = self.fleet.sampling(alias)
        return card if sampling is None else {**card, "headrace": {"sampling": report(sampling)}}

    async def _show_timeline(self, exchange: Exchange) -> None:
        request_id, _, rest = exchange.path.removeprefix("/v1/requests/").rpartition("/")
        found = self._recent.find(owner_of(exchange.caller), request_id) if rest == "timeline" else None
        if found is None:
            raise RouteNotFound("no request of that id among the latest; ask for /v1/requests/ID/timeline")
        await exchange.answer(200, msgspec.json.encode(found))

    async def _health(self, exchange: Exchange) -> None:
        """The process is alive; whether it can answer is what readiness says. What it can do without is named."""
        status = "draining" if self._producer.draining else "ok"
        degraded = sorted({tier for engine in self.fleet.backends.values() for tier in engine.stats.tiers.down})
        body = {"status": status, "version": __version__, "degraded": degraded}
        await exchange.answer(200, msgspec.json.encode(body))

    async def _readiness(self, exchange: Exchange) -> None:
        ready = [name for name in self.fleet.aliases if self.fleet.ready(name)]
        if self._producer.draining:
            raise Draining("the server is shutting down")
        if not ready:
            raise EngineUnavailable("no model is ready yet")
        await exchange.answer(200, msgspec.json.encode({"status": "ready", "models": ready}))

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.answer(200, self.metrics.render(), content_type=CONTENT_TYPE.encode())

    async def _show_page(self, exchange: Exchange) -> None:
        if self._page is None:
            raise not_found()
        await exchange.answer(
            200, self._page.body, content_type=b"text/html; charset=utf-8", headers=self._page.headers
        )
