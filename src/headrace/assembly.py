"""What an engine of ours is made from: the settings become the numbers of a scheduler, a worker's blueprint, a model.

Config ─► Blueprint ─► WorkerEngine ──┐
   └────► Vocabulary ─► ChatTemplate  ├─► ServedModel
                      └► PieceEncoder ┘
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from headrace.config import cache_home, engine_environment
from headrace.core.admission import Bounds
from headrace.core.budget import Pace
from headrace.core.errors import StartupError
from headrace.core.file_name import portable, shown
from headrace.core.kv import Pin
from headrace.core.limits import Limits
from headrace.core.quantisation import SOURCE
from headrace.core.request import Sampling
from headrace.core.speculation import MAX_GUESSES
from headrace.core.tokenizer import Tokenizer
from headrace.core.tuning import Candidate
from headrace.engines import timing
from headrace.engines.base import ModelInfo, StreamEngine
from headrace.engines.footing import Footing
from headrace.engines.keeper import TierSettings
from headrace.engines.ladder import llama_rungs
from headrace.engines.local import LocalEngine
from headrace.engines.probe import check_vocabulary
from headrace.engines.supervisor import WorkerEngine
from headrace.engines.trial import CELLS, SLOTS, Job
from headrace.engines.vocab import Vocabulary
from headrace.engines.worker import Blueprint, build, make_stepper
from headrace.gateway.model import ServedModel
from headrace.kv.templates import Encode
from headrace.models import known_sampling, script_rate
from headrace.pins import template_prefixes
from headrace.protocol.chat_template import DEFAULT_TEMPLATE, ChatTemplate, PieceEncoder
from headrace.protocol.openai import OPENAI
from headrace.settings import Config
from headrace.testing import ScriptedEngine, ScriptedTokenizer, counting_tokenizer

log = logging.getLogger(__name__)

ENCODER_BYTES = 32 * 1024 * 1024
"""Token ids remembered for texts that come again; a system prompt of 1,000 tokens takes about 10 KB."""

SCRIPT_CONTEXT = 4096
"""Tokens that a sequence of a scripted model may hold."""

WARM_CELLS = 512
"""KV cells that finished sequences keep of what is saved outside: it is back in 1.5 ms per 1,000 tokens, and every step
pays for the width of the pool."""

BATCH_STEP = 64
"""Batches are made a multiple of this: llama.cpp's attention on a CPU works in tiles of 64 rows."""

log = logging.getLogger(__name__)


class Kit:
    """What an engine of ours is made from: its own settings, the model a file."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def engine(self) -> StreamEngine:
        return make_engine(self._config)

    def model(self, engine: StreamEngine) -> ServedModel:
        return make_model(self._config, engine)

    def pins(self, model: ServedModel) -> Sequence[Pin]:
        return template_prefixes(self._config, model)


def make_limits(config: Config) -> Limits:
    """The scheduler's few numbers."""
    e, o = config.engine, config.optimizations
    chunk = e.step_tokens if o.adaptive_chunks else e.prefill_chunk or e.context or e.cells
    return Limits(
        max_running=e.max_running,
        step_tokens=batch_size(min(chunk, e.cells) + e.max_running),
        max_batch=min(e.max_batch, e.max_running),
        prefill_chunk=chunk,
        prefill_chunk_busy=chunk,
        idle_cells=e.idle_cells,
        prefix_cache=e.prefix_cache,
        await_prefix=o.await_prefix,
        earliest_deadline=o.earliest_deadline,
        ttft=config.slo.ttft_ms / 1e3 or PROFILES[config.slo.profile][0],
        fuse=o.ttft_fuse,
        efficient=o.efficient_steps,
        wider=o.efficient_steps,
        splits=o.split_steps,
        pads=o.padded_steps,
        speculation=o.speculation,
        overlap=o.overlap,
        pace=make_pace(config) if o.adaptive_chunks else None,
        warm_cells=min(WARM_CELLS, e.idle_cells) if make_tiers(config) else None,
    )


def make_tiers(config: Config) -> TierSettings | None:
    """Where KV goes that leaves the pool; None: nowhere."""
    t, o = config.tiers, config.optimizations
    if not o.tiers or not (t.ram_mib or t.ssd_mib or t.redis_url):
        return None
    return TierSettings(
        ram_mib=t.ram_mib,
        ssd_mib=t.ssd_mib,
        ssd_path=t.ssd_path or str(cache_home() / "kv"),
        redis_url=t.redis_url,
        redis_ttl_s=t.redis_ttl_s,
        redis_timeout_s=t.redis_timeout_ms / 1e3,
        least=t.min_tokens,
        mined=config.templates.budget if o.mined_templates else 0,
        look_s=config.templates.look_s,
    )


# Seconds: time to the first token, a step while somebody reads, one for who has waited, one that brings a crowd to
# their first tokens. The first, second and last are what is bearable for each use at the 95th percentile.
PROFILES = {
    "voice": (0.3, 0.06, 0.1, 0.2),
    "chat-strict": (0.5, 0.04, 0.1, 0.25),
    "chat": (1.0, 0.1, 0.13, 0.58),
    "reading": (2.0, 0.155, 0.3, 1.0),
}


def make_pace(config: Config) -> Pace:
    """The step lengths."""
    slo = config.slo
    _, itl, hard, stall = PROFILES[slo.profile]
    itl = slo.itl_ms / 1e3 or itl
    hard = max(itl, slo.itl_hard_ms / 1e3 or hard)
    return Pace(itl, hard, max(hard, stall), slo.arrival_guard_ms / 1e3, slo.ttft_fuse_ms / 1e3)


def make_bounds(config: Config) -> Bounds:
    """How much may wait for the engine."""
    e = config.engine
    return Bounds(
        max_waiting=e.max_waiting,
        max_waiting_tokens=e.max_waiting_tokens,
        queue_timeout_s=e.queue_timeout_s,
        places=e.max_running,
        predict=config.optimizations.admission,
    )


def batch_size(tokens: int) -> int:
    """`tokens`, rounded up to whole tiles."""
    return -(-tokens // BATCH_STEP) * BATCH_STEP


def make_blueprint(config: Config) -> Blueprint:
    """How the worker makes its engine."""
    e, o = config.engine, config.optimizations
    limits = make_limits(config)
    rate = script_rate(config.model.path)
    if rate is not None:
        script = {"name": config.model.alias, "step_s": 1.0 / rate, "n_ctx": e.context or SCRIPT_CONTEXT}
        return Blueprint(
            "headrace.testing:counting_worker",
            {**script, "cells": e.cells, "slots": e.slots, "batch": limits.step_tokens},
            msgspec.to_builtins(limits),
        )
    cores = len(os.sched_getaffinity(0))
    path = Path(config.model.path)
    settings: dict[str, Any] = {
        "path": portable(str(path)),
        "name": config.model.alias,
        "cells": e.cells,
        "context": e.context,
        "slots": e.slots,
        "batch": limits.step_tokens,
        "threads": e.threads or cores,
        "threads_batch": e.threads_batch or cores,
        "flash_attention": e.flash_attention,
        "kv_type": e.kv_type,
        "extra_buffers": e.extra_buffers,
        "check_memory": e.check_memory,
        "drafts": MAX_GUESSES if o.speculation else 0,
        "draft_model": portable(e.draft_model) if o.speculation else "",
        "created": _changed(path),
    }
    return Blueprint(
        "headrace.engines.llama:worker",
        settings,
        msgspec.to_builtins(limits),
        tiers=make_tiers(config),
        calibration=str(cache_home() / "calibration"),
    )


def make_candidate(config: Config, given: Collection[str]) -> tuple[Candidate, frozenset[str]]:
    """What is used untuned, and which fields of it the user has set (`given`, by name): those are not varied.

    One that is set to its default counts: it would win over the profile.
    """
    e = config.engine
    fixed = {name for name in ("flash_attention", "extra_buffers", "step_tokens") if f"engine.{name}" in given}
    if not {"engine.threads", "engine.threads_batch"}.isdisjoint(given):
        fixed.add("threads")
    if e.kv_type != "f16":
        fixed.add("flash_attention")  # it cannot do without
    if not config.optimizations.adaptive_chunks:
        fixed.add("step_tokens")  # which is not used then
    threads = e.threads_batch or len(os.sched_getaffinity(0))
    return Candidate(SOURCE, threads, e.flash_attention, e.step_tokens, e.extra_buffers), frozenset(fixed)


def make_job(config: Config, candidate: Candidate, weights: Path, long: int, idle: int) -> Job:
    """How a trial of `candidate` is run: `long` tokens of a prompt, beside `idle` ones in the pool."""
    config = _as_tried(config, candidate, weights)
    limits, blueprint = make_limits(config), make_blueprint(config)
    settings = {**blueprint.settings, "cells": CELLS, "slots": SLOTS, "drafts": 0}
    guard = 0.0 if limits.pace is None else limits.pace.guard
    return Job(blueprint.factory, settings, long, idle, min(limits.prefill_chunk, CELLS // 2), guard)


def make_timing(config: Config, candidate: Candidate, weights: Path, depth: int, seconds: float) -> timing.Job:
    """How steps of a candidate are timed, up to `depth` tokens deep, for `seconds` at most."""
    blueprint = make_blueprint(_as_tried(config, candidate, weights))
    batch = max(int(blueprint.settings["batch"]), timing.ROWS[0] + BATCH_STEP)
    settings = {**blueprint.settings, "cells": CELLS, "slots": SLOTS, "drafts": 0, "batch": batch}
    return timing.Job(blueprint.factory, settings, depth, seconds)


def _as_tried(config: Config, candidate: Candidate, weights: Path) -> Config:
    engine = replace(
        config.engine,
        flash_attention=candidate.flash_attention,
        extra_buffers=candidate.extra_buffers,
        step_tokens=candidate.step_tokens,
        draft_model="",
    )
    if not (engine.threads or engine.threads_batch):
        engine = replace(engine, threads=candidate.threads, threads_batch=candidate.threads)
    return replace(config, engine=engine, model=replace(config.model, path=str(weights)))


def make_engine(config: Config) -> StreamEngine:
    """The embedded engine, in a child process unless the configuration says otherwise. Raises StartupError."""
    blueprint = make_blueprint(config)
    bounds = make_bounds(config)
    if config.engine.in_process:
        return LocalEngine(
            lambda: build(blueprint),
            make_limits(config),
            time.monotonic,
            bounds=bounds,
            begin=lambda engine, deliver: make_stepper(blueprint, engine, deliver),
        )
    return WorkerEngine(
        blueprint,
        time.monotonic,
        bounds=bounds,
        footing=make_footing(config, blueprint),
        environment=engine_environment(config.engine.spin),
        replay=config.optimizations.replay,
        step_timeout_s=config.engine.step_timeout_s,
    )


def make_footing(config: Config, blueprint: Blueprint) -> Footing:
    """What the engine may do without, and where is kept what it had to."""
    if script_rate(config.model.path) is not None:
        return Footing()
    return Footing(llama_rungs(blueprint.settings), Path(config.model.path), cache_home() / "rungs")


def make_model(config: Config, engine: StreamEngine) -> ServedModel:
    """A started engine with its tokenizer and template. Raises StartupError."""
    vocabulary: Tokenizer
    if script_rate(config.model.path) is not None:
        vocabulary = counting_tokenizer(engine.info.n_ctx)
    else:
        vocabulary = Vocabulary.open(Path(config.model.path))
    trained, context = engine.info.trained, config.engine.context
    if 0 < trained < context:
        log.warning(
            "engine.context is %d and %s was trained for %d tokens: what it writes beyond them may be nonsense",
            context, shown(Path(config.model.path).name), trained,
        )  # fmt: skip
    template = make_template(config, engine.info)
    encoder = PieceEncoder(vocabulary, max_bytes=ENCODER_BYTES)
    return ServedModel(engine, vocabulary, template, encoder, sampling=make_sampling(config, engine.info))


def make_sampling(config: Config, info: ModelInfo) -> Sampling:
    """What holds where a request is silent: what the file says, else the catalogue, else OpenAI. Field by field."""
    if not config.model.own_sampling:
        return OPENAI
    if info.faults:
        log.warning("the model file of %s says what cannot be, which is ignored: %s", info.name, "; ".join(info.faults))
    return info.sampling.over(known_sampling(info.title)).sampling()


def make_template(config: Config, info: ModelInfo) -> ChatTemplate:
    """The model's own chat template, or the usual one. Raises StartupError."""
    try:
        return ChatTemplate(
            info.chat_template or DEFAULT_TEMPLATE,
            control=info.control,
            bos=info.bos,
            eos=info.eos,
            strftime_now=time.strftime,
        )
    except ValueError as error:
        raise StartupError(f"{shown(config.model.path)}: {error}") from error


def make_encode(config: Config) -> Encode:
    """How chats become tokens, without an engine: the vocabulary alone is opened. Raises StartupError.

    `config.model.path` is the path of a file, or that of a scripted model.
    """
    tokenizer: Tokenizer
    if script_rate(config.model.path) is not None:
        tokenizer, info = ScriptedTokenizer(), ScriptedEngine([], n_ctx=SCRIPT_CONTEXT).info
    else:
        path = Path(config.model.path)
        check_vocabulary(path, engine_environment(config.engine.spin))
        tokenizer = vocabulary = Vocabulary.open(path)
        info = vocabulary.info(config.model.alias, 0, 0)
    template, encoder = make_template(config, info), PieceEncoder(tokenizer, max_bytes=ENCODER_BYTES)
    return lambda messages: encoder.encode(template.render(messages), bos=info.bos, add_bos=info.add_bos)


def _changed(path: Path) -> int:
    """When the model file was made, Unix time in s; 0 if that cannot be told."""
    try:
        return int(path.stat().st_mtime)
    except OSError:
        return 0
