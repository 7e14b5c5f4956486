"""How long may the next step be, and how many prompt tokens is that?

    nobody reads              no longer than a newcomer may be kept waiting for the end of a step          guard
    somebody reads            the target for gaps between tokens                                           itl
    … and a prompt has        the most that a gap may be while it waits for its first token                itl_hard
      burnt its fuse
    a crowd of newcomers      what nobody would mind once: it brings them all to their first tokens        stall
      could be finished

Rules: a step always brings some prompt forward. Sizes come from buckets of rows, decodes included, coarser as they
grow, so that large shapes come again. Without a cost model a step is a fixed number of tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from headrace.core.costmodel import TILE, CostModel, Work, positions

LEAST = 8
"""Prompt tokens that a step computes at least, however deep in the prompt they are."""

CROWD = 2
"""How much a newcomer's wait for the first token weighs against one more gap of somebody who reads already."""

BUCKETS: tuple[int, ...] = (
    *range(1, 48),
    *range(48, TILE, 4),
    *range(TILE, 8 * TILE, 16),
    *range(8 * TILE, 129 * TILE, TILE),
)
"""Rows of a step. Every size up to 48: deep in a prompt a row is a twentieth of what a gap allows, and a shape that the
engine has not met costs nothing that could be measured on a CPU (docs/benchmarks.md, the first request)."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Lengths of a step in seconds; see the module. `fuse`: how long a request waits before it burns."""

    itl: float = 0.1
    itl_hard: float = 0.145
    stall: float = 0.5
    guard: float = 0.25
    fuse: float = 0.1

    def crowd(self, reading: int, finishing: int) -> bool:
        """Are `finishing` newcomers worth one long gap to `reading` readers?"""
        return CROWD * finishing > max(reading, CROWD)

    def seconds(self, reading: int, *, burnt: bool, crowd: bool) -> float:
        """Of a step beside `reading` readers; `burnt`: some prompt is past its fuse."""
        usual = self.itl_hard if reading and burnt else self.itl if reading else self.guard
        return max(usual, self.stall) if crowd else usual


def finishing(newcomers: Iterable[float], seconds: float) -> int:
    """How many prompts that take so long, in their order, could be finished in `seconds`."""
    return sum(end <= seconds for end in accumulate(newcomers))


class Room:
    """What is left of one step while its shares are given out."""

    def __init__(
        self, model: CostModel | None, base: Work, *, seconds: float, tokens: int, whole: bool = False
    ) -> None:
        """`base`: what the step computes anyway; `seconds` for all of it; `tokens`: prompt tokens at most.

        `whole`: after the first prompt only such as fit whole: a part of one lengthens the gap of all others and brings
        nobody a token.
        """
        self._whole = whole
        self._model = model
        self._base = base
        self._seconds = seconds
        self._left = tokens
        self._taken = 0
        self._positions = 0

    @property
    def full(self) -> bool:
        """Nothing more fits."""
        return self._left <= 0

    def give(self, start: int, pending: int) -> int:
        """Tokens for a prompt that has computed `start` and lacks `pending`: 0 to `pending`. What is given is taken."""
        count = self._most(start, pending)
        if count == pending:
            self._left -= count
        elif count or not self._whole:
            self._left = 0
        self._taken += count
        self._positions += positions(start, count)
        return count

    def _most(self, start: int, pending: int) -> int:
        most = min(pending, self._left)
        model = self._model
        if model is None or most <= 0 or (most == pending and self._fits(model, start, most)):
            return max(0, most)
        if self._whole and self._taken:
            return 0
        rows = self._base.decode + self._taken
        low, high = bisect_right(BUCKETS, rows), bisect_right(BUCKETS, rows + most)
        for i in range(high - 1, low - 1, -1):
            if self._fits(model, start, BUCKETS[i] - rows):
                return BUCKETS[i] - rows
        return 0 if self._taken else min(LEAST, most)

    def _fits(self, model: CostModel, start: int, count: int) -> bool:
        base = self._base
        taken = self._taken + count
        work = Work(taken, base.decode, base.positions + self._positions + positions(start, count), base.width + taken)
        return model.predict(work) <= self._seconds
