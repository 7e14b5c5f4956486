"""A double for the pool's tests: a backend whose start, warmth and end the test decides, and a pool of such."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.core.request import Ask, Call, Generation, Options
from headrace.engines.base import EngineStats, Lives
from headrace.gateway.backend import Kind, Sink, Work
from headrace.gateway.member import MemberLease
from headrace.gateway.pool import Pool
from headrace.gateway.spec import AliasSpec, EngineSpec
from headrace.testing import ManualClock

IDLE = EngineStats()
UNHARMED = Lives()


@dataclass
class HandBackend:
    """Starts and warms at once unless `gate` is cleared; raises what it is given."""

    spec: EngineSpec
    ready: bool = True
    restarting: bool = False
    created: int = 7
    clock_offset: float = 0.0
    stats: EngineStats = IDLE
    lives: Lives = UNHARMED
    start_error: Exception | None = None
    warm_error: Exception | None = None
    probe_error: Exception | None = None
    well: bool = True
    predicted: float = 0.0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: `start` waits."""
    close_gate: asyncio.Event = field(default_factory=asyncio.Event)
    did: list[str] = field(default_factory=list)
    asked: list[tuple[int, float]] = field(default_factory=list)
    """(size, shared) of each prediction."""

    def __post_init__(self) -> None:
        self.gate.set()
        self.close_gate.set()

    @property
    def kind(self) -> Kind:
        return self.spec.kind

    async def start(self) -> None:
        self.did.append("start")
        await self.gate.wait()
        if self.start_error is not None:
            raise self.start_error

    async def warm(self) -> None:
        self.did.append("warm")
        if self.warm_error is not None:
            raise self.warm_error

    async def probe(self) -> bool:
        self.did.append("probe")
        if self.probe_error is not None:
            raise self.probe_error
        return self.well

    async def close(self) -> None:
        self.did.append("close")
        await self.close_gate.wait()

    def parse(self, ask: Ask) -> Any:
        return None

    async def prepare(self, ask: Ask, parsed: Any, rids: Iterator[int]) -> Work:
        raise NotImplementedError

    def submit(self, part: Generation | Call, sink: Sink) -> None:
        raise NotImplementedError

    def cancel(self, rid: int) -> None: ...

    def pause(self, rid: int) -> None: ...

    def resume(self, rid: int) -> None: ...

    def predict(self, size: int, shared: float, priority: int) -> float:
        self.asked.append((size, shared))
        return self.predicted


class Hand:
    """A pool of `engines`, one letter each and not loaded yet; `errors`: engine → raised by the start of each."""

    def __init__(self, engines: str = "ab", *, weights: dict[str, float] | None = None, **spec: Any) -> None:
        self.clock = ManualClock(100.0)
        self.made: dict[str, list[HandBackend]] = {}
        self.errors: dict[str, HeadraceError | None] = {}
        self.shut: set[str] = set()
        """Engines whose next start waits for its gate."""
        self.pool = Pool(self.build, self.clock)
        kind: Kind = spec.pop("kind", "llama")
        for name in engines:
            self.pool.declare(EngineSpec(name, kind, "model", spec.get("family", "f"), **_but(spec, "family")))
        self.pool.lead(AliasSpec("chat", weights or dict.fromkeys(engines, 1.0)))

    def build(self, spec: EngineSpec) -> HandBackend:
        one = HandBackend(spec, start_error=self.errors.get(spec.name))
        if spec.name in self.shut:
            one.gate.clear()
        self.made.setdefault(spec.name, []).append(one)
        return one

    def __getitem__(self, name: str) -> HandBackend:
        """The newest backend of that engine."""
        return self.made[name][-1]

    async def load(self, names: str = "ab") -> Hand:
        for name in names:
            await self.pool.load(name)
        return self

    def chosen(self, count: int, **lease: Any) -> str:
        """Who gets `count` requests, each over before the next."""
        out = ""
        for _ in range(count):
            one = self.pool.lease(ask(), **lease)
            out += one.engine
            one.close("ok")
        return out

    def fail(self, name: str, times: int = 3) -> None:
        """Requests fail there until its breaker opens."""
        for _ in range(times):
            self.lease(name).close("failed")

    def lease(self, name: str) -> MemberLease:
        """A request's, of that very engine."""
        return MemberLease(self.pool.members[name], self.clock)


def _but(table: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}


def ask(text: str = "hi", *, model: str = "chat", salt: str = "") -> Ask:
    fields = {"model": model, "messages": [{"role": "user", "content": text}]}
    return Ask(True, model, fields, len(text) + 50, Options(), 42, salt)
