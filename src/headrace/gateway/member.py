"""One engine of a pool: what it was declared as, the state it is in, how well it is, who uses it.

    Member ── backend ──▶ Starting           made anew at each load
       ▲  ├── health, leases ◀── MemberLease ◀── one attempt
       │  └── copies ◀────────── CopyLease ◀──── a mirrored request

Rules: only the pool changes a state; a lease changes the counts of its own engine and nothing else. What becomes of a
copy says nothing to those who choose engines for requests: it may break what it likes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from headrace.core.clock import Clock
from headrace.gateway.backend import Backend, End
from headrace.gateway.health import Health
from headrace.gateway.router import Condition
from headrace.gateway.spec import EngineSpec
from headrace.gateway.states import State


class Starting(Backend, Protocol):
    """A backend that is not there yet. `start`, `warm`, then it takes work; `close` at any time, also twice."""

    async def start(self) -> None:
        """Load, or reach. Raises StartupError."""
        ...

    async def warm(self) -> None:
        """Compute what the first request should not wait for, or try it. Raises StartupError."""
        ...


@runtime_checkable
class Probed(Protocol):
    """A backend that can be asked how it is without a request."""

    async def probe(self) -> bool:
        """Is it well? Raises HeadraceError, OSError."""
        ...


@runtime_checkable
class Serving(Protocol):
    """A backend that makes another one when it is started."""

    @property
    def served(self) -> Backend: ...


@runtime_checkable
class Restartable(Protocol):
    """A backend that comes back by itself."""

    @property
    def restarting(self) -> bool:
        """What is submitted now waits until it is back."""
        ...


@dataclass(slots=True)
class Member:
    """Owned by its pool; everybody else reads."""

    spec: EngineSpec
    since: float
    """When it got into its state, on the pool's clock."""
    state: State = State.GONE
    backend: Starting | None = None
    serving: Backend | None = None
    """What requests are given to: what stands behind `backend` once that is loaded, if it is another."""
    leases: int = 0
    """Attempts that use it now."""
    copies: int = 0
    """Mirrored requests that use it now, which nobody sees but whoever closes it."""
    warming: float | None = None
    """When it was last loaded and began to warm."""
    said: str = "not loaded"
    """Why it is GONE."""
    health: Health = field(default_factory=Health)
    ends: Counter[End] = field(default_factory=Counter)
    """How its attempts ended."""
    chosen: int = 0
    """The pool's count of leases when it was chosen last."""
    wanted: bool = False
    """It is to be loaded as soon as that works."""
    due: float = 0.0
    """When it is probed next."""
    quiet: asyncio.Event | None = None
    """While it drains: set when its last lease of either sort is closed, or it is taken back."""
    ending: asyncio.Task[None] | None = None
    """It is being closed, and cannot be taken back."""
    restartable: Restartable | None = None

    @property
    def reason(self) -> str:
        """Why it gets no requests, or only trials; "" if it is well."""
        if self.state is not State.READY or self.backend is None:
            return self.said
        if not self.backend.ready or self.restarting:
            return "it is being started again"
        return self.health.down or self.health.reason

    @property
    def restarting(self) -> bool:
        return self.restartable is not None and self.restartable.restarting

    @property
    def full(self) -> bool:
        """It has as many attempts as it may have."""
        return 0 < self.spec.max_concurrency <= self.leases

    @property
    def used(self) -> bool:
        """Somebody holds a lease of it."""
        return bool(self.leases or self.copies)

    @property
    def takes_copies(self) -> bool:
        """One more copy is no burden: it is never a trial, and takes no place that a request could have."""
        there = self.state is State.READY and self.backend is not None and self.backend.ready
        most = self.spec.max_concurrency
        return there and not self.health.open and (most == 0 or self.leases + self.copies < most)

    def condition(self, now: float) -> Condition | None:
        """How fit it is for one more request; None: it must not get any."""
        return None if self.full else self.fitness(now)

    def fitness(self, now: float) -> Condition | None:
        """The same, however many it has."""
        if self.state is not State.READY or self.backend is None or not self.backend.ready:
            return None
        if not self.health.ready(now):
            # One of ours is watched and started again by its supervisor, so that a try costs nothing; to another
            # server it may cost a timeout.
            return Condition.FAILING if self.spec.kind == "llama" else None
        if self.restarting:
            return Condition.RESTARTING
        return Condition.DOWN if self.health.down else Condition.WELL


class MemberLease:
    """A Lease. `continued`: the attempt is to go on with what another engine began, and counted there once it does."""

    def __init__(self, member: Member, clock: Clock, *, continued: Counter[str] | None = None) -> None:
        assert member.backend is not None
        self.engine = member.spec.name
        self.backend: Backend = member.serving or member.backend
        self.family = member.spec.family
        self.ttft_timeout_s = member.spec.ttft_timeout_s
        self._member: Member | None = member
        self._health = member.health
        self._clock = clock
        self._continued = continued
        member.leases += 1
        self._trial = member.health.begin(clock())

    def first_text(self, seconds: float) -> None:
        if self._member is not None:
            self._health.first_text(seconds, self._clock(), trial=self._trial)
        if self._continued is not None:
            self._continued["continued"] += 1
            self._continued = None

    def close(self, end: End) -> None:
        member, self._member = self._member, None
        if member is None:
            return
        # Not every engine can continue an answer: one that cannot is not ill.
        unable = end == "failed" and self._continued is not None
        self._health.end("refused" if unable else end, self._clock(), trial=self._trial)
        member.ends[end] += 1
        member.leases -= 1
        _settle(member)


class CopyLease:
    """A Lease for a mirrored request: it keeps a draining engine alive, and that is all."""

    ttft_timeout_s: float | None = None

    def __init__(self, member: Member) -> None:
        assert member.backend is not None
        self.engine = member.spec.name
        self.backend: Backend = member.serving or member.backend
        self.family = member.spec.family
        self._member: Member | None = member
        member.copies += 1

    def first_text(self, seconds: float) -> None:
        pass

    def close(self, end: End) -> None:
        member, self._member = self._member, None
        if member is not None:
            member.copies -= 1
            _settle(member)


def _settle(member: Member) -> None:
    """A lease is closed: whoever waits for the last one hears of it."""
    if not member.used and member.quiet is not None:
        member.quiet.set()
