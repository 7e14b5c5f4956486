"""What one engine step computes and what it gives: the words between scheduler and engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.events import TokenLogprob
from headrace.core.request import Sampling


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw one token from the chunk's last position."""

    sampling: Sampling
    seed: int
    """sampling.seed + choice index."""
    position: int
    """Tokens of the sequence before the drawn one: (seed, position) names the random number."""
    history: Sequence[int]
    """The sequence so far, for penalties; only read, and only when a penalty is on."""
    prompt: int
    """How many of `history` are the prompt."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence to compute."""

    slot: int
    """KV sequence id, 0 <= slot < n_slots."""
    start: int
    """Position of tokens[0]; positions below are in the slot's KV already."""
    tokens: Sequence[int]
    draw: Draw | None
    """None: more of the prompt follows."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens drawn for one chunk: one, or several for a burst; the KV holds all but the last."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token if asked for."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """`drawn[i]` belongs to chunk i, None where it had no `draw`."""

    drawn: tuple[Drawn | None, ...]
    computed_at: float
    """Logits were there (before sampling), on the engine thread's clock."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Share positions [0, length) of slot `source` with the empty slot `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Trim:
    """Forget positions >= length of a slot; 0 empties it."""

    slot: int
    length: int


KvOp = Copy | Trim
