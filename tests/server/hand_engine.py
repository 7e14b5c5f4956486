"""Doubles for the server's tests: an engine whose events the test emits, a vocabulary of bytes, a server of both."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.core.events import Admitted, Delta, Event, Failed, Finished, FinishReason, Marks
from headrace.core.kv import Pin
from headrace.core.request import Generation, Sampling
from headrace.engines.base import EngineStats, Lives, ModelInfo, Sink, StreamEngine
from headrace.gateway.guard import Guard
from headrace.gateway.model import ServedModel
from headrace.observe.accesslog import AccessLog
from headrace.observe.metrics import Metrics
from headrace.protocol.chat_template import ChatTemplate, PieceEncoder
from headrace.server.app import App
from headrace.server.page import Page
from headrace.server.stream import StreamLimits

CONTROL = {"<s>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant"
INFO = ModelInfo(name="m", n_ctx=1000, n_vocab=300, bos=256, add_bos=False, control=CONTROL, created=7)
IDLE = EngineStats()
UNHARMED = Lives()


@dataclass
class Hands:
    """The clock: stands still until it is moved. `step` is added at each reading, so that stamps differ."""

    now: float = 100.0
    step: float = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class ByteTokenizer:
    """A byte is a token; control tokens follow."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        texts = {token: text.encode() for text, token in CONTROL.items()}
        return texts[token] if token in texts else bytes([token])


@dataclass
class HandEngine:
    """A StreamEngine that does nothing by itself and keeps a record of what it was told."""

    info: ModelInfo = INFO
    ready: bool = True
    clock_offset: float = 0.0
    stats: EngineStats = IDLE
    lives: Lives = UNHARMED
    refusal: Exception | None = None
    """Raised by the next submit."""
    generations: list[Generation] = field(default_factory=list)
    live: dict[int, Sink] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    paused: set[int] = field(default_factory=set)
    told: list[tuple[str, int]] = field(default_factory=list)
    closed: bool = False
    _left: dict[int, int] = field(default_factory=dict)

    async def start(self) -> None:
        pass

    def pin(self, pins: Sequence[Pin]) -> None:
        pass

    def predict(self, tokens: int, priority: int) -> float:
        return 0.0

    async def close(self) -> None:
        self.closed = True

    def submit(self, generation: Generation, sink: Sink) -> None:
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        self.generations.append(generation)
        self.live[generation.rid] = sink
        self._left[generation.rid] = generation.n

    def cancel(self, rid: int) -> None:
        if self.live.pop(rid, None) is not None:
            self.cancelled.append(rid)

    def pause(self, rid: int) -> None:
        self.paused.add(rid)
        self.told.append(("pause", rid))

    def resume(self, rid: int) -> None:
        self.paused.discard(rid)
        self.told.append(("resume", rid))

    # What tests do ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def rid(self) -> int:
        """Of the newest generation."""
        return self.generations[-1].rid

    def emit(self, event: Event) -> None:
        """To the sink of its rid, if that still lives."""
        sink = self.live.get(event.rid)
        if sink is None:
            return
        if isinstance(event, Failed):
            del self.live[event.rid]
        elif isinstance(event, Finished):
            self._left[event.rid] -= 1
            if not self._left[event.rid]:
                del self.live[event.rid]
        sink(event)

    def admit(self, cached: int = 0, *, index: int = 0, rid: int | None = None) -> None:
        self.emit(Admitted(self.rid if rid is None else rid, index, cached))

    def say(self, text: str, *, index: int = 0, rid: int | None = None, marks: Marks | None = None) -> None:
        self.emit(Delta(self.rid if rid is None else rid, index, text, 1, marks=marks))

    def finish(self, reason: FinishReason = "stop", tokens: int = 1, *, index: int = 0, rid: int | None = None) -> None:
        self.emit(Finished(self.rid if rid is None else rid, index, reason, tokens))

    def fail(self, code: str = "engine_failed", message: str = "the engine broke") -> None:
        self.emit(Failed(self.rid, code, message))


def model(engine: StreamEngine, *, template: str | None = TEMPLATE, sampling: Sampling | None = None) -> ServedModel:
    tokenizer = ByteTokenizer()
    chat = None if template is None else ChatTemplate(template, control=CONTROL, bos=256, eos=None)
    encoder = PieceEncoder(tokenizer, max_bytes=1 << 20)
    return ServedModel(engine, tokenizer, chat, encoder, sampling=sampling or Sampling())


def server(
    *engines: HandEngine,
    clock: Hands | None = None,
    key: str | None = None,
    guard: Guard | None = None,
    page: Page | None = None,
    body_limit: int = 1 << 20,
    limits: StreamLimits | None = None,
) -> App:
    """An App over `engines`; its ids are counted, its seeds are 42."""
    models: Mapping[str, ServedModel] = {engine.info.name: model(engine) for engine in engines}
    counter = itertools.count(1)
    return App(
        models,
        Metrics({engine.info.name: engine for engine in engines}),
        AccessLog(lambda: 1000.0),
        key=key,
        guard=guard,
        page=page,
        body_limit=body_limit,
        limits=limits,
        clock=clock or Hands(),
        wall=lambda: 1000.0,
        new_id=lambda: f"id{next(counter)}",
        seed=lambda: 42,
    )


def clean(app: App, engine: HandEngine) -> None:
    """Nothing is left of any stream."""
    assert engine.live == {}
    assert app.running == 0
    assert app.metrics.open_streams == 0
    assert not app.ticker.running
