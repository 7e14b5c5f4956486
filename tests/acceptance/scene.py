"""The stage on which the acceptance cases are played.

    scripted(script)   the real App, Service and LocalEngine around a ScriptedEngine: one loop, one loopback socket
    tiny(settings)     `headrace serve` as a child process with the demo model (a fixture, see conftest.py)

Rules: nothing is faked between the socket and the step engine; a test paces the engine with the gate, never with time;
a scene ends with nothing left of it.

    async with scripted([[b"a"], [b"b"]], shut=True) as scene:
        wire = await scene.connect()
        await wire.chat(stream=True)
        scene.gate.allow(1)                     # one engine step
        await wire.event()                      # {"id": …, "choices": …}
        scene.gate.open()
        ...
        await scene.alive()
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from acceptance.asking import Asking, Wire
from headrace.core.admission import Bounds
from headrace.core.clock import Clock
from headrace.core.limits import Limits
from headrace.core.plan import Chunk, StepResult
from headrace.engines.base import StepFailed
from headrace.engines.local import LocalEngine
from headrace.gateway.backend import Backend, End, Lease
from headrace.gateway.fixed import FixedLease
from headrace.gateway.guard import Guard
from headrace.gateway.mirror import Mirror
from headrace.gateway.model import ServedModel
from headrace.gateway.pool import Route
from headrace.gateway.spec import MirrorSpec
from headrace.observe.accesslog import LOGGER, AccessLog
from headrace.observe.metrics import Metrics
from headrace.protocol.chat_template import ChatTemplate, PieceEncoder
from headrace.server.app import BODY_LIMIT, App
from headrace.server.cors import Cors
from headrace.server.stream import StreamLimits
from headrace.server.streams import LogLimits
from headrace.testing import CHATML, Script, ScriptedEngine
from server.socket_client import Running, serving, until

MODEL = "scripted"
FAIL = b"\0the engine fails here\0"
"""In a script: the step that would draw this token fails."""
CONTROL_PROMPT = "is all well?"
CONTROL_IDS = list(CONTROL_PROMPT.encode())
CONTROL_SCRIPT = [[b"all "], [b"is "], [b"well"]]
CONTROL_TEXT = "all is well"

Played = Script | Callable[[Sequence[int]], Script]


class Gate:
    """Where each engine step stands before it computes. Open: all pass. Shut: one passes for each permit.

    An abort that comes while no step stands here holds for the next one, so that none is lost on its way to the gate.
    """

    def __init__(self, *, shut: bool) -> None:
        self._changed = threading.Condition()
        self._shut = shut
        self._permits = 0
        self._aborted = False
        self.standing = False
        """A step is here and has to wait."""
        self.passed = 0
        """Steps that went through."""

    def open(self) -> None:
        with self._changed:
            self._shut = False
            self._changed.notify_all()

    def shut(self) -> None:
        with self._changed:
            self._shut, self._permits = True, 0

    def allow(self, steps: int = 1) -> None:
        """Let that many further steps pass."""
        with self._changed:
            self._permits += steps
            self._changed.notify_all()

    def abort(self) -> None:
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """ScriptedEngine's `wait`, on the engine thread."""
        with self._changed:
            while self._shut and not self._permits and not self._aborted:
                self.standing = True
                self._changed.wait()
            self.standing = False
            aborted, self._aborted = self._aborted, False
            if not aborted:
                self._permits = max(0, self._permits - 1)
                self.passed += 1
            return aborted


class Paced(ScriptedEngine):
    """A ScriptedEngine that goes through a gate before each step, knows FAIL, and answers the control request."""

    def __init__(self, script: Played, gate: Gate, **options: Any) -> None:
        super().__init__(self._played, step_s=1.0, prefill_s=1.0, wait=gate.wait, name=MODEL, **options)
        self._case = script if callable(script) else lambda _prompt: script
        self._gate = gate
        self.current: tuple[Chunk, ...] = ()
        """The chunks of the newest step."""

    @property
    def asked(self) -> list[list[int]]:
        """`prompts`, the control requests' left out."""
        return [prompt for prompt in self.prompts if prompt != CONTROL_IDS]

    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        self.current = tuple(chunks)
        return super().step(chunks)

    def abort(self) -> None:
        super().abort()
        self._gate.abort()

    def _played(self, prompt: Sequence[int]) -> Script:
        if prompt == CONTROL_IDS:
            return cast("Script", CONTROL_SCRIPT)
        return cast("Script", _until_failure(self._case(prompt)))


def _until_failure(script: Script) -> Iterator[Sequence[bytes]]:
    for step in script:
        if FAIL in step:
            raise StepFailed("the script says so")
        yield step


class Scene(Asking):
    """A running server, its engine, and a client of it."""

    def __init__(
        self, running: Running, app: App, engine: LocalEngine, paced: Paced, gate: Gate, key: str | None
    ) -> None:
        super().__init__(f"http://127.0.0.1:{running.port}", MODEL, key)
        self.running = running
        self.port = running.port
        self.app = app
        self.engine = engine
        self.scripted = paced
        self.gate = gate
        self.log: list[logging.LogRecord] = []
        """Everything that loggers of ours said, access lines included."""

    @property
    def access(self) -> list[dict[str, Any]]:
        """The access log so far."""
        return [json.loads(record.getMessage()) for record in self.log if record.name == LOGGER]

    async def connect(self, key: str | None = None) -> Wire:
        """A raw connection; closed with the scene. `key` instead of its own."""
        wire = await Wire.open(self.port, self.model, key or self.key)
        self.running.connections.append(wire)
        return wire

    async def control(self) -> str:
        """The fixed request that must always give the same: its text."""
        answer = await self.comp(prompt=CONTROL_IDS, temperature=0)  # ids: no tokenizer puts anything in front
        assert answer.status == 200, answer.body
        assert answer.finish == ["stop"]
        return answer.text

    async def alive(self) -> None:
        """ALIVE: health is good and the control request is answered as ever."""
        assert (await self.get("/health")).status == 200
        assert await self.control() == CONTROL_TEXT

    async def idle(self) -> None:
        """Wait until nothing is being answered, queued or computed; then nothing may be left of it."""
        await until(lambda: not self.app.running and not self.stats.running and not self.stats.waiting)
        assert self.app.metrics.open_streams == 0
        assert not self.app.ticker.running
        series = await self.metrics()
        assert series[f'headrace_requests_running{{model="{MODEL}"}}'] == 0
        assert series[f'headrace_requests_waiting{{model="{MODEL}"}}'] == 0

    @property
    def stats(self) -> Any:
        """The engine's `EngineStats`."""
        return self.engine.stats

    async def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics`: `name{label="value"}` → value."""
        text = (await self.get("/metrics")).body.decode()
        return {
            sample.name
            + ("{" + ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items())) + "}")
            * bool(sample.labels): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


class Candidate:
    """Gets a copy of every request of the scene's model."""

    def __init__(self, backend: Backend, spec: MirrorSpec) -> None:
        self.routes = {MODEL: Route({}, spec)}
        self.backend = backend
        self.ends: list[End] = []
        """Of its leases."""

    def lease_of(self, name: str) -> Lease:
        return _CandidateLease(name, self)


class _CandidateLease(FixedLease):
    def __init__(self, name: str, candidate: Candidate) -> None:
        super().__init__(name, candidate.backend)
        self._ends = candidate.ends

    def close(self, end: End) -> None:
        self._ends.append(end)


class _Handler(logging.Handler):
    """Keeps records."""

    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__(logging.DEBUG)
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)


@contextlib.asynccontextmanager
async def scripted(
    script: Played,
    *,
    n_ctx: int = 4096,
    max_running: int = 16,
    max_waiting: int = 256,
    bounds: Mapping[str, Any] | None = None,
    shut: bool = False,
    key: str | None = None,
    cors: Cors | None = None,
    guard: Guard | None = None,
    aliases: Sequence[str] = (MODEL,),
    limits: Mapping[str, Any] | None = None,
    stream_limits: StreamLimits | None = None,
    log_limits: LogLimits | None = None,
    body_limit: int = BODY_LIMIT,
    info: Mapping[str, Any] | None = None,
    template: str = CHATML,
    clock: Clock = time.monotonic,
    seed: Callable[[], int] | None = None,
    drain_s: float = 30.0,
    candidate: Candidate | None = None,
    **engine_options: Any,
) -> AsyncIterator[Scene]:
    """A server that plays `script` to every request, the control request apart.

    `limits`: further fields of the scheduler's `Limits`; `bounds`: of admission's `Bounds`;
    `info`: fields of `ModelInfo` to replace (bos, add_bos, …);
    `guard`: who may ask what, `key` is then what the scene's own client sends; `aliases`: all of the one model;
    `candidate`: whom requests are mirrored to;
    `shut`: the gate is shut from the start; `seed`: makes seeds for requests that bring none;
    `engine_options`: cells, slots, batch, fail_at, tokenizer of ScriptedEngine.
    """
    gc.freeze()  # the service collects garbage when it starts; there is no need to walk over pytest's own heap
    gate = Gate(shut=shut)
    paced = Paced(script, gate, n_ctx=n_ctx, clock=clock, **engine_options)
    paced.info = msgspec.structs.replace(paced.info, **(info or {}))
    settings = Limits(max_running=max_running, **{"max_batch": min(512, paced.n_batch), **(limits or {})})
    waiting = Bounds(max_waiting=max_waiting, places=max_running, **(bounds or {}))
    engine = LocalEngine(lambda: paced, settings, clock, bounds=waiting)
    await engine.start()
    chat = ChatTemplate(template, control=paced.info.control, bos=paced.info.bos, eos=paced.info.eos)
    encoder = PieceEncoder(paced.tokenizer, max_bytes=1 << 20)
    mirror = None if candidate is None else Mirror(candidate, clock)
    app = App(
        dict.fromkeys(aliases, ServedModel(engine, paced.tokenizer, chat, encoder)),
        Metrics({MODEL: engine}, mirror=mirror),
        AccessLog(time.time),
        mirror=mirror,
        key=key,
        cors=cors,
        guard=guard,
        body_limit=body_limit,
        limits=stream_limits,
        log_limits=log_limits,
        clock=clock,
        seed=seed or itertools.count(1000).__next__,
    )
    logger = logging.getLogger("headrace")
    level = logger.level
    async with serving(app, drain_s=drain_s) as running:
        scene = Scene(running, app, engine, paced, gate, key)
        handler = _Handler(scene.log)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            async with scene.calls():
                yield scene
        finally:
            gate.open()
            logger.setLevel(level)
            logger.removeHandler(handler)
    gc.unfreeze()
    assert paced.closed
