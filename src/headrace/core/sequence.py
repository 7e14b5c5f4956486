"""One choice of one generation in the scheduler's eyes.

    tokens     p p p p p p p p p p g g g g        prompt, then what was drawn
    computed   ───────────────────────>|          these are in the KV; the rest is to be computed

Rule: there is no prefill phase and no decode phase, `computed` chases len(tokens). One token behind is a decode, more
is prefill.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.core.detokenizer import Detokenizer
from headrace.core.events import TokenLogprob
from headrace.core.kv import Outside
from headrace.core.request import Generation
from headrace.core.speculation import Speculator


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the scheduler, but for what `core.teller` names. Stamps in seconds on the engine's clock."""

    generation: Generation
    index: int
    arrived: float
    tokens: list[int]
    detokenizer: Detokenizer
    slot: int | None = None
    """None while it waits."""
    computed: int = 0
    known: int = 0
    """Prompt tokens that were cached when it came: what it will cost is judged by the rest."""
    due: float = 0.0
    """When its first token is wanted, on the engine's clock."""
    outside: Outside | None = None
    """A prefix of it that is kept outside the pool."""
    hold: float = 0.0
    """It waits for a fetch until then, at most; 0: it does not."""
    cached: int = 0
    paused: bool = False
    scheduled: float | None = None
    restored: float | None = None
    prefilled: float | None = None
    shown: bool = False
    """Some text went out."""
    untold: list[int] = field(default_factory=list)
    """Tokens told since the last event."""
    unsaid: list[TokenLogprob] = field(default_factory=list)
    """Their logprobs."""
    speculator: Speculator | None = None

    def __repr__(self) -> str:
        where = "waiting" if self.slot is None else f"slot {self.slot}"
        return f"<Sequence {self.generation.rid}.{self.index} [{where}, {self.computed}/{len(self.tokens)}]>"

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def drawn(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - len(self.generation.prompt)

    @property
    def begun(self) -> bool:
        """Has a step worked on it, be it before it was sent back, or in an engine that died since?"""
        return self.scheduled is not None or bool(self.generation.resume)

    @property
    def decoding(self) -> bool:
        """Its reader waits for the next token: the first one is out."""
        n = len(self.tokens)
        return n - self.computed == 1 and n > len(self.generation.prompt)


def sequences(generation: Generation, now: float, piece: Callable[[int], bytes]) -> list[Sequence]:
    """The choices of a generation that are not over, in order. `piece`: a token's bytes as they appear in an answer."""
    resume = generation.resume or ((),) * generation.n
    return [_sequence(generation, i, now, ids, piece) for i, ids in enumerate(resume) if ids is not None]


def _sequence(
    generation: Generation, index: int, now: float, ids: tuple[int, ...], piece: Callable[[int], bytes]
) -> Sequence:
    """One choice. In a replay it stands where it stood when its reader was last told something: nothing is untold, and
    the detokenizer holds back what it held back then."""
    detokenizer = Detokenizer(generation.stop)
    shown = False
    for token in ids:
        shown = bool(detokenizer.feed(piece(token))) or shown
    return Sequence(generation, index, now, [*generation.prompt, *ids], detokenizer, shown=shown)


Run = TypeVar("Run", list[int], "array[int]")


def common_prefix(a: Run, b: Run, start: int = 0) -> int:
    """How many tokens of `a` equal those of `b[start:]`, from the front. Both of one kind, arrays of one typecode."""
    limit = min(len(a), len(b) - start)
    if a[:limit] == b[start : start + limit]:  # one comparison in C decides the common case
        return limit
    low, high = 0, limit  # invariant: the first `low` agree, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
