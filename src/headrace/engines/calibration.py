"""What a cost model learned from an engine on this machine, kept for the next start.

Rules: one small file for each engine (model, quantisation, settings: its fingerprint), machine (processor, cores,
threads) and build of the library; a file that cannot be used counts as none; nothing here is worth failing for.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from headrace.core.attention import TILE, Attention
from headrace.core.clock import Clock
from headrace.core.costmodel import TERMS, CostModel, Work, positions
from headrace.core.plan import Chunk
from headrace.engines.base import StepEngine
from headrace.engines.machine import build, machine
from headrace.kv.blob import fingerprint

CALIBRATION = (16, 1, 12, 1, 64, 1, 32, 1, 24, 1, 96, 1)
"""Tokens of the steps that a cost model learns from at start: about a second. Of 12 and 24 rows some are in no whole
group, which is dear for some kernels."""

DEEP, CALIBRATION_DEEP = 1024, (64, 20, 1, 64, 20, 1)
"""Some more, after so many tokens. Without them the price of attention was a third of the truth, and the steps of the
first long prompt beside readers took a quarter longer than they should."""


LONG_S = 1.5
"""Seconds after which a calibration leaves out what it can: steps of a large model take half a second."""


def calibrate(engine: StepEngine, cost: CostModel, clock: Clock) -> None:
    """Learn what a few typical steps take, before anybody waits for one; leaves the engine empty."""
    start, began = 0, clock()
    for count in CALIBRATION:
        if clock() - began < LONG_S:
            start += _probe(engine, cost, clock, start, count)
    if start + DEEP + TILE < min(engine.info.n_ctx, engine.n_cells):
        deep = engine.deepen(0, DEEP)
        for i, count in enumerate(CALIBRATION_DEEP if deep > start else ()):
            if i >= len(CALIBRATION_DEEP) // 2 and clock() - began >= LONG_S:
                break  # a large model: once is enough
            _probe(engine, cost, clock, deep, count)
            engine.trim(0, deep)
    engine.trim(0, 0)


def _probe(engine: StepEngine, cost: CostModel, clock: Clock, start: int, count: int) -> int:
    """Learn from one step of `count` tokens at `start`; the tokens computed, 0 if there is no room for them."""
    if count > engine.n_batch or start + count >= engine.info.n_ctx:
        return 0
    began = clock()
    engine.step([Chunk(0, start, [engine.info.bos or 0] * count, None)])
    seconds = clock() - began
    back, width = positions(start, count), start + count
    if seconds > 0:
        cost.observe(Work(count, 0, back, width) if count > 1 else Work(0, 1, back, width), seconds)
    return count


class Saved(msgspec.Struct, frozen=True):
    """The file: seconds, in the order of `core.costmodel.TERMS`."""

    terms: tuple[str, ...]
    coefficients: tuple[float, ...]


def calibration_file(folder: Path, engine: bytes, threads: tuple[int, int]) -> Path:
    """Where an engine's calibration is kept. `threads`: for a step of one token, for larger ones."""
    return folder / f"{fingerprint(engine, threads, machine(), build()).hex()}.json"


def load_calibration(file: Path, attention: Attention) -> CostModel | None:
    """None if there is none that can be used."""
    try:
        saved = msgspec.json.decode(file.read_bytes(), type=Saved)
    except (OSError, msgspec.DecodeError):
        return None
    usable = saved.terms == TERMS and len(saved.coefficients) == len(TERMS)
    if not usable or not all(0.0 <= c < 1e3 for c in saved.coefficients):
        return None
    if all(saved.coefficients[TERMS.index(term)] == 0.0 for term in ("prefill", "decode")):
        return None
    return CostModel(saved.coefficients, sure=True, attention=attention)


def save_calibration(file: Path, cost: CostModel) -> None:
    """Write it, if that can be done."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        own = file.with_suffix(f".{os.getpid()}")
        own.write_bytes(msgspec.json.encode(Saved(TERMS, cost.coefficients)))
        own.replace(file)
    except OSError:
        pass
