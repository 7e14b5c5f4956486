"""The admin API: which engines there are, which answer what, and how to change that while requests run.

    /admin/v1/engines   GET, POST          /admin/v1/engines/{name}   GET, DELETE
    /admin/v1/aliases   GET                /admin/v1/aliases/{name}   GET, PUT
    /admin/v1/switch    GET, POST          further rows: whoever has something to show hands them to `admin_routes`

Rules: every row carries the same check, see `operators`; bodies are strict, errors are envelopes; times are ms, ages s.
What runs long belongs to the server: a caller that leaves stops nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from headrace.core.clock import Clock
from headrace.core.errors import Conflict, HeadraceError, InvalidRequest, RouteNotFound, StartupError
from headrace.core.file_name import shown
from headrace.core.request import INTERACTIVE
from headrace.gateway.pool import Member, Pool
from headrace.gateway.spec import AliasSpec, EngineSpec, parse_weights
from headrace.gateway.states import State
from headrace.gateway.switch import Report, Switcher
from headrace.protocol.admin import name as a_name
from headrace.protocol.admin import only, parse_switch
from headrace.protocol.fields import Field, mapping
from headrace.protocol.openai import read
from headrace.protocol.sse import json_value
from headrace.server.body import read_body
from headrace.server.exchange import Exchange
from headrace.server.route import Check, Route

PREFIX = "/admin/v1/"
BODY_LIMIT = 64 * 1024
TYPICAL_BODY = 1000
"""Bytes of the request whose time to the first text is predicted."""
Declare = Callable[[str, Mapping[str, Any]], EngineSpec]
"""A name and what stands in the table of that engine → what it says. Raises StartupError."""

NAME: Field[str] = Field("name", a_name, "")
WEIGHTS: Field[Mapping[str, Any]] = Field("engines", mapping, {})


def admin_routes(
    pool: Pool,
    switcher: Switcher,
    clock: Clock,
    *,
    check: Check,
    parse: Declare,
    more: Iterable[Route] = (),
) -> tuple[Route, ...]:
    """The rows. `more`: further ones of the admin API, which get the same check."""
    admin = _Admin(pool, switcher, clock, parse)
    rows = (
        Route(PREFIX + "engines", {"GET": admin.list_engines, "POST": admin.declare}),
        Route(PREFIX + "engines/{name}", {"GET": admin.show_engine, "DELETE": admin.remove}),
        Route(PREFIX + "aliases", {"GET": admin.list_aliases}),
        Route(PREFIX + "aliases/{name}", {"GET": admin.show_alias, "PUT": admin.assign}),
        Route(PREFIX + "switch", {"GET": admin.list_switches, "POST": admin.switch}),
    )
    return tuple(replace(row, check=check) for row in (*rows, *more))


@runtime_checkable
class Housed(Protocol):
    """A backend whose engine has a process of its own."""

    @property
    def pid(self) -> int | None: ...


class _Admin:
    """The handlers."""

    def __init__(self, pool: Pool, switcher: Switcher, clock: Clock, parse: Declare) -> None:
        self._pool = pool
        self._switcher = switcher
        self._clock = clock
        self._parse = parse
        self._tasks: set[asyncio.Task[None]] = set()
        """Loads and removals that go on behind an answer."""

    # Engines ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def list_engines(self, exchange: Exchange) -> None:
        await _answer(exchange, {"engines": [self._engine(member) for member in self._pool.members.values()]})

    async def show_engine(self, exchange: Exchange) -> None:
        await _answer(exchange, self._engine(self._member(exchange)))

    async def declare(self, exchange: Exchange) -> None:
        fields = await _fields(exchange)
        name = NAME.read(fields)
        if not name:
            raise InvalidRequest("name is missing; name the engine", param="name")
        table = {key: value for key, value in fields.items() if key != "name" and value is not None}
        try:
            spec = self._parse(name, table)
        except StartupError as error:
            raise _bad_field(error, f"engines.{name}.") from None
        self._pool.declare(spec)
        member = self._pool.members[name]
        if spec.load:
            self._behind(self._load(name))
        await _answer(exchange, self._engine(member), 201)

    async def remove(self, exchange: Exchange) -> None:
        """One that nobody wants finishes what it has and is forgotten; where it had weight 0, it is taken out."""
        member = self._member(exchange)
        name = member.spec.name
        if member.state in (State.LOADING, State.WARMING):
            raise Conflict(f"engine {name} is {member.state}; wait until that is over")
        drained = self._switcher.retire(name)
        if drained is None:
            raise Conflict(f"engine {name} answers requests, or is about to; switch its aliases to another one first")
        for alias, route in tuple(self._pool.routes.items()):
            if name in route.weights:
                weights = {other: weight for other, weight in route.weights.items() if other != name}
                self._pool.lead(AliasSpec(alias, weights, route.mirror))
        if member.state is State.GONE:
            self._pool.forget(name)
            await _answer(exchange, {"name": name, "removed": True})
            return
        self._behind(self._forget(name, drained))
        await _answer(exchange, {"name": name, "removed": False}, 202)

    # Aliases ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def list_aliases(self, exchange: Exchange) -> None:
        await _answer(exchange, {"aliases": [self._alias(name) for name in self._pool.routes]})

    async def show_alias(self, exchange: Exchange) -> None:
        await _answer(exchange, self._alias(self._alias_of(exchange)))

    async def assign(self, exchange: Exchange) -> None:
        """New weights, of engines that are loaded. None is loaded or unloaded by it."""
        alias = self._alias_of(exchange)
        fields = await _fields(exchange)
        only(fields, "engines")
        try:
            weights = parse_weights("engines", WEIGHTS.read(fields), declared=self._pool.members)
        except StartupError as error:
            raise _bad_field(error, "") from None
        if any(report.alias == alias and report.change_s is None for report in self._switcher.running):
            raise Conflict(f"{alias} is being switched; wait until that is over")
        self._pool.assign(alias, weights)
        await _answer(exchange, self._alias(alias))

    # Switches ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def list_switches(self, exchange: Exchange) -> None:
        running, last = self._switcher.running, self._switcher.last
        await _answer(exchange, {"running": list(map(self._switch, running)), "last": list(map(self._switch, last))})

    async def switch(self, exchange: Exchange) -> None:
        ask = parse_switch(await _fields(exchange))
        report = self._switcher.start(ask.alias, ask.to, ask.weight)
        if ask.wait:
            await _answer(exchange, self._switch(await self._switcher.settled(report.id)))
        else:
            await _answer(exchange, self._switch(report), 202)

    # Inside ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _member(self, exchange: Exchange) -> Member:
        member = self._pool.members.get(exchange.path.removeprefix(PREFIX + "engines/"))
        if member is None:
            raise RouteNotFound(f"no such engine is declared; there are: {', '.join(self._pool.members) or 'none'}")
        return member

    def _alias_of(self, exchange: Exchange) -> str:
        alias = exchange.path.removeprefix(PREFIX + "aliases/")
        if alias not in self._pool.routes:
            raise RouteNotFound(f"there is no such alias; there are: {', '.join(self._pool.routes) or 'none'}")
        return alias

    def _engine(self, member: Member) -> dict[str, Any]:
        spec, backend, now = member.spec, member.backend, self._clock()
        there = backend if member.state in (State.READY, State.DRAINING) else None
        predicted = 0.0 if there is None else there.predict(TYPICAL_BODY, 0.0, INTERACTIVE) or member.health.ttft(now)
        stats = None if there is None else there.stats
        return {
            "name": spec.name,
            "kind": spec.kind,
            "model": shown(spec.model),
            "family": spec.family,
            "url": spec.url or None,
            "state": str(member.state),
            "seconds": round(now - member.since, 3),
            "healthy": member.state is State.READY and not member.reason,
            "reason": member.reason,
            "weights": {alias: _share(route.weights, spec.name) for alias, route in self._pool.routes.items()
                        if spec.name in route.weights},
            "leases": member.leases,
            "running": 0 if stats is None else stats.running,
            "waiting": 0 if stats is None else stats.waiting,
            "predicted_ttft_ms": round(predicted * 1e3, 3) or None,
            "rung": None if there is None else there.lives.rung,
            "rung_note": "" if there is None else there.lives.note,
            "memory_bytes": _memory(backend.pid) if isinstance(backend, Housed) else None,
        }  # fmt: skip

    def _alias(self, name: str) -> dict[str, Any]:
        route = self._pool.routes[name]
        mirror = None if route.mirror is None else {"to": route.mirror.to, "share": route.mirror.share}
        return {"name": name, "engines": dict(route.weights), "mirror": mirror, "ready": self._pool.ready(name)}

    def _switch(self, report: Report) -> dict[str, Any]:
        return {
            "id": report.id,
            "alias": report.alias,
            "to": report.to,
            "weight": report.weight,
            "stage": report.stage,
            "seconds": round(self._clock() - report.since, 3),
            "load_ms": _ms(report.load_s),
            "warm_ms": _ms(report.warm_s),
            "changeover_ms": _ms(report.change_s),
            "draining": list(report.draining),
            "error": None if report.error is None else report.error.message,
        }

    def _behind(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, name: str) -> None:
        with suppress(HeadraceError):  # it is GONE then, and says why
            await self._switcher.load(name)

    async def _forget(self, name: str, drained: asyncio.Task[None]) -> None:
        await asyncio.wait((drained,))
        with suppress(HeadraceError):  # it is wanted again
            self._pool.forget(name)


async def _fields(exchange: Exchange) -> dict[str, Any]:
    return read(await read_body(exchange, limit=BODY_LIMIT))


async def _answer(exchange: Exchange, value: Mapping[str, Any], status: int = 200) -> None:
    await exchange.answer(status, json_value(value))


def _bad_field(error: StartupError, prefix: str) -> InvalidRequest:
    """What is wrong with a table, said of a body."""
    message = error.message.removeprefix(prefix)
    return InvalidRequest(message, param=message.partition(":")[0] if ":" in message else None)


def _share(weights: Mapping[str, float], name: str) -> float:
    return round(weights[name] / sum(weights.values()), 6)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _memory(pid: int | None) -> int | None:
    """Resident bytes of a process; None if that cannot be told."""
    try:
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(row.split()[1]) * 1024 for row in rows if row.startswith("VmRSS:")), None)
