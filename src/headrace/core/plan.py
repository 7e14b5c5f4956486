"""What one engine step computes and what it gives: the words between scheduler and engine.

What is made anew at every step is a Struct: between two steps all caches are cold, and a frozen dataclass sets its
fields one by one through a Python-level call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headrace.core.costmodel import Work
from headrace.core.events import TokenLogprob
from headrace.core.kv import Kept
from headrace.core.request import Sampling
from headrace.core.sequence import Sequence as Choice

NOT_FINITE = "the model computed numbers that are none (NaN or infinite) for this request"


class Draw(msgspec.Struct, frozen=True, gc=False):
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
    drafts: int = 0
    """The chunk's last `drafts` tokens are guesses: token i of the answer is drawn from the row before guess i, for as
    long as the guesses before it turned out right. `position` and `history` are those of the first drawn token, so
    that `history` ends before the guesses."""


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Consecutive tokens of one sequence to compute."""

    slot: int
    """KV sequence id, 0 <= slot < n_slots."""
    start: int
    """Position of tokens[0]; positions below are in the slot's KV already."""
    tokens: Sequence[int]
    draw: Draw | None
    """None: more of the prompt follows."""


class Drawn(msgspec.Struct, frozen=True, gc=False):
    """Tokens drawn for one chunk: one, or several for a burst; the KV holds all but the last. None: the logits were
    not finite, and nothing that the chunk left in the KV is to be trusted."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token if asked for."""


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """`drawn[i]` belongs to chunk i, None where it had no `draw`."""

    drawn: tuple[Drawn | None, ...]
    computed_at: float
    """Logits were there (before sampling), on the engine thread's clock."""
    broken: tuple[int, ...] = ()
    """Chunks that drew nothing because their logits were not finite."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Share positions [0, length) of slot `source` with the empty slot `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Load:
    """Put what is kept under `key` back into a slot that holds [0, start): its positions become [0, end)."""

    slot: int
    start: int
    end: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Trim:
    """Forget positions >= length of a slot; 0 empties it."""

    slot: int
    length: int


KvOp = Copy | Trim | Load


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting sequence starts with the first `shared` tokens of slot `source`; then come `loads`, up to `length`."""

    sequence: Choice
    source: int | None
    shared: int
    length: int
    """Tokens that need not be computed."""
    loads: tuple[Kept, ...] = ()


class Share(msgspec.Struct, frozen=True, gc=False):
    """A sequence's part of a step: its next `count` tokens, the last of them guessed."""

    sequence: Choice
    count: int
    guesses: tuple[int, ...] = ()


class Plan(msgspec.Struct, frozen=True, gc=False):
    """One step. `shares` in batch order: decodes, then prompts; none when it only sends a sequence back."""

    shares: tuple[Share, ...]
    admissions: tuple[Admission, ...] = ()
    preempted: tuple[Choice, ...] = ()
    work: Work | None = None
    """None: the cost model is not to learn from it."""
    decodes: bool = False
    """Nobody waits for what it gives: its readers have read something before, and may be told beside the next step."""

    @property
    def tokens(self) -> int:
        return sum(share.count for share in self.shares)

    @property
    def arranged(self) -> tuple[int, int] | None:
        """(chunks that are a batch of their own, rows that fill the last batch up); None: one plain batch."""
        work = self.work
        if work is None or not (work.split or work.pad):
            return None
        return (work.decode if work.split else 0), work.pad

    @property
    def prompts(self) -> bool:
        """Is there a part of a prompt in it? Guesses cost the same, but nobody waits for them."""
        return self.work is not None and self.work.prefill > sum(len(share.guesses) for share in self.shares)

    @property
    def reading(self) -> bool:
        """Does somebody wait for the next token of an answer in it?"""
        return self.work is None or self.work.decode > 0

    def by_generation(self) -> dict[int, int]:
        """rid → tokens of the step that are computed for it."""
        found: dict[int, int] = {}
        for share in self.shares:
            rid = share.sequence.generation.rid
            found[rid] = found.get(rid, 0) + share.count
        return found
