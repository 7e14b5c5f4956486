"""From drawn tokens to what a reader sees: text, the ending, and the event that carries both.

    drawn ──book──► Taken ──tell──► events

Rules: a token belongs to the answer until the one that ends it; text that may still become a stop string, or half a
character, is held back and told later. `book` decides, and needs nothing that `tell` does: telling may lag behind, on
another thread, as long as everything is told once and in the order it was booked.
Who owns what of a Sequence: `untold`, `unsaid` and `shown` are `tell`'s. The detokenizer is `book`'s where a stop
string can end the answer, else `tell`'s. All the rest is `book`'s and the scheduler's; `tell` reads of it what is set
before the first token is drawn and never again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from headrace.core.events import Delta, Event, Finished, FinishReason, Marks, TokenLogprob
from headrace.core.plan import Drawn
from headrace.core.sequence import Sequence


class Taken(msgspec.Struct, frozen=True, gc=False):
    """What one step added to one sequence."""

    sequence: Sequence
    ids: tuple[int, ...]
    """At least one; the last one may be an ending token."""
    logprobs: tuple[TokenLogprob, ...]
    """Of those that are text; empty unless asked for."""
    text: str | None
    """None: to be made of `ids`, no stop string can be in it."""
    holds: bool
    """Behind `text`, something is held back."""
    reason: FinishReason | None
    """None: it goes on."""
    drawn: int
    """Tokens of the answer with these."""
    at: float
    """When they were drawn."""


class Teller:
    """One an engine. `piece`: a token's bytes; `eog`: the tokens that end an answer."""

    def __init__(self, piece: Callable[[int], bytes], eog: frozenset[int]) -> None:
        self.piece = piece
        self._eog = eog
        self.tokens = 0
        """Tokens booked so far."""

    def book(self, sequence: Sequence, drawn: Drawn, now: float) -> Taken:
        """Add drawn tokens to a sequence, up to the one that ends it."""
        left = sequence.generation.max_tokens - sequence.drawn
        detokenizer = sequence.detokenizer if sequence.generation.stop else None
        reason: FinishReason | None = None
        text = ""
        count = said = 0
        for token in drawn.tokens:
            sequence.tokens.append(token)
            count += 1
            if token in self._eog:
                reason = "stop"
                break
            said = count
            if detokenizer is not None:
                text += detokenizer.feed(self.piece(token))
                if detokenizer.stopped:
                    reason = "stop"
                    break
            if count == left:
                reason = "length"
                break
        if reason and detokenizer is not None:
            text += detokenizer.flush()
        self.tokens += count
        return Taken(
            sequence,
            drawn.tokens[:count],
            drawn.logprobs[:said],
            None if detokenizer is None else text,
            detokenizer is not None and detokenizer.holds,
            reason,
            sequence.drawn,
            now,
        )

    def tell(self, taken: Iterable[Taken]) -> list[Event]:
        """What readers see of it. Each one once, in the order of `book`."""
        events: list[Event] = []
        for one in taken:
            sequence = one.sequence
            text, holds = one.text, one.holds
            if text is None:
                text = self._text(one)
                holds = sequence.detokenizer.holds
            sequence.untold += one.ids
            sequence.unsaid += one.logprobs
            _say(sequence, text, holds, one.at, events)
            if one.reason:
                events.append(Finished(sequence.generation.rid, sequence.index, one.reason, one.drawn))
        return events

    def _text(self, taken: Taken) -> str:
        ids = taken.ids[:-1] if taken.reason == "stop" else taken.ids
        feed, piece = taken.sequence.detokenizer.feed, self.piece
        return feed(piece(ids[0])) if len(ids) == 1 else "".join([feed(piece(token)) for token in ids])


def _say(sequence: Sequence, text: str, holds: bool, now: float, events: list[Event]) -> None:
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
    rid, index, ids = sequence.generation.rid, sequence.index, tuple(sequence.untold)
    events.append(Delta(rid, index, text, len(ids), tuple(sequence.unsaid), marks, ids, holds))
    sequence.untold.clear()
    sequence.unsaid.clear()
