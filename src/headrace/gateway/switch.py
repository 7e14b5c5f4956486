"""Another engine for an alias, while it is being asked.

    switch ─▶ loading ─▶ warming ─▶ change-over ─▶ draining ─▶ done
                 └──────────┴─▶ failed: nothing has changed

Rules: the candidate is brought up beside the others; only then the alias's weights change, all in one assignment, so no
request sees half of it. Engines that lost their last weight by it finish what they have and give their memory back; one
that is wanted again meanwhile simply stays. A switch belongs to the server, not to the connection that asked for it.
One at a time for an alias; different aliases do not wait for each other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from headrace.core.clock import Clock
from headrace.core.errors import Conflict, HeadraceError, InternalError, InvalidRequest, LoadFailed, StartupError
from headrace.gateway.pool import Pool
from headrace.gateway.states import State
from headrace.observe.fault import report_fault

Stage = Literal["loading", "warming", "draining", "done", "failed"]
KEPT = 32
"""Reports of what is over."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Report:
    """How far a switch is. Times in s; None: that did not happen, or not yet."""

    id: int
    alias: str
    to: str
    weight: float
    began: float
    stage: Stage = "loading"
    since: float = 0.0
    """When it got there."""
    load_s: float | None = None
    """None also if it was loaded already; so `warm_s`."""
    warm_s: float | None = None
    change_s: float | None = None
    draining: tuple[str, ...] = ()
    """Engines that have not finished what they have."""
    error: HeadraceError | None = None


def shares(before: Mapping[str, float], to: str, weight: float) -> dict[str, float]:
    """Weights in which `to` has the share `weight`, 0 < weight <= 1, and the others what is left, in the proportions
    that they had."""
    others = {name: given for name, given in before.items() if name != to}
    total = sum(others.values())
    left = (1.0 - weight) / total if total else 0.0
    return {**{name: given * left for name, given in others.items()}, to: weight}


class Switcher:
    """On the event loop. `drain_s`: what an engine without weight has for the answers that it began."""

    def __init__(self, pool: Pool, clock: Clock, *, drain_s: float = 30.0) -> None:
        self._pool = pool
        self._clock = clock
        self._drain_s = drain_s
        self._ids = itertools.count(1)
        self._reports: dict[int, Report] = {}
        self._over: deque[int] = deque()
        self._changes: dict[int, asyncio.Task[None]] = {}
        """Switches before their change-over."""
        self._loads: dict[str, asyncio.Task[None]] = {}
        """By engine: two aliases may be switched to one."""
        self._drains: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<Switcher [{len(self._changes)} changing, {len(self._drains)} draining]>"

    @property
    def running(self) -> list[Report]:
        """What is not over yet."""
        return [self.report(id) for id in self._reports if id not in self._over]

    @property
    def last(self) -> list[Report]:
        """What is over, the newest first."""
        return [self._reports[id] for id in reversed(self._over)]

    def report(self, id: int) -> Report:
        """How far a switch is that was begun not too long ago."""
        report = self._reports[id]
        member = self._pool.members.get(report.to)
        if report.stage == "loading" and member is not None and member.state is State.WARMING:
            return replace(report, stage="warming", since=member.since)
        return report

    def start(self, alias: str, to: str, weight: float = 1.0) -> Report:
        """Begin a switch. Raises InvalidRequest; Conflict while another one of the alias runs."""
        pool = self._pool
        if alias not in pool.routes:
            raise InvalidRequest(f"there is no such alias; there are: {_names(pool.routes)}", param="alias")
        if to not in pool.members:
            raise InvalidRequest(f"no such engine is declared; there are: {_names(pool.members)}", param="to")
        for id in self._changes:
            other = self._reports[id]
            if other.alias == alias:
                raise Conflict(f"{alias} is being switched to {other.to}; wait until that is over")
        now = self._clock()
        report = Report(next(self._ids), alias, to, weight, began=now, since=now)
        self._reports[report.id] = report
        self._changes[report.id] = asyncio.get_running_loop().create_task(self._change(report))
        return report

    async def settled(self, id: int) -> Report:
        """Once its change-over is done. Raises LoadFailed, Conflict: nothing has changed.

        Whoever waits may give up: the switch goes on.
        """
        task = self._changes.get(id)
        if task is not None:
            await asyncio.shield(task)
        report = self._reports[id]
        if report.error is not None:
            raise report.error
        return report

    async def switch(self, alias: str, to: str, weight: float = 1.0) -> Report:
        """`start`, then `settled`."""
        return await self.settled(self.start(alias, to, weight).id)

    async def load(self, name: str) -> bool:
        """Until it is READY; False: it was there, or could be taken back. Raises StartupError;
        Conflict while somebody else does something to it."""
        member = self._pool.members[name]
        if member.ending is not None and name in self._drains:
            await asyncio.wait((self._drains[name],))  # it is being closed and cannot be taken back
        task = self._loads.get(name)
        if task is None or task.done():
            if member.state is not State.GONE:
                await self._pool.load(name)  # at once, also if it is taken back while it drains
                return False
            self._loads[name] = task = asyncio.get_running_loop().create_task(self._pool.load(name))
        await asyncio.shield(task)
        return True

    def retire(self, name: str) -> asyncio.Task[None] | None:
        """Drain an engine that nobody wants; None: somebody does. The task ends when it is gone, or wanted again."""
        if self._wanted(name):
            return None
        if name not in self._drains:
            self._drains[name] = asyncio.get_running_loop().create_task(self._drain(name))
        return self._drains[name]

    async def close(self) -> None:
        """Give up what runs."""
        tasks = [*self._changes.values(), *self._loads.values(), *self._drains.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # A switch ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _change(self, report: Report) -> None:
        """Up to the change-over. What goes wrong stands in the report."""
        id, to = report.id, report.to
        was_ready = self._pool.members[to].state is State.READY
        error: HeadraceError | None
        try:
            error = await self._bring_up(report)
            del self._changes[id]
            if error is None:
                error = self._change_over(report)
        except Exception as fault:
            report_fault(log, fault, f"switch {id}")
            error = InternalError("internal error; the log says where")
        finally:
            self._changes.pop(id, None)
        if error is not None:
            if not was_ready and self._pool.members[to].state is State.READY:
                self.retire(to)
            log.warning("%s is not switched to %s: %s", report.alias, to, error.message)
            self._conclude(id, "failed", error)

    async def _bring_up(self, report: Report) -> HeadraceError | None:
        """The candidate is READY, or why not."""
        to = report.to
        try:
            loaded = await self.load(to)
        except StartupError as error:
            return LoadFailed(f"{to}: {error.message.removeprefix(f'engine {to}: ')}")
        except HeadraceError as error:
            return error
        member = self._pool.members[to]
        if loaded and member.warming is not None:
            load_s, warm_s = max(0.0, member.warming - report.began), member.since - member.warming
            self._reports[report.id] = replace(self._reports[report.id], load_s=load_s, warm_s=warm_s)
        return None

    def _change_over(self, report: Report) -> HeadraceError | None:
        """The one assignment, and what follows from it; or why it cannot be."""
        id, alias, to, pool = report.id, report.alias, report.to, self._pool
        member = pool.members[to]
        if member.backend is None or not member.backend.ready:
            return Conflict(f"engine {to} takes no requests now: {member.reason}")
        before = pool.routes[alias].weights
        began = self._clock()
        try:
            pool.assign(alias, shares(before, to, report.weight))
        except HeadraceError as error:
            return error
        now = self._clock()
        log.info("%s is answered by %s now, share %.4g", alias, to, report.weight)
        left = tuple(name for name, weight in before.items() if weight and self.retire(name) is not None)
        self._reports[id] = replace(self._reports[id], stage="draining", since=now, change_s=now - began, draining=left)
        if not left:
            self._conclude(id, "done")
        return None

    # Afterwards ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _wanted(self, name: str) -> bool:
        """An alias sends it requests or copies of some, or is about to."""
        routes = self._pool.routes.values()
        return (
            any(route.weights.get(name) for route in routes)
            or any(route.mirror is not None and route.mirror.to == name for route in routes)
            or any(self._reports[id].to == name for id in self._changes)
        )

    async def _drain(self, name: str) -> None:
        """Until it is gone, or wanted again."""
        try:
            member = self._pool.members[name]
            # One that could not be reached is looked for again until it is drained, though there is nothing to drain.
            while not self._wanted(name) and (member.state is State.READY or member.wanted):
                with suppress(Conflict):  # it is just being loaded
                    await self._pool.drain(name, self._drain_s)
        finally:
            del self._drains[name]
            for report in tuple(self._reports.values()):
                if name in report.draining:
                    left = tuple(other for other in report.draining if other != name)
                    self._reports[report.id] = replace(report, draining=left)
                    if not left:
                        self._conclude(report.id, "done")

    def _conclude(self, id: int, stage: Stage, error: HeadraceError | None = None) -> None:
        self._reports[id] = replace(self._reports[id], stage=stage, since=self._clock(), error=error)
        self._over.append(id)
        while len(self._over) > KEPT:
            del self._reports[self._over.popleft()]


def _names(of: Collection[str]) -> str:
    return ", ".join(sorted(of)) or "none"
