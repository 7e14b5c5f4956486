"""A backend that does what the test says: it loads and warms when it is let, and says nothing of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from headrace.core.request import Ask, Call, Generation, Options
from headrace.engines.base import EngineStats, Lives
from headrace.gateway.backend import Kind, Sink, Work
from headrace.gateway.pool import Pool
from headrace.gateway.spec import AliasSpec, EngineSpec
from server.hand_engine import Hands


class HandBackend:
    """`loads`, `warms`: let through unless cleared; `fault`: raised by "start" or "warm"; with "unwell"
    it takes no requests although it came up."""

    kind: Kind = "llama"
    created = 7
    clock_offset = 0.0
    stats = EngineStats()
    lives = Lives()

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.ready = False
        self.closed = False
        self.loads, self.warms, self.closes = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for gate in (self.loads, self.warms, self.closes):
            gate.set()
        self.fault: dict[str, Exception] = {}

    async def start(self) -> None:
        await self.loads.wait()
        if "start" in self.fault:
            raise self.fault["start"]

    async def warm(self) -> None:
        await self.warms.wait()
        if "warm" in self.fault:
            raise self.fault["warm"]
        self.ready = "unwell" not in self.fault

    async def close(self) -> None:
        self.ready = False
        await self.closes.wait()
        self.closed = True

    def parse(self, ask: Ask) -> Any:
        raise NotImplementedError

    async def prepare(self, ask: Ask, parsed: Any, rids: Iterator[int]) -> Work:
        raise NotImplementedError

    def submit(self, part: Generation | Call, sink: Sink) -> None:
        raise NotImplementedError

    def cancel(self, rid: int) -> None: ...

    def pause(self, rid: int) -> None: ...

    def resume(self, rid: int) -> None: ...

    def predict(self, size: int, shared: float, priority: int) -> float:
        return 0.0


class Works:
    """A pool of such backends. `made`: the newest of each engine; `before`: called with each that is made."""

    def __init__(self, *engines: str, **aliases: dict[str, float]) -> None:
        self.clock = Hands()
        self.made: dict[str, HandBackend] = {}
        self.faults: dict[str, dict[str, Exception]] = {}
        self.shut: dict[str, str] = {}
        """Engine → which of its gates is shut from the start."""
        self.pool = Pool(self._build, self.clock)
        for name in engines:
            self.pool.declare(EngineSpec(name, "llama", "m", "m"))
        for alias, weights in aliases.items():
            self.pool.lead(AliasSpec(alias, weights))

    def _build(self, spec: EngineSpec) -> HandBackend:
        backend = self.made[spec.name] = HandBackend(spec)
        backend.fault = self.faults.get(spec.name, {})
        if spec.name in self.shut:
            getattr(backend, self.shut[spec.name]).clear()
        return backend

    def state(self, name: str) -> str:
        return str(self.pool.members[name].state)

    def weights(self, alias: str) -> dict[str, float]:
        return dict(self.pool.routes[alias].weights)


def ask(alias: str) -> Ask:
    return Ask(True, alias, {"messages": []}, 100, Options(), 1)
