"""Random weights as blocks of llama.cpp's K-quants, made without a quantiser: the bits themselves are drawn.

    Q4_K   256 weights in 144 bytes   d dmin │ 8 × (scale, min) of 6 bits, packed │ 256 × 4 bits    d·scale·q - dmin·min
    Q6_K   256 weights in 210 bytes   256 × 4 bits │ 256 × 2 bits │ 16 × scale of 8 bits │ d        d·scale·(q - 32)

Rules: every block is valid, and every weight finite; weights have a mean of about 0 and the standard deviation that is
asked for; the same generator gives the same bytes. Nothing here acts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from headrace_bench.shapes.container import BLOCKS, F32, Q4_K, Q6_K, Bytes

SPREAD_4 = math.sqrt((16**2 - 1) / 12)
SPREAD_6 = math.sqrt((64**2 - 1) / 12)
"""Standard deviation of a whole number of 4 or 6 bits, each as likely."""
MIDDLE_4 = 7.5
LOW, HIGH = 24, 40
"""Scales are drawn from LOW … HIGH - 1; their mean square root is near to the middle."""
USUAL = math.sqrt(sum(scale**2 for scale in range(LOW, HIGH)) / (HIGH - LOW))


def blocks(rng: np.random.Generator, kind: int, count: int, deviation: float) -> Bytes:
    """(count, bytes of a block). KeyError: no such type here."""
    return {Q4_K: _q4_k, Q6_K: _q6_k}[kind](rng, count, deviation)


def ones(count: int) -> Bytes:
    """A norm's weights: (4 · count,) bytes of F32."""
    return np.ones(count, "<f4").view(np.uint8)


def _q4_k(rng: np.random.Generator, count: int, deviation: float) -> Bytes:
    made = np.empty((count, BLOCKS[Q4_K][1]), np.uint8)
    step = deviation / (SPREAD_4 * USUAL)
    made[:, 0:2] = _half(step)
    made[:, 2:4] = _half(step * MIDDLE_4)  # with min = scale this is what the middle of 0 … 15 comes to
    scales = rng.integers(LOW, HIGH, (count, 8), np.uint8)
    made[:, 4:16] = packed(scales, scales)
    made[:, 16:] = _drawn(rng, count, 128)
    return made


def _q6_k(rng: np.random.Generator, count: int, deviation: float) -> Bytes:
    made = np.empty((count, BLOCKS[Q6_K][1]), np.uint8)
    made[:, :192] = _drawn(rng, count, 192)
    # Either sign, so that the half by which 0 … 63 is not centred on 32 is in no direction.
    scales = rng.integers(LOW, HIGH, (count, 16)) * rng.choice((-1, 1), (count, 16))
    made[:, 192:208] = scales.astype(np.int8).view(np.uint8)
    made[:, 208:] = _half(deviation / (SPREAD_6 * USUAL))
    return made


def packed(scales: Bytes, mins: Bytes) -> Bytes:
    """(count, 8) scales and mins of 6 bits → (count, 12) bytes: the first four of each whole, of the others the low
    four bits together and the high two above the first ones'."""
    made = np.empty((len(scales), 12), np.uint8)
    made[:, 0:4] = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    made[:, 4:8] = mins[:, :4] | (mins[:, 4:] >> 4 << 6)
    made[:, 8:12] = (scales[:, 4:] & 15) | ((mins[:, 4:] & 15) << 4)
    return made


def _drawn(rng: np.random.Generator, count: int, size: int) -> Bytes:
    return np.frombuffer(rng.bytes(count * size), np.uint8).reshape(count, size)


def _half(value: float) -> Bytes:
    found: np.ndarray[Any, np.dtype[np.float16]] = np.array([value], "<f2")
    return found.view(np.uint8)


__all__ = ["F32", "Q4_K", "Q6_K", "blocks", "ones", "packed"]
