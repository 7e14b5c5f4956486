"""From drawn tokens to what a reader sees: text, the ending, and the event that carries both.

Rules: a token belongs to the answer until the one that ends it; text that may still become a stop string, or half a
character, is held back and told later.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.events import Delta, Event, Finished, FinishReason, Marks
from headrace.core.plan import Drawn
from headrace.core.sequence import Sequence


class Teller:
    """One an engine. `piece`: a token's bytes; `eog`: the tokens that end an answer."""

    def __init__(self, piece: Callable[[int], bytes], eog: frozenset[int]) -> None:
        self.piece = piece
        self._eog = eog
        self.tokens = 0
        """Tokens taken so far."""

    def take(self, sequence: Sequence, drawn: Drawn, now: float, events: list[Event]) -> tuple[int, bool]:
        """Add drawn tokens to a sequence, up to the one that ends it: how many that were, and whether it is over."""
        text: list[str] = []
        reason: FinishReason | None = None
        count = 0
        for i, token in enumerate(drawn.tokens):
            sequence.tokens.append(token)
            sequence.untold += 1
            count += 1
            ended = token in self._eog
            if not ended:
                if drawn.logprobs:
                    sequence.unsaid.append(drawn.logprobs[i])
                text.append(sequence.detokenizer.feed(self.piece(token)))
            if ended or sequence.detokenizer.stopped:
                reason = "stop"
            elif sequence.drawn == sequence.generation.max_tokens:
                reason = "length"
            if reason:
                text.append(sequence.detokenizer.flush())
                break
        self.tokens += count
        _say(sequence, "".join(text), now, events)
        if reason:
            events.append(Finished(sequence.generation.rid, sequence.index, reason, sequence.drawn))
        return count, reason is not None


def _say(sequence: Sequence, text: str, now: float, events: list[Event]) -> None:
    if not text and not sequence.unsaid:
        return
    marks = None
    if text and not sequence.shown:
        sequence.shown = True
        scheduled, restored, prefilled = sequence.scheduled, sequence.restored, sequence.prefilled
        assert scheduled is not None
        assert restored is not None
        assert prefilled is not None
        marks = Marks(sequence.arrived, scheduled, restored, prefilled, now)
    n = sequence.untold
    rid, index, ids = sequence.generation.rid, sequence.index, tuple(sequence.tokens[-n:])
    events.append(Delta(rid, index, text, n, tuple(sequence.unsaid), marks, ids))
    sequence.untold = 0
    sequence.unsaid.clear()
