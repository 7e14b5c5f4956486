"""What will a step cost? A linear model, fitted to the steps themselves.

    step ≈ a + b·P + c·D + e·(prefill work on positions) + d·(P + D)·width

P prefill tokens, D decode rows, width the highest cell in use. The position term has two coefficients, because llama.cpp's attention
on a CPU works in tiles of 64 rows when a batch has that many and row by row below, at two to three times the price.

Rules: recursive least squares with forgetting; coefficients are never negative; a step that took far longer than predicted (the
machine was busy with something else) counts as a somewhat slow one, or one hiccup would teach the model fear. Pure: whoever runs the
steps brings the seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TILE = 64
"""Rows from which on attention is computed in tiles."""

FORGET = 0.995
"""Weight of the past at each step: half of it is gone after 140 steps."""

CLIP = 3.0
"""A step counts as at most this many times its prediction."""

TERMS = ("fixed", "prefill", "decode", "tiled", "rowwise", "width")

# Seconds, before anything was measured: a small model on two cores. The first steps of any machine replace it.
PRIOR = (1e-3, 3e-3, 7e-3, 1.5e-6, 4e-6, 1e-8)


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes. Tokens and cells."""

    prefill: int = 0
    decode: int = 0
    positions: int = 0
    """Sum over the step's prefill tokens of the positions before each."""
    width: int = 0

    @property
    def rows(self) -> int:
        return self.prefill + self.decode

    def terms(self) -> NDArray[np.float64]:
        """The factors of the model's coefficients, in the order of TERMS."""
        tiled = self.rows >= TILE
        return np.array(
            [
                1.0,
                self.prefill,
                self.decode,
                self.positions if tiled else 0.0,
                0.0 if tiled else self.positions,
                self.rows * self.width,
            ],
            dtype=np.float64,
        )


def positions(start: int, count: int) -> int:
    """Sum of the positions start … start + count - 1."""
    return count * start + count * (count - 1) // 2


class CostModel:
    """Learns from `observe`, answers `predict`. Seconds."""

    def __init__(self, coefficients: Sequence[float] = PRIOR, *, sure: bool = False) -> None:
        """`sure`: the coefficients were measured on this machine with this model; otherwise the first steps outweigh them."""
        self._w = np.array(coefficients, dtype=np.float64)
        # Scaled so that each term's uncertainty is in proportion to its coefficient.
        spread = 0.1 if sure else 10.0
        self._p = np.diag((spread * np.maximum(self._w, 1e-9)) ** 2)
        self.observed = 0
        self.error = 0.0
        """Moving mean of |predicted - measured| / measured."""

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {value * 1e6:.3g}" for name, value in zip(TERMS, self._w, strict=True))
        return f"<CostModel [µs: {parts}; error {self.error:.0%}]>"

    @property
    def coefficients(self) -> tuple[float, ...]:
        """To be saved, in the order of TERMS."""
        return tuple(float(value) for value in self._w)

    def predict(self, work: Work) -> float:
        """Seconds that the step will take."""
        return float(self._w @ work.terms())

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        x = work.terms()
        predicted = float(self._w @ x)
        self.error += (abs(predicted - seconds) / seconds - self.error) * max(0.02, 1.0 / (self.observed + 1))
        self.observed += 1
        if self.observed > len(TERMS):
            seconds = min(seconds, CLIP * predicted)
        # Relative errors: a step of 10 ms that is 2 ms off says as much as one of 100 ms that is 20 ms off.
        noise = (0.1 * seconds) ** 2
        gain = self._p @ x / (noise * FORGET + x @ self._p @ x)
        self._w = np.maximum(self._w + gain * (seconds - predicted), 0.0)
        self._p = (self._p - np.outer(gain, x @ self._p)) / FORGET
