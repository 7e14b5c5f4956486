"""Asks other servers how they are, and loads what could not be loaded at the start.

Rules: one task keeps the time, and exists only while there is somebody to ask; each look is one of its own, so that a
server that does not answer keeps no other waiting. Engines of ours are not probed: their supervisor watches them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError
from headrace.gateway.member import Member, Probed
from headrace.gateway.states import State

PROBE_TIMEOUT_S = 5.0
RETRY_S = 10.0
"""How often an engine that could not be loaded is tried again, if it is not probed."""
TICK_S = 1.0
"""How exactly `probe_s` is kept."""

log = logging.getLogger(__name__)


class Prober:
    """`members` is read anew each time."""

    def __init__(self, members: Mapping[str, Member], load: Callable[[str], Awaitable[None]], clock: Clock) -> None:
        self._members = members
        self._load = load
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._looks: dict[str, asyncio.Task[None]] = {}
        """Engine → the one at it that is not over yet."""

    def watch(self, member: Member) -> None:
        """It is one of the pool's; look at it from now on, if it is one to look at."""
        member.due = self._clock() + _every(member)
        if self._task is None and _watched(member):
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def look(self) -> None:
        """Ask whoever is due, all at once, and wait for their answers."""
        await asyncio.gather(*self._begin())

    async def close(self) -> None:
        tasks = [*self._looks.values(), *(() if self._task is None else (self._task,))]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._begin()

    def _begin(self) -> list[asyncio.Task[None]]:
        now = self._clock()
        begun = []
        for name, member in self._members.items():
            if not _watched(member) or member.due > now or name in self._looks:
                continue
            member.due = now + _every(member)
            self._looks[name] = task = asyncio.get_running_loop().create_task(self._look_at(member))
            task.add_done_callback(lambda _, name=name: self._looks.pop(name, None))  # type: ignore[misc]
            begun.append(task)
        return begun

    async def _look_at(self, member: Member) -> None:
        name, backend, health = member.spec.name, member.backend, member.health
        if member.state is State.GONE:
            try:
                await self._load(name)
            except HeadraceError as error:
                log.debug("engine %s: still not there: %s", name, error.message)
            else:
                log.warning("engine %s: it is there now", name)
        elif isinstance(backend, Probed):
            failure = await _probe(backend)
            if failure != health.down:
                log.warning("engine %s: %s", name, failure or "it is back")
            health.probed(failure)


def _every(member: Member) -> float:
    return member.spec.probe_s or RETRY_S


def _watched(member: Member) -> bool:
    if member.state is State.GONE:
        return member.wanted
    return member.state is State.READY and member.spec.kind == "openai" and member.spec.probe_s > 0


async def _probe(backend: Probed) -> str:
    """Why it failed; "" if it did not."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return "" if await backend.probe() else "its probe failed"
    except HeadraceError as error:
        return error.message
    except (OSError, TimeoutError) as error:
        return f"it does not answer probes ({type(error).__name__})"
