"""A server of several scripted engines, with the admin API: the real App, Pool, OwnEngine, Switcher and Service.

    async with hall({"a": SCRIPT, "b": OTHER}, {"chat": {"a": 1.0}}, loaded=("a",)) as house:
        await house.admin("POST", "switch", {"alias": "chat", "to": "b"})
        house.engines["a"].gate.allow(1)        # one engine step of a; see `scene.Gate`

Rules: as on the other stage: nothing is faked between the socket and the step engines, and nothing is left at the end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from acceptance.asking import Answer, Asking, Wire
from acceptance.scene import Gate, Paced, Played
from headrace.core.errors import StartupError
from headrace.core.kv import Pin
from headrace.core.limits import Limits
from headrace.engines.base import StreamEngine
from headrace.engines.local import LocalEngine
from headrace.gateway.model import ServedModel
from headrace.gateway.own import OwnEngine
from headrace.gateway.pool import Pool, Starting
from headrace.gateway.spec import AliasSpec, EngineSpec, parse_engine
from headrace.gateway.switch import Switcher
from headrace.observe.accesslog import AccessLog
from headrace.observe.metrics import Metrics
from headrace.protocol.chat_template import ChatTemplate, PieceEncoder
from headrace.server.admin import admin_routes
from headrace.server.app import App
from headrace.server.operators import Operators
from headrace.testing import CHATML, ScriptedEngine
from server.socket_client import Running, serving, until


class House:
    """One engine of the hall: it can be loaded any number of times. `make`: its newest step engine."""

    def __init__(self, make: Callable[[Gate], ScriptedEngine], max_running: int) -> None:
        self.gate = Gate(shut=False)
        self.loads = threading.Event()
        """Cleared: its load waits."""
        self.loads.set()
        self.fault: str | None = None
        """Why its load fails."""
        self.loading = threading.Event()
        """A load has begun."""
        self.made: list[ScriptedEngine] = []
        self._make = make
        self._max_running = max_running

    @property
    def resident(self) -> int:
        """Step engines that are there."""
        return sum(not engine.closed for engine in self.made)

    # A Kit ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def engine(self) -> StreamEngine:
        def load() -> ScriptedEngine:
            self.loading.set()
            self.loads.wait()
            if self.fault is not None:
                raise StartupError(self.fault)
            self.made.append(self._make(self.gate))
            return self.made[-1]

        limits = Limits(max_running=self._max_running, max_batch=64)
        return LocalEngine(load, limits, time.monotonic)

    def model(self, engine: StreamEngine) -> ServedModel:
        scripted = self.made[-1]
        info = scripted.info
        template = ChatTemplate(CHATML, control=info.control, bos=info.bos, eos=info.eos)
        return ServedModel(engine, scripted.tokenizer, template, PieceEncoder(scripted.tokenizer, max_bytes=1 << 20))

    def pins(self, model: ServedModel) -> Sequence[Pin]:
        return ()


class Hall(Asking):
    """A running server, its engines by name, and a client of it."""

    def __init__(
        self, running: Running, pool: Pool, switcher: Switcher, engines: Mapping[str, House], app: App
    ) -> None:
        super().__init__(f"http://127.0.0.1:{running.port}", "chat", None)
        self.running = running
        self.pool = pool
        self.switcher = switcher
        self.engines = engines
        self.app = app

    async def admin(self, method: str, path: str, fields: Any = None) -> Answer:
        body = b"" if fields is None else msgspec.json.encode(fields)
        return await self.send(method, f"/admin/v1/{path}", content=body)

    async def connect(self, model: str = "chat") -> Wire:
        """A raw connection; closed with the hall."""
        wire = await Wire.open(self.running.port, model, None)
        self.running.connections.append(wire)
        return wire

    def state(self, name: str) -> str:
        return str(self.pool.members[name].state)


def paced(script: Played, **options: Any) -> Callable[[Gate], ScriptedEngine]:
    """An engine that goes through its gate before each step. `options`: of ScriptedEngine; engines that go on with
    each other's answers have one `tokenizer`."""
    return lambda gate: Paced(script, gate, **options)


def timed(script: Any, step_s: float) -> Callable[[Gate], ScriptedEngine]:
    """An engine that takes that long for a step."""
    return lambda _gate: ScriptedEngine(script, step_s=step_s, clock=time.monotonic, record=False)


@contextlib.asynccontextmanager
async def hall(
    engines: Mapping[str, Callable[[Gate], ScriptedEngine]],
    aliases: Mapping[str, Mapping[str, float]],
    *,
    loaded: Collection[str] = ("a",),
    families: Mapping[str, str] | None = None,
    max_running: int = 16,
    drain_s: float = 30.0,
) -> AsyncIterator[Hall]:
    """A server of these engines, of which `loaded` are READY. `families`: by engine; else each is its own."""
    houses = {name: House(make, max_running) for name, make in engines.items()}

    def build(spec: EngineSpec) -> Starting:
        return OwnEngine(lambda: houses[spec.name], exercise=True)

    pool = Pool(build, time.monotonic)
    for name in engines:
        pool.declare(EngineSpec(name, "llama", name, (families or {}).get(name, name)))
    for alias, weights in aliases.items():
        pool.lead(AliasSpec(alias, weights))
    switcher = Switcher(pool, time.monotonic, drain_s=drain_s)
    rows = admin_routes(
        pool,
        switcher,
        time.monotonic,
        check=Operators("", local=lambda: True),
        parse=lambda name, table: parse_engine(name, table, secret=lambda _: None),
    )
    app = App(pool, Metrics(pool.backends, fleet=pool), AccessLog(time.time), rows=rows)

    async def start() -> None:
        for name in loaded:
            await pool.load(name)

    async with serving(app, start=start) as running:
        house = Hall(running, pool, switcher, houses, app)
        await until(lambda: all(house.state(name) == "ready" for name in loaded))
        try:
            async with house.calls():
                yield house
        finally:
            for one in houses.values():
                one.loads.set()
                one.gate.open()
            await switcher.close()
    assert not any(one.resident for one in houses.values())
