"""A small model that guesses for a large one with the same vocabulary.

    sequence (the large model's)   p p p p p p g g g │
    slot here                      p p p p p p g g x x      common prefix kept, the rest trimmed, what is missing
                                                   └┘       computed: x were guesses that turned out wrong

Rules: it is driven by the engine thread, like the engine that it guesses for. It keeps its own KV, one slot for each
sequence that asks, and the least recently used one goes when slots or cells run out. What it does not know yet of a
sequence is computed only once guesses are wanted, in parts, no more at a time than the step may be delayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.core.clock import Clock
from headrace.core.errors import StartupError
from headrace.core.plan import Chunk, Draw
from headrace.core.request import Sampling
from headrace.core.sequence import common_prefix
from headrace.core.speculation import Outcome
from headrace.engines.base import ModelInfo, StepAborted, StepEngine, StepFailed

PART = 32
"""Tokens that are computed at once, however little time is allowed."""

_GREEDY = Sampling(temperature=0.0)
_PIECES = 1024
"""How many tokens of two vocabularies are compared."""

_NEW = 0.2
"""Weight of the newest measurement of a token's time."""


def check_vocabulary(
    draft: ModelInfo, draft_piece: Callable[[int], bytes], model: ModelInfo, piece: Callable[[int], bytes]
) -> None:
    """Raises StartupError unless the two models number their tokens alike: the size, the ends, and a sample."""
    fault = ""
    if draft.n_vocab != model.n_vocab:
        fault = f"it has {draft.n_vocab} tokens, the model has {model.n_vocab}"
    elif draft.eog != model.eog:
        fault = f"its answers end with tokens {list(draft.eog)}, the model's with {list(model.eog)}"
    else:
        sample = range(0, model.n_vocab, max(1, model.n_vocab // _PIECES))
        other = next((t for t in sample if draft_piece(t) != piece(t)), None)
        if other is not None:
            fault = f"its token {other} is {draft_piece(other)!r}, the model's is {piece(other)!r}"
    if fault:
        raise StartupError(f"engine.draft_model needs the model's vocabulary: {fault}; give one of the same family")


class DraftModel:
    """Owns `engine`, which computes the guesses. `of` gives the Proposer of one sequence."""

    def __init__(self, engine: StepEngine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._eog = frozenset(engine.info.eog)
        self._held: dict[int, list[int]] = {}
        """Slot → its tokens; least recently used first."""
        self._free = list(range(engine.n_slots - 1, -1, -1))
        self.prefill_s = self.token_s = 0.0
        """Seconds for a prompt token and for a guess, measured."""
        self._measure()

    def __repr__(self) -> str:
        return f"<DraftModel {self._engine.info.name} [{len(self._held)} of {self._engine.n_slots} slots]>"

    def of(self, tokens: Sequence[int]) -> DraftProposer:
        """For the sequence whose own list is `tokens`."""
        return DraftProposer(self, tokens)

    def close(self) -> None:
        """Free the model. Not to be used again."""
        self._engine.close()

    def ready(self, tokens: Sequence[int], allowed: float) -> bool:
        """Could `propose` begin at once? Computes what is missing, as far as about `allowed` seconds go."""
        known = list(tokens)
        slot, common = self._slot(known)
        behind = len(known) - common
        if slot < 0 or behind <= PART:
            return slot >= 0
        count = min(
            max(PART, int(allowed / self.prefill_s) if self.prefill_s else behind), self._engine.n_batch, behind
        )
        began = self._clock()
        if self._step(slot, known[common : common + count], None):
            self.prefill_s += _NEW * ((self._clock() - began) / count - self.prefill_s)
        return False

    def propose(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        """Up to `k` greedy guesses for what follows `tokens`; fewer behind one that ends the answer, none for a
        sequence that is not ready."""
        known = list(tokens)
        slot, common = self._slot(known)
        if slot < 0 or len(known) - common > PART:
            return ()
        room = self._engine.n_cells - sum(map(len, self._held.values())) + common
        most = min(room, self._engine.info.n_ctx) - len(known)
        began = self._clock()
        guesses: list[int] = []
        fresh = known[common:]
        while len(guesses) < min(k, most) and fresh[-1] not in self._eog:
            fresh = self._step(slot, fresh, known)
            if not fresh:
                return ()
            guesses += fresh
        if guesses:
            self.token_s += _NEW * ((self._clock() - began) / len(guesses) - self.token_s)
        return tuple(guesses)

    def _measure(self) -> None:
        token = self._engine.info.bos or 0
        n = min(PART, self._engine.n_batch - 1)
        times = [self._clock()]
        slot, _ = self._slot([token] * (n + 1))
        for tokens, history in (([token] * n, None), ([token], [token])):
            self._step(slot, tokens, history)
            times.append(self._clock())
        self.prefill_s, self.token_s = (times[1] - times[0]) / n, times[2] - times[1]
        if slot in self._held:
            self._drop(slot)

    def _slot(self, tokens: list[int]) -> tuple[int, int]:
        """(slot, length) of the longest known prefix, with nothing else in it, and with room for the rest."""
        need = len(tokens) + 1
        if need > min(self._engine.n_cells, self._engine.info.n_ctx):
            return -1, 0
        best, common = -1, 0
        for slot, held in self._held.items():
            length = min(common_prefix(held, tokens), len(tokens) - 1)
            # Half of what it holds must be ours: a shared system prompt is no reason to take another's slot.
            if length > common and 2 * length > len(held):
                best, common = slot, length
        if best < 0:
            if not self._free:
                self._drop(next(iter(self._held)))
            best = self._free.pop()
            self._held[best] = []
        held = self._held[best] = self._held.pop(best)  # now the most recently used
        if len(held) > common:
            del held[common:]
            self._engine.trim(best, common)
        while sum(len(h) for h in self._held.values()) - common + need > self._engine.n_cells:
            self._drop(next(iter(self._held)))
        return best, common

    def _drop(self, slot: int) -> None:
        del self._held[slot]
        self._engine.trim(slot, 0)
        self._free.append(slot)

    def _step(self, slot: int, tokens: list[int], history: list[int] | None) -> list[int]:
        """Compute `tokens`; with a history, draw the token behind them. Without one, and all went well: `tokens`.

        Empty if the step failed, which leaves the slot empty: a guess is never worth an error.
        """
        held = self._held[slot]
        end = len(held) + len(tokens)
        draw = Draw(_GREEDY, 0, end, history, 0) if history is not None else None
        try:
            (drawn,) = self._engine.step([Chunk(slot, len(held), tokens, draw)]).drawn
        except (StepAborted, StepFailed):
            self._drop(slot)
            return []
        if drawn is not None and not drawn.tokens:
            self._drop(slot)
            return []
        held.extend(tokens)
        return [drawn.tokens[0]] if drawn else tokens


class DraftProposer:
    """The draft model's Proposer for one sequence; see `core.speculation`."""

    def __init__(self, model: DraftModel, tokens: Sequence[int]) -> None:
        self._model = model
        self._tokens = tokens
        self._guesses: tuple[int, ...] = ()
        self._from = 0
        """Length of the sequence when it was guessed for."""
        self._run = 0

    @property
    def support(self) -> int | None:
        """Guesses that were right in a row."""
        return self._run

    def cost(self, k: int) -> float:
        """As measured on the last guesses."""
        return k * self._model.token_s

    def review(self) -> Sequence[Outcome]:
        """See Proposer. Nothing is known of guesses that were not asked for."""
        outcomes: list[Outcome] = []
        for guess, token in zip(self._guesses, self._tokens[self._from :], strict=False):
            outcomes.append((self._run, guess == token))
            if guess != token:
                self._run = 0
                break
            self._run += 1
        self._guesses = ()
        return outcomes

    def ready(self, allowed: float) -> bool:
        """See Proposer. The first time it computes the prompt."""
        return self._model.ready(self._tokens, allowed)

    def propose(self, k: int) -> tuple[int, ...]:
        """See Proposer."""
        self._guesses = self._model.propose(self._tokens, k)
        self._from = len(self._tokens)
        return self._guesses
