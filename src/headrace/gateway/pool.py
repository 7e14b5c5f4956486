"""All engines of a server and the names that clients know them by.

    alias ─▶ Route ─ weights ─▶ Member ─ state, health ─▶ Starting          see `router` for who is chosen
                                  load ─▶ LOADING ─▶ WARMING ─▶ READY ─▶ DRAINING ─▶ GONE ◀─ drain

Rules: everything on the event loop; what a request reads is changed in one assignment. An engine is closed only when no
lease is left, or its time is over: what still runs then fails, and goes on elsewhere where that is possible. Nothing
that happens to one engine stands in the way of another.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from headrace.core.clock import Clock
from headrace.core.errors import (
    Conflict,
    EngineUnavailable,
    HeadraceError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ServiceError,
    StartupError,
    Unsupported,
)
from headrace.core.request import Ask, Sampling
from headrace.gateway.affinity import Affinity, Beginnings, beginnings
from headrace.gateway.backend import Backend, End, Lease
from headrace.gateway.health import Health
from headrace.gateway.member import CopyLease, Member, MemberLease, Restartable, Serving, Starting
from headrace.gateway.model import ServedModel
from headrace.gateway.prober import Prober
from headrace.gateway.router import Candidate, Condition, Sight, Turns, choose
from headrace.gateway.spec import AliasSpec, EngineSpec, MirrorSpec
from headrace.gateway.states import State, check
from headrace.observe.fleet_metrics import Standing

__all__ = ["Member", "Pool", "Route", "Starting"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route:
    """Where an alias leads."""

    weights: Mapping[str, float]
    """Engine → share, >= 0; one of 0 is asked only if all others fail."""
    mirror: MirrorSpec | None = None


class Pool:
    """A Fleet. `build` makes a backend of a spec, at once and without starting it."""

    def __init__(self, build: Callable[[EngineSpec], Starting], clock: Clock) -> None:
        self._build = build
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._routes: dict[str, Route] = {}
        self._turns: dict[str, Turns] = {}
        self._loaded: dict[str, Backend] = {}
        self._affinity = Affinity()
        self._leases = 0
        self._open = False
        """Something was loaded once: from then on the aliases are known."""
        self._closed = False
        self._prober = Prober(self._members, self.load, clock)
        self.counts: Counter[str] = Counter()
        """`failovers`: attempts after one that failed before the first text; `continued`: answers that another engine
        went on with."""
        self.members: Mapping[str, Member] = MappingProxyType(self._members)
        self.routes: Mapping[str, Route] = MappingProxyType(self._routes)
        self.backends: Mapping[str, Backend] = MappingProxyType(self._loaded)

    # Declarations ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def declare(self, spec: EngineSpec) -> None:
        """Raises Conflict if there is one of that name."""
        if spec.name in self._members:
            raise Conflict(f"an engine is named {spec.name} already; forget it first")
        self._members[spec.name] = Member(spec, self._clock())

    def forget(self, name: str) -> None:
        """Raises Conflict while it is loaded or an alias leads to it, InvalidRequest if there is none."""
        member = self._member(name)
        if member.state is not State.GONE:
            raise Conflict(f"engine {name} is {member.state}; drain it first")
        for alias, route in self._routes.items():
            if name in route.weights or (route.mirror is not None and route.mirror.to == name):
                raise Conflict(f"the alias {alias} leads to engine {name}; take it out there first")
        del self._members[name]
        self._affinity.forget(name)

    def lead(self, spec: AliasSpec) -> None:
        """Make an alias, or replace one, whether its engines are loaded or not. Raises InvalidRequest."""
        for name in (*spec.engines, *(() if spec.mirror is None else (spec.mirror.to,))):
            self._member(name)
        self._set_route(spec.name, Route(MappingProxyType(dict(spec.engines)), spec.mirror))

    def assign(self, alias: str, weights: Mapping[str, float]) -> None:
        """Change an alias's engines: the next request sees all of it. Raises InvalidRequest; Conflict if an engine
        that had no weight gets some and is not READY: one that is away keeps nobody from changing the others."""
        route = self._routes.get(alias)
        if route is None:
            raise InvalidRequest(f"there is no alias {alias}; there are {', '.join(self._routes) or 'none'}")
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights.values()) or not any(weights.values()):
            raise InvalidRequest("weights are numbers from 0 up, and one is above 0")
        for name, weight in weights.items():
            member = self._member(name)
            if weight and not route.weights.get(name) and member.state is not State.READY:
                raise Conflict(f"engine {name} is {member.state}, not ready: {member.reason or 'load it first'}")
        self._set_route(alias, Route(MappingProxyType(dict(weights)), route.mirror))

    # Life ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def load(self, name: str) -> None:
        """Until it is READY; one that drains is taken back. Raises StartupError (then it is GONE), Conflict
        while something else is being done to it, InvalidRequest if there is none."""
        member = self._member(name)
        if member.state is State.READY:
            return
        if member.state is State.DRAINING and member.quiet is not None and member.ending is None:
            self._set(member, State.READY)
            member.quiet.set()
            member.quiet = None
            return
        if member.state is not State.GONE:
            raise Conflict(f"engine {name} is {member.state}; wait until that is over")
        if self._closed:
            raise StartupError("the server is shutting down")
        self._set(member, State.LOADING)
        try:
            await self._start(member)
        except BaseException as error:
            failure = _startup_error(name, error)
            backend, member.backend = member.backend, None
            self._set(member, State.GONE, failure.message)
            if backend is not None:
                await _closed(name, backend)
            if isinstance(error, Exception):
                raise failure from error
            raise
        self._open = True
        self._set(member, State.READY)
        self._prober.watch(member)

    def want(self, name: str) -> None:
        """Load it as soon as that works: it is tried every `probe_s`."""
        member = self._member(name)
        member.wanted = True
        self._prober.watch(member)

    async def drain(self, name: str, timeout_s: float) -> None:
        """Nothing new goes there from now on; once its leases are closed, or after `timeout_s`, it is closed and GONE.
        Returns early if it is taken back. What still runs at the timeout fails, and is tried elsewhere. Raises
        Conflict, InvalidRequest."""
        member = self._member(name)
        member.wanted = False
        if member.state is State.GONE:
            return
        if member.state is not State.READY:
            raise Conflict(f"engine {name} is {member.state}; wait until that is over")
        self._set(member, State.DRAINING)
        member.quiet = quiet = asyncio.Event()
        if not member.used:
            quiet.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await quiet.wait()
        if member.quiet is not quiet:
            return  # taken back, or closed with the pool
        if member.used:
            left = member.leases + member.copies
            log.warning("engine %s: %d requests are not over and are ended", name, left)
        await self._end(member, "drained")

    async def close(self) -> None:
        """Close every engine."""
        self._closed = True
        await self._prober.close()
        closing = []
        for name, member in self._members.items():
            if member.state is State.READY:
                self._set(member, State.DRAINING)
            if member.state is State.DRAINING:
                closing.append(self._end(member, "the server is shutting down"))
            elif member.backend is not None:
                closing.append(_closed(name, member.backend))
        await asyncio.gather(*closing)

    # A Fleet ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def aliases(self) -> Collection[str]:
        return self._routes.keys() if self._open else ()

    def created(self, alias: str) -> int:
        for name in self._routes[alias].weights:
            if name in self._loaded:
                return self._loaded[name].created
        return 0

    def sampling(self, alias: str) -> Sampling | None:
        loaded = (self._loaded.get(name) for name in self._routes[alias].weights)
        return next((one.sampling for one in loaded if isinstance(one, ServedModel)), None)

    def ready(self, alias: str) -> bool:
        now = self._clock()  # one that is full is ready: whoever finds it so is told to come again
        conditions = (member.fitness(now) for member in self._of(self._routes[alias]))
        return any(condition is not None and condition is not Condition.DOWN for condition in conditions)

    def lease(self, ask: Ask, *, without: Collection[str] = (), family: str | None = None) -> Lease:
        route = self._routes.get(ask.model)
        if route is None:
            raise ModelNotFound(f"no such model; served here: {', '.join(sorted(self._routes))}", param="model")
        now = self._clock()
        prompt: Beginnings | None = None

        def look(one: Candidate) -> Sight:
            nonlocal prompt
            if prompt is None:
                prompt = beginnings(ask)
            member = self._members[one.name]
            assert member.backend is not None
            shared = self._affinity.shared(one.name, prompt)
            predicted = member.backend.predict(ask.size, shared, ask.options.priority)
            return Sight(shared, predicted or member.health.ttft(now))

        chosen = choose(list(self._candidates(route, now, without, family)), self._turns[ask.model], look)
        if chosen is None:
            raise self._refusal(route, now, without, family)
        if prompt is None and len(route.weights) > 1 and self._has_siblings(route, chosen):
            prompt = beginnings(ask)
        if prompt is not None:
            self._affinity.remember(chosen.name, prompt)
        self._leases += 1
        member = self._members[chosen.name]
        member.chosen = self._leases
        if without and family is None:
            self.counts["failovers"] += 1
        return MemberLease(member, self._clock, continued=None if family is None else self.counts)

    def lease_of(self, name: str) -> Lease:
        """The engine of that name for a copy of a request; what becomes of that changes nothing here. Raises
        EngineUnavailable while its breaker is open, or it has as many as it may have, copies counted too."""
        member = self._members.get(name)
        if member is None or not member.takes_copies:
            raise EngineUnavailable(f"engine {name} takes no copies now")
        return CopyLease(member)

    def own(self, alias: str) -> ServedModel:
        there = sorted(self._routes[alias].weights.items(), key=lambda pair: -pair[1])
        members = [self._members[name] for name, _ in there]
        for member in members:
            if member.state is State.READY and isinstance(member.serving, ServedModel) and member.serving.ready:
                return member.serving
        if any(member.spec.kind == "llama" for member in members):
            raise EngineUnavailable("the model is not ready yet; try again shortly")
        raise Unsupported("model: its engines do not tell tokens", param="model")

    def others(self, ask: Ask, *, without: Collection[str]) -> bool:
        route = self._routes.get(ask.model)
        if route is None:
            return False
        candidates = self._candidates(route, self._clock(), without, None)
        return any(one.condition is Condition.WELL for one in candidates)

    async def look(self) -> None:
        """Probe whoever is due, and load what is wanted; the pool does it by itself too."""
        await self._prober.look()

    # For metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def standings(self) -> Iterator[Standing]:
        """Of every declared engine."""
        for name, member in self._members.items():
            yield Standing(
                name,
                member.state,
                tuple(State),
                in_flight=member.leases,
                breaker_open=member.health.open,
                ends={end: member.ends[end] for end in get_args(End)},
            )

    # Inside ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _start(self, member: Member) -> None:
        member.health, member.restartable = Health(), None
        self._affinity.forget(member.spec.name)
        member.backend = backend = self._build(member.spec)
        await backend.start()
        self._set(member, State.WARMING)
        member.warming = member.since
        await backend.warm()
        if self._closed:
            raise StartupError("the server is shutting down")
        if isinstance(backend, Restartable):
            member.restartable = backend
        self._loaded[member.spec.name] = member.serving = backend.served if isinstance(backend, Serving) else backend

    async def _end(self, member: Member, reason: str) -> None:
        """Close one that is DRAINING; it can no longer be taken back. Whoever stops waiting does not stop that."""
        if member.ending is None:
            member.ending = asyncio.get_running_loop().create_task(self._finish(member, reason))
        await asyncio.shield(member.ending)

    async def _finish(self, member: Member, reason: str) -> None:
        backend, member.backend, member.serving = member.backend, None, None
        if member.quiet is not None:
            member.quiet.set()
            member.quiet = None
        self._loaded.pop(member.spec.name, None)
        if backend is not None:
            await _closed(member.spec.name, backend)
        self._affinity.forget(member.spec.name)
        self._set(member, State.GONE, reason)
        member.ending = None

    def _set(self, member: Member, state: State, reason: str = "") -> None:
        check(member.state, state)
        member.state, member.since, member.said = state, self._clock(), reason
        log.debug("engine %s: %s%s", member.spec.name, state, f": {reason}" if reason else "")

    def _set_route(self, alias: str, route: Route) -> None:
        self._turns[alias] = Turns()
        self._routes[alias] = route

    def _member(self, name: str) -> Member:
        member = self._members.get(name)
        if member is None:
            raise InvalidRequest(f"no engine is named {name}; declared are {', '.join(self._members) or 'none'}")
        return member

    def _of(self, route: Route) -> Iterator[Member]:
        return (self._members[name] for name in route.weights)

    def _has_siblings(self, route: Route, chosen: Candidate) -> bool:
        return sum(member.spec.family == chosen.family for member in self._of(route)) > 1

    def _candidates(
        self, route: Route, now: float, without: Collection[str], family: str | None
    ) -> Iterator[Candidate]:
        for name, weight in route.weights.items():
            member = self._members[name]
            condition = member.condition(now)
            if condition is None or name in without or family not in (None, member.spec.family):
                continue
            yield Candidate(name, member.spec.family, weight, condition, member.leases, member.chosen)

    def _refusal(self, route: Route, now: float, without: Collection[str], family: str | None) -> ServiceError:
        """Why nobody can take a request."""
        left = [m for m in self._of(route) if m.spec.name not in without and family in (None, m.spec.family)]
        if not left:
            return EngineUnavailable("there is no other engine for this model; try again shortly")
        if any(member.state is State.READY and member.full for member in left):
            return Overloaded("every engine of this model has as many requests as it may have", reason="queue_full")
        waits = [member.health.retry_after(now) for member in left if member.state is State.READY]
        if any(waits):
            after = max(1, math.ceil(min(wait for wait in waits if wait)))
            return EngineUnavailable("the engines of this model failed lately; try again later", retry_after=after)
        return EngineUnavailable("the model is not ready yet; try again shortly")


def _startup_error(name: str, error: BaseException) -> StartupError:
    if isinstance(error, StartupError):
        return error
    if isinstance(error, HeadraceError):
        return StartupError(error.message)
    if isinstance(error, Exception):
        log.error("engine %s did not start: %s", name, type(error).__name__)
        log.debug("where it broke", exc_info=error)
        return StartupError(f"engine {name}: it did not start ({type(error).__name__})")
    return StartupError("stopped while it was loading")


async def _closed(name: str, backend: Starting) -> None:
    try:
        await backend.close()
    except Exception as error:
        log.error("engine %s did not close: %s", name, type(error).__name__)
