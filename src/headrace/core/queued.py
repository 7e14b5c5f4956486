"""Prompts that no step has worked on, in columns: a question about ten thousand of them takes microseconds.

    row        0      1      2      3        in order of arrival
    tokens     1000   0      300    64       who has left is a hole; a table that is mostly holes is packed
    arrived    0.1    0      0.3    0.9
    …

Rule: who goes before a newcomer depends on what each prompt has (its size, its arrival) and on what changes with every
step (the hit ratio, the engine's speed, now). So no order of the rows stays right, and each question looks at all of
them, but in C.
Pure: no clock, no I/O. Times in s, sizes in tokens.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray

AGEING = 0.25
"""Seconds of work by which a prompt moves forward for each second that it waits. As the scheduler orders them."""

FIRST = 64
"""Rows to begin with, and holes that are not worth packing."""

_ARRIVED, _TOKENS, _MOST, _LEAST, _PRIORITY = range(5)
_HOLE = (0.0, 0.0, 0.0, 0.0, math.inf)


class Queued:
    """Table of what waits. Of a prompt max(least, min(tokens · missing, most)) tokens will have to be computed, where
    `missing` is the share of prompts that is not cached."""

    def __init__(self) -> None:
        self._table = np.empty((len(_HOLE), FIRST))
        self._rows: dict[int, int] = {}
        """rid → row."""
        self._choices: list[int] = []
        """Of each row; 0: a hole."""
        self._front = 0
        """Before this row there are only holes."""
        self._wanted: Counter[int] = Counter()
        """Priority → choices."""

    def __repr__(self) -> str:
        return f"<Queued [{len(self)} in {len(self._choices)} rows]>"

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self, rid: int, arrived: float, tokens: int, *, most: float, least: float, priority: int, choices: int
    ) -> None:
        """Take on a prompt that came after all others. It is not there yet; `choices` >= 1."""
        row = len(self._choices)
        if row == self._table.shape[1]:
            self._table = np.concatenate((self._table, np.empty_like(self._table)), axis=1)
        self._table[:, row] = arrived, tokens, most, least, priority
        self._rows[rid] = row
        self._choices.append(choices)
        self._wanted[priority] += choices

    def remove(self, rid: int, priority: int) -> None:
        """It has begun, or is over; `priority` as it came."""
        row = self._rows.pop(rid)
        self._wanted[priority] -= self._choices[row]
        self._choices[row] = 0
        self._table[:, row] = _HOLE
        end = len(self._choices)
        while self._front < end and not self._choices[self._front]:
            self._front += 1
        if end - len(self) > FIRST + len(self):
            self._pack()

    def pass_over(self, rid: int) -> None:
        """It goes before nobody any more, but still counts as one that waits."""
        self._table[_PRIORITY, self._rows[rid]] = math.inf

    def choices(self, priority: int) -> int:
        """Places that those of this priority, or of a more urgent one, will take."""
        return sum(choices for level, choices in self._wanted.items() if level <= priority)

    def work(self, missing: float, start: int = 0) -> float:
        """Tokens that will have to be computed, of those from row `start` on."""
        return float(self._sizes(self._table[:, start : len(self._choices)], missing).sum())

    def tokens(self, start: int = 0) -> int:
        """Prompt tokens of those from row `start` on."""
        return int(self._table[_TOKENS, start : len(self._choices)].sum())

    def ahead(
        self, own: float, priority: int, now: float, *, missing: float, prefill_s: float, prefill_share: float
    ) -> float:
        """Tokens that are computed before a prompt that comes now and takes `own` s: all of a more urgent priority, and
        of its own those with less work left, where each second of waiting counts as AGEING seconds of work done.

        A token takes `prefill_s` / `prefill_share` s.
        """
        if not self._rows:
            return 0.0
        rows = self._table[:, self._front : len(self._choices)]
        sizes, priorities = self._sizes(rows, missing), rows[_PRIORITY]
        before = sizes * prefill_s / prefill_share - AGEING * (now - rows[_ARRIVED]) <= own
        before &= priorities == priority
        before |= priorities < priority
        return float(sizes[before].sum())

    def seat(self, free: int) -> tuple[int, int, int]:
        """Give places to those at the front, until one finds too few: (how many have none, the row of the first of
        them, places that are left). Nobody passes who waits for several."""
        placed, row, end = 0, self._front, len(self._choices)
        while row < end and self._choices[row] <= max(0, free):
            free -= self._choices[row]
            placed += self._choices[row] > 0
            row += 1
        return len(self) - placed, row, free

    @staticmethod
    def _sizes(rows: NDArray[np.float64], missing: float) -> NDArray[np.float64]:
        """What will have to be computed of each; 0 for a hole."""
        sizes: NDArray[np.float64] = rows[_TOKENS] * missing
        np.minimum(sizes, rows[_MOST], out=sizes)
        np.maximum(sizes, rows[_LEAST], out=sizes)
        return sizes

    def _pack(self) -> None:
        """Leave the holes out."""
        kept = [row for row, choices in enumerate(self._choices) if choices]
        table = np.empty((len(_HOLE), max(FIRST, 2 * len(kept))))
        table[:, : len(kept)] = self._table[:, kept]
        self._table = table
        self._choices = [self._choices[row] for row in kept]
        self._rows = {rid: row for row, rid in enumerate(self._rows)}
        self._front = 0
