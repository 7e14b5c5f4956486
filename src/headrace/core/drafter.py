"""Guesses for the sequences of a step in which everybody decodes and nobody waits.

Rules: guesses lengthen a step by no more than the target for gaps leaves; what they cost is asked of the cost model;
without one nobody guesses. Those who wait for a first token have the room instead: no prompt is ever beside a guess.
"""

from __future__ import annotations

from functools import partial

from headrace.core.costmodel import CostModel, Work, positions
from headrace.core.plan import Share
from headrace.core.speculation import Speculation


class Drafter:
    """One an engine. `most`: guesses that it takes in a step; `itl`: seconds that a step with guesses may last."""

    def __init__(self, speculation: Speculation, *, most: int, itl: float) -> None:
        self._speculation = speculation
        self._most = most
        self._itl = itl

    def add(self, shares: list[Share], work: Work, cost: CostModel, room: int) -> Work:
        """Put guesses into `shares`, which hold one token each, for at most `room` cells; the work with them."""
        most = min(self._most, room)
        for i, share in enumerate(shares):
            if most <= 0:
                break
            s = share.sequence
            if s.speculator is None:
                s.speculator = self._speculation.begin(s.tokens, len(s.generation.prompt))
            allowed = max(0.0, self._itl - cost.predict(work))
            left = min(most, s.generation.max_tokens - s.drawn - 1)
            guesses = s.speculator.guess(partial(_seconds, cost, work, s.computed + 1), allowed=allowed, most=left)
            if guesses:
                shares[i] = Share(s, 1 + len(guesses), guesses)
                work = _beside(work, s.computed + 1, len(guesses))
                most -= len(guesses)
        return work


def _beside(work: Work, start: int, count: int) -> Work:
    """The step with `count` more rows of one sequence, from position `start` on."""
    back = work.positions + positions(start, count)
    return Work(work.prefill + count, work.decode, back, work.width + count, work.reading)


def _seconds(cost: CostModel, work: Work, start: int, count: int) -> float:
    """Of the step with `count` guesses more."""
    return cost.predict(_beside(work, start, count))
