"""The demo model inside the tests' own process, so that what reaches its engine can be seen.

    recorded({"a": settings, …})   the real App, Service and LocalEngine over llama.cpp: one model a name

Rules: objects are made by `headrace.assembly`, as in the program; between stepper and llama.cpp there is a `Recorder`
and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from acceptance.asking import Asking, Wire
from headrace.assembly import make_blueprint, make_limits, make_model
from headrace.core.plan import Chunk, StepResult
from headrace.engines.base import StepEngine
from headrace.engines.local import LocalEngine
from headrace.engines.vocab import Vocabulary
from headrace.engines.worker import build
from headrace.gateway.model import ServedModel
from headrace.observe.accesslog import AccessLog
from headrace.observe.metrics import Metrics
from headrace.server.app import App
from headrace.settings import Config, Engine, Model
from server.socket_client import Running, serving, until


class Recorder:
    """A StepEngine in front of another: notes what is drawn after which prompt."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self.info = engine.info
        self.n_slots, self.n_cells, self.n_batch = engine.n_slots, engine.n_cells, engine.n_batch
        self.n_drafts, self.attention = engine.n_drafts, engine.attention
        self.arrange, self.deepen = engine.arrange, engine.deepen
        self.piece, self.copy, self.trim = engine.piece, engine.copy, engine.trim
        self.save, self.load = engine.save, engine.load
        self.fingerprint, self.bytes_per_token = engine.fingerprint, engine.bytes_per_token
        self.abort, self.close = engine.abort, engine.close
        self.prompts: list[list[int]] = []
        """In the order of their first tokens."""
        self.sequences: dict[tuple[int, ...], list[int]] = {}
        """Prompt → the prompt and all that was drawn after it."""

    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        result = self._engine.step(chunks)
        for chunk, drawn in zip(chunks, result.drawn, strict=True):
            if chunk.draw is None or drawn is None:
                continue
            history, length = list(chunk.draw.history), chunk.draw.prompt
            if chunk.draw.position == length:
                self.prompts.append(history)
            self.sequences[tuple(history[:length])] = [*history, *drawn.tokens]
        return result


class Recorded(Asking):
    """A running server of one or more models; requests go to the first unless they name another."""

    def __init__(self, running: Running, app: App, models: dict[str, ServedModel], vocabulary: Vocabulary) -> None:
        super().__init__(f"http://127.0.0.1:{running.port}", next(iter(models)), None)
        self.running = running
        self.app = app
        self.models = models
        """Name → model; may be added to."""
        self.vocabulary = vocabulary
        self.recorders: dict[str, Recorder] = {}

    @property
    def prompts(self) -> list[list[int]]:
        """The first model's."""
        return self.recorders[self.model].prompts

    def text(self, prompt: Sequence[int]) -> str:
        """What the ids of a prompt say, control tokens as their texts."""
        return b"".join(map(self.vocabulary.piece, prompt)).decode()

    async def connect(self) -> Wire:
        """A raw connection; closed with the server."""
        wire = await Wire.open(self.running.port, self.model, None)
        self.running.connections.append(wire)
        return wire

    async def idle(self) -> None:
        """Wait until nothing is being answered or computed."""
        await until(
            lambda: (
                not self.app.running
                and not any(m.engine.stats.running or m.engine.stats.waiting for m in self.models.values())
            )
        )


def config(path: Path, alias: str, **engine: Any) -> Config:
    """The demo model's configuration; `engine`: its settings."""
    # One thread: see `tiny`.
    settings = {"in_process": True, "threads": 1, "threads_batch": 1, "cells": 4096, **engine}
    return dataclasses.replace(Config(), model=Model(str(path), alias), engine=Engine(**settings))


@contextlib.asynccontextmanager
async def recorded(path: Path, models: Mapping[str, Mapping[str, Any]] | None = None) -> AsyncIterator[Recorded]:
    """A server of `models`: name → engine settings, and `path` where the file is another one. By default one model."""
    models = models or {"tiny": {}}
    engines: dict[str, LocalEngine] = {}
    recorders: dict[str, Recorder] = {}
    served: dict[str, ServedModel] = {}
    for name, settings in models.items():
        engine_settings = dict(settings)
        configuration = config(Path(engine_settings.pop("path", path)), name, **engine_settings)
        blueprint = make_blueprint(configuration)

        def make(name: str = name, blueprint: Any = blueprint) -> StepEngine:
            recorders[name] = Recorder(build(blueprint))
            return recorders[name]

        engines[name] = LocalEngine(make, make_limits(configuration), time.monotonic)
        await engines[name].start()
        served[name] = make_model(configuration, engines[name])
    app = App(served, Metrics(engines), AccessLog(time.time), seed=itertools.count(1000).__next__)
    async with serving(app) as running:
        server = Recorded(running, app, served, Vocabulary.open(path))
        server.recorders = recorders
        async with server.calls():
            yield server
    gc.unfreeze()  # the service froze what was there, this server included
