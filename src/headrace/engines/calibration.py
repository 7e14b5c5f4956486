"""What a cost model learned from an engine on this machine, kept for the next start.

Rules: one small file for each engine (model, quantisation, settings: its fingerprint), machine (processor, cores,
threads) and build of the library; a file that cannot be used counts as none; nothing here is worth failing for.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from headrace.core.attention import Attention
from headrace.core.costmodel import TERMS, CostModel
from headrace.engines.machine import build, machine
from headrace.kv.blob import fingerprint


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
    if not usable or not all(0.0 <= c < 1e3 for c in saved.coefficients) or sum(saved.coefficients[1:3]) == 0.0:
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
