"""What will a step cost? A linear model, fitted to the steps themselves.

    step ≈ a + b·P + l·L + c·D + e·(positions that its rows look back on) + d·(P + D)·width

P prefill tokens and rows that nobody reads, D decode rows, L rows left over from groups of 16, width the highest cell
in use. llama.cpp computes repacked weights (Q4_0 and the K-quants) 16 rows at a time, what is left over by fours and
ones: on the EPYC of docs/benchmarks.md a row of a group costs 7.2 ms at a 1B model's shape, any other 12.5, and 15 rows
take 187 ms where 16 take 139. The position term has two coefficients, because llama.cpp's attention on a CPU works in
tiles of 64 rows when a batch has that many and row by row below, at three times the price and more: a small chunk deep
in a long prompt is dear. What tiles look at is in `core.attention`.

Rules: recursive least squares that forgets by letting the coefficients drift (a Kalman filter over a random walk: plain
exponential forgetting blew up when thousands of equal decodes taught nothing about prompts); coefficients are never
negative, and no step costs nothing; what the last few steps with a prompt took longer than predicted is known at once
(`late`), before the coefficients follow; a step that took far longer than predicted (the machine was busy with
something else) counts as a somewhat slow one, or one hiccup would teach the model fear. Pure: whoever runs the steps
brings the seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.core.attention import TILE, Attention

DRIFT = 0.03
"""How far each coefficient may have moved since the last step, as a share of itself."""

CLIP = 2.0
"""A step counts as at most this many times its prediction, and SLACK seconds."""

SLACK = 0.005

LATEST = 0.3
"""Weight of the last step in what steps have lately taken longer than predicted."""

NOISE = 0.1
"""How far a step may be off for reasons that are not the model's, as a share of its length."""

GROUP = 16
"""Rows that the kernels of repacked weights take at a time (`ggml_gemm_*_8x8_*` of ggml-cpu/arch/x86/repack.cpp)."""

TERMS = ("fixed", "prefill", "loose", "decode", "tiles", "rowwise", "width")

# Seconds, before anything was measured: a small model on two cores. The first steps of any machine replace it.
PRIOR = (1e-3, 3e-3, 3e-4, 5e-3, 1.5e-6, 3e-6, 5e-9)

_FLOOR = np.array((1e-6, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
"""No step is free: who asks divides by the answer."""


class Work(msgspec.Struct, frozen=True, gc=False):
    """What a step computes. Tokens and cells."""

    prefill: int = 0
    decode: int = 0
    positions: int = 0
    """Sum over all rows of the positions before each."""
    width: int = 0
    reading: int = 0
    """What of `positions` is the decode rows'; 0 counts them as if they were the prompts'."""
    pad: int = 0
    """Rows that nobody reads."""
    split: bool = False
    """The decode rows are a batch of their own."""

    def terms(self, attention: Attention) -> tuple[float, ...]:
        """The factors of the model's coefficients, in the order of TERMS."""
        prefill = self.prefill + self.pad
        tiled, rowwise = self.looked_at(attention)
        wide = (prefill + self.decode) * self.width
        return (1.0 + self.split, prefill, self.loose, self.decode, tiled, rowwise, wide)

    @property
    def loose(self) -> int:
        """Rows that are in no whole group."""
        prefill = self.prefill + self.pad
        return prefill % GROUP + self.decode % GROUP if self.split else (prefill + self.decode) % GROUP

    def looked_at(self, attention: Attention) -> tuple[float, float]:
        """Positions that the step looks at in tiles, and row by row.

        A reader's row in a tile makes that tile look at all of the reader's positions, for all rows of the tile.
        """
        prompts = self.prefill + self.pad
        if not attention.tiled or prompts + self.decode < TILE or (self.split and prompts < TILE):
            return 0.0, self.positions
        if self.split:
            return attention.share(prompts, self.prefill) * (self.positions - self.reading), self.reading
        rows = prompts + self.decode
        share = attention.share(rows, rows - self.pad)
        return share * (self.positions - self.reading) + max(share, TILE) * self.reading, 0.0


def positions(start: int, count: int) -> int:
    """Sum of the positions start … start + count - 1."""
    return count * start + count * (count - 1) // 2


class CostModel:
    """Learns from `observe`, answers `predict`. Seconds."""

    def __init__(
        self,
        coefficients: Sequence[float] = PRIOR,
        *,
        sure: bool = False,
        attention: Attention = Attention(),  # noqa: B008
    ) -> None:
        """`sure`: measured on this machine with this model; otherwise the first steps outweigh `coefficients`."""
        self.attention = attention
        self._w = np.maximum(np.array(coefficients, dtype=np.float64), _FLOOR)
        # Scaled so that each term's uncertainty is in proportion to its coefficient.
        spread = 0.1 if sure else 10.0
        self._least = np.array(PRIOR) / 100
        self._p = np.diag((spread * np.maximum(self._w, self._least)) ** 2)
        self._most = (10.0 * np.maximum(self._w, self._least)) ** 2
        self._plain: tuple[float, ...] = tuple(self._w.tolist())
        self._errors: deque[float] = deque(maxlen=256)
        self._late = 0.0
        self.observed = 0

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {value * 1e6:.3g}" for name, value in zip(TERMS, self._plain, strict=True))
        return f"<CostModel [µs: {parts}; error {self.error(0.5):.0%}]>"

    @property
    def coefficients(self) -> tuple[float, ...]:
        """To be saved, in the order of TERMS."""
        return self._plain

    @property
    def per_token(self) -> float:
        """Seconds of a prompt token at the beginning of a prompt."""
        return self._plain[1]

    @property
    def per_loose(self) -> float:
        """Seconds that a row costs beyond `per_token` for being in no whole group of rows."""
        return self._plain[2]

    @property
    def late(self) -> float:
        """By how many times the last steps with a prompt took longer than predicted, >= 1."""
        return math.exp(max(0.0, self._late))

    def predict(self, work: Work) -> float:
        """Seconds that the step will take."""
        # In plain floats: called for several sizes of each step, and numpy's overhead is ten times the arithmetic.
        a, b, loose, c, tiled, rowwise, d = self._plain
        prefill = work.prefill + work.pad
        rows = prefill + work.decode
        attended = rowwise * work.positions
        if rows >= TILE:
            in_tiles, in_rows = work.looked_at(self.attention)
            attended = tiled * in_tiles + rowwise * in_rows
        by_rows = b * prefill + loose * work.loose + c * work.decode
        return a * (1 + work.split) + by_rows + attended + d * rows * work.width

    def prefill(self, start: int, count: int) -> float:
        """Seconds that `count` tokens after the first `start` of a prompt take in steps of efficient size."""
        return self._plain[1] * count + self._plain[4 if self.attention.tiled else 5] * positions(start, count)

    def error(self, quantile: float) -> float:
        """|predicted - measured| / measured over the last 256 steps; 0 before the first."""
        if not self._errors:
            return 0.0
        ordered = sorted(self._errors)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from a step that took `seconds`, > 0."""
        x = np.array(work.terms(self.attention), dtype=np.float64)
        predicted = float(self._w @ x)
        self._errors.append(abs(predicted - seconds) / seconds)
        self.observed += 1
        if work.prefill:
            off = math.log(min(max(seconds / predicted, 1.0 / CLIP), CLIP))
            self._late += LATEST * (off - self._late)
        if self.observed > len(TERMS):
            seconds = min(seconds, CLIP * predicted + SLACK)
        p = self._p + np.diag((DRIFT * np.maximum(self._w, self._least)) ** 2)
        # What no step shows any more must not become so uncertain that the next such step overthrows the model.
        shrink = np.sqrt(np.minimum(1.0, self._most / np.diag(p)))
        p *= np.outer(shrink, shrink)
        # Relative errors: a step of 10 ms that is 2 ms off says as much as one of 100 ms that is 20 ms off.
        noise = (NOISE * seconds) ** 2
        gain = p @ x / (noise + x @ p @ x)
        self._w = np.maximum(self._w + gain * (seconds - predicted), _FLOOR)
        # Joseph's form: stays positive definite whatever the rounding does.
        keep = np.eye(len(TERMS)) - np.outer(gain, x)
        self._p = keep @ p @ keep.T + noise * np.outer(gain, gain)
        self._plain = tuple(self._w.tolist())
