"""The composition root: a `Config` becomes objects, wired once, here and nowhere else.

Config ─► Blueprint ─► WorkerEngine ─┐
   └────► Vocabulary ─► ChatTemplate ├─► ServedModel ─► App ─► Service
                      └► PieceEncoder ┘
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.config import engine_environment
from headrace.core.errors import StartupError
from headrace.core.scheduler import Limits
from headrace.core.tokenizer import Tokenizer
from headrace.engines.base import StreamEngine
from headrace.engines.local import LocalEngine
from headrace.engines.supervisor import WorkerEngine
from headrace.engines.vocab import Vocabulary
from headrace.engines.worker import Blueprint, build
from headrace.models import script_rate
from headrace.observe.accesslog import AccessLog
from headrace.observe.metrics import Metrics
from headrace.protocol.chat_template import DEFAULT_TEMPLATE, ChatTemplate, PieceEncoder
from headrace.server import launch
from headrace.server.app import App
from headrace.server.model import ServedModel
from headrace.server.page import load_page
from headrace.server.slice import shorten
from headrace.server.stream import StreamLimits
from headrace.settings import Config
from headrace.testing import ScriptedTokenizer

ENCODER_BYTES = 32 * 1024 * 1024
"""Token ids remembered for texts that come again; a system prompt of 1,000 tokens takes about 10 KB."""

SCRIPT_CONTEXT = 4096
"""Tokens that a sequence of a scripted model may hold."""

BATCH_STEP = 64
"""Batches are made a multiple of this: llama.cpp's attention on a CPU works in tiles of 64 rows."""


async def serve(config: Config, on_ready: Callable[[str], None]) -> int:
    """Serve until told to stop; the exit code. `on_ready` gets the base URL. Raises StartupError.

    `config.model.path` is the path of a file and `config.model.alias` is set: names are resolved before.
    """
    logging.basicConfig(level=config.log.level.upper(), format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its starts and stops are ours to tell
    server = config.server
    if server.slice_us:
        shorten(server.slice_us)
    sock = launch.listen(server.host, server.port, guarded=bool(server.key) or server.insecure)
    engines: dict[str, StreamEngine] = {}
    models: dict[str, ServedModel] = {}
    engine = make_engine(config)

    async def start() -> None:
        await engine.start()
        engines[config.model.alias] = engine
        models[config.model.alias] = make_model(config, engine)

    app = App(
        models,
        Metrics(engines),
        AccessLog(time.time),
        key=server.key or None,
        page=load_page(),
        body_limit=server.body_limit_bytes,
        limits=StreamLimits(
            header_hold_s=server.header_hold_s,
            heartbeat_s=server.heartbeat_s,
            write_timeout_s=server.write_timeout_s,
            max_pending_events=server.max_pending_events,
            queue_timeout_s=config.engine.queue_timeout_s,
        ),
    )
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        return await launch.serve(app, sock, drain_s=server.drain_s, start=start, ready=lambda: on_ready(url))
    finally:
        await engine.close()


def make_limits(config: Config) -> Limits:
    """The scheduler's few numbers."""
    e = config.engine
    return Limits(
        max_running=e.max_running,
        max_batch=batch_size(e.step_tokens + e.max_running),
        prefill_chunk=256,
        prefill_chunk_busy=128,
        idle_cells=e.idle_cells,
        prefix_cache=e.prefix_cache,
    )


def batch_size(tokens: int) -> int:
    """`tokens`, rounded up to whole tiles."""
    return -(-tokens // BATCH_STEP) * BATCH_STEP


def make_blueprint(config: Config) -> Blueprint:
    """How the worker makes its engine."""
    e = config.engine
    limits = make_limits(config)
    rate = script_rate(config.model.path)
    if rate is not None:
        script = {"name": config.model.alias, "step_s": 1.0 / rate, "n_ctx": e.context or SCRIPT_CONTEXT}
        return Blueprint(
            "headrace.testing:counting_worker",
            {**script, "cells": e.cells, "slots": e.slots, "batch": limits.max_batch},
            msgspec.to_builtins(limits),
        )
    cores = len(os.sched_getaffinity(0))
    path = Path(config.model.path)
    settings: dict[str, Any] = {
        "path": str(path),
        "name": config.model.alias,
        "cells": e.cells,
        "context": e.context,
        "slots": e.slots,
        "batch": limits.max_batch,
        "threads": e.threads or cores,
        "threads_batch": e.threads_batch or cores,
        "flash_attention": e.flash_attention,
        "kv_type": e.kv_type,
        "created": _changed(path),
    }
    return Blueprint("headrace.engines.llama:worker", settings, msgspec.to_builtins(limits))


def make_engine(config: Config) -> StreamEngine:
    """The embedded engine, in a child process unless the configuration says otherwise. Raises StartupError."""
    blueprint = make_blueprint(config)
    waiting = config.engine.max_waiting
    if config.engine.in_process:
        return LocalEngine(lambda: build(blueprint), make_limits(config), time.monotonic, max_waiting=waiting)
    environment = engine_environment(config.engine.spin)
    return WorkerEngine(
        blueprint,
        time.monotonic,
        max_waiting=waiting,
        environment=environment,
        replay=config.optimizations.replay,
        step_timeout_s=config.engine.step_timeout_s,
    )


def make_model(config: Config, engine: StreamEngine) -> ServedModel:
    """A started engine with its tokenizer and template. Raises StartupError."""
    info = engine.info
    scripted = script_rate(config.model.path) is not None
    vocabulary: Tokenizer = ScriptedTokenizer() if scripted else Vocabulary.open(Path(config.model.path))
    try:
        template = ChatTemplate(
            info.chat_template or DEFAULT_TEMPLATE,
            control=info.control,
            bos=info.bos,
            eos=info.eos,
            strftime_now=time.strftime,
        )
    except ValueError as error:
        raise StartupError(f"{config.model.path}: {error}") from error
    return ServedModel(engine, vocabulary, template, PieceEncoder(vocabulary, max_bytes=ENCODER_BYTES))


def _changed(path: Path) -> int:
    """When the model file was made, Unix time in s; 0 if that cannot be told."""
    try:
        return int(path.stat().st_mtime)
    except OSError:
        return 0
