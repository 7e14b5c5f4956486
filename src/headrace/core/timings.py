"""Timed steps of a model's first layers, and what they say of all of them.

    layers    1 … L timed ──► × (N − p) / (L − p) ──► 1 … N     p: what such a step leaves out of the last layer
    head      (a step with outputs) − (the same without) ─────► added once

Rules: a step whose rows have no outputs computes neither the head nor the feed-forward part of the last layer, so that
both are in the difference to the same step with outputs. Pure: seconds come from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headrace.core.tuning import MIXTURE, READERS, Figures, PromptStep, prompt_seconds

LEFT_OUT = 0.75
"""Of a layer's weights, those of its feed-forward part: 8/(8 + 2.7) of a usual one."""

LEAST_LAYERS = 2
"""Of fewer, hardly anything but attention would be timed."""


class Timing(msgspec.Struct, frozen=True):
    """One step."""

    rows: int
    """All of one sequence, or one of each of several."""
    depth: int
    """Tokens that each sequence had before."""
    sequences: int
    outputs: bool
    """Each row's logits were asked for."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Part:
    """`layers` of `total` were timed."""

    layers: int
    total: int

    @property
    def scale(self) -> float:
        """By how much a step without outputs is longer with all layers."""
        return 1.0 if self.layers >= self.total else (self.total - LEFT_OUT) / (self.layers - LEFT_OUT)


def sample_layers(size: int, total: int, period: int, target: int) -> int:
    """Layers that are enough to be timed: of a file of `size` bytes and `total` layers those that hold about `target`
    bytes, in whole periods of the pattern in which kinds of layers follow each other; at least LEAST_LAYERS."""
    enough = max(LEAST_LAYERS, round(target * total / max(1, size)))
    layers = -(-enough // period) * period
    return min(layers, total)


def figures(timings: Sequence[Timing], part: Part, n_ctx: int) -> Figures | None:
    """Of the whole model, as one round; None: too little was timed. Lengths from `n_ctx` tokens on are left out."""
    one, many = _shortest(timings, 1, outputs=True), _shortest(timings, READERS, outputs=True)
    bare, bare_many = _shortest(timings, 1, outputs=False), _shortest(timings, READERS, outputs=False)
    prompt = [timing for timing in timings if timing.sequences == 1 and timing.rows > 1]
    short = min((timing.seconds for timing in prompt if timing.rows == MIXTURE[0][0]), default=None)
    if one is None or many is None or bare is None or bare_many is None or short is None:
        return None
    head, scale = max(0.0, one - bare), part.scale
    longest = max(timing.rows for timing in prompt)
    steps = [PromptStep(timing.depth, timing.rows, timing.seconds) for timing in prompt if timing.rows == longest]
    deep = max((t.depth for t in timings if t.sequences == 1 and t.rows == 1 and not t.outputs), default=0)
    reader = _shortest([timing for timing in timings if timing.depth == deep], 1, outputs=False)
    return Figures(
        first_tokens=(
            (MIXTURE[0][0], short * scale + head),
            *((n, prompt_seconds(steps, n) * scale + head) for n, _ in MIXTURE[1:] if n < n_ctx),
        ),
        one=(bare if reader is None else reader) * scale + head,
        many=bare_many * scale + max(0.0, many - bare_many),
        memory=0,
        longest=longest,
    )


def _shortest(timings: Sequence[Timing], sequences: int, *, outputs: bool) -> float | None:
    """What else the machine does only lengthens steps."""
    found = [t.seconds for t in timings if t.rows == t.sequences == sequences and t.outputs is outputs]
    return min(found, default=None)
