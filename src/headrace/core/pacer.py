"""When the pieces of an answer leave for their reader: in windows of so many tokens, or as an even flow.

    arrive   ▮▮▮▮        ▮▮▮▮        ▮▮▮▮        several at once, as speculation and full networks bring them
    leave    ▮  ▮  ▮  ▮  ▮  ▮  ▮  ▮  ▮  ▮  ▮  ▮   each after what the one before it takes at the measured rate
                      └ added delay ┘ at most `max_delay_s`, for every piece

Rules: a deadline for every piece bounds the delay, never a rate: what would be late leaves early, and as it comes near
the pace rises by a straight line, so that they do not all leave together. The place of the next piece is reserved when
one has left; so the first text waits for nothing, and one that comes later than its place, as in every slow stream,
waits for nothing either. Order is kept. Nothing is kept back at the end: `flush`.

The rate is that of the last half second: tokens and time, both forgotten alike. A pause counts as no more than the
longest delay, because no buffer could hide more of it. The pace is a tenth faster than the rate, so that a delay is
paid back. (The deadline, the tenth and the reservation are those of smooth release in Hugging Face's chat-ui, where
they pace the reader's side.)
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections import deque
from dataclasses import dataclass

from headrace.core.request import Pacing

MEMORY_S = 0.5
"""What the rate remembers: a sample weighs 1/e after that."""
HEADROOM = 1.1
"""Pace over rate."""

_WORD_END = re.compile(r"\S(?=\s)")


@dataclass(frozen=True, slots=True)
class Unit:
    """What leaves in one piece: whole events of a stream."""

    data: bytes
    tokens: float
    """Its share of the answer; 0: no text, so it waits for what is before it and for nothing else."""
    arrived: float


class Pacer:
    """For one answer. `now` in seconds on one clock, never falling."""

    def __init__(self, pacing: Pacing) -> None:
        self._window = 0 if pacing.adaptive else pacing.window
        self._max_delay = pacing.max_delay_s
        self._units: deque[Unit] = deque()
        self._begun = False
        self._place = -math.inf
        """From when on the next piece may leave."""
        self._arrived: float | None = None
        self._tokens = self._seconds = 0.0
        """The rate's two halves."""
        self.size = 0
        """Bytes that are held."""
        self.delays: list[float] = []
        """Seconds that each piece of text was held."""

    def __len__(self) -> int:
        """Pieces that are held."""
        return len(self._units)

    def put(self, data: bytes, tokens: float, now: float) -> None:
        """One piece arrives."""
        self._units.append(Unit(data, tokens, now))
        self.size += len(data)
        if tokens > 0:
            self._measure(tokens, now)

    def take(self, now: float) -> list[Unit]:
        """What leaves at `now`."""
        out: list[Unit] = []
        while self._units and self._due() <= now:
            place = self._place
            for _ in range(self._together()):
                unit = self._leave(now)
                out.append(unit)
            if unit.tokens > 0 and not self._window:
                # A timer that was late must not slow the flow down: what waited for its place counts from there.
                base = place if unit.arrived <= place <= now else now
                self._place = base + unit.tokens * self._spacing(base, unit.tokens)
        return out

    def flush(self, now: float) -> list[Unit]:
        """Everything."""
        return [self._leave(now) for _ in range(len(self._units))]

    @property
    def due(self) -> float | None:
        """When to `take` again; None: not before something arrives."""
        return self._due() if self._units else None

    def summary(self) -> tuple[float, float] | None:
        """The mean and the longest delay in seconds; None without text."""
        delays = self.delays
        return (sum(delays) / len(delays), max(delays)) if delays else None

    def _due(self) -> float:
        """There is something."""
        first = self._units[0]
        if first.tokens == 0 or not self._begun:
            return first.arrived
        if self._window:
            full = sum(unit.tokens for unit in self._units) >= self._window
            return first.arrived if full else first.arrived + self._max_delay
        return min(max(self._place, first.arrived), first.arrived + self._max_delay)

    def _together(self) -> int:
        """How many leave with the first one."""
        return len(self._units) if self._window and self._begun else 1

    def _leave(self, now: float) -> Unit:
        unit = self._units.popleft()
        self.size -= len(unit.data)
        if unit.tokens > 0:
            self._begun = True
            self.delays.append(now - unit.arrived)
        return unit

    def _measure(self, tokens: float, now: float) -> None:
        if self._arrived is not None:
            gap = min(now - self._arrived, self._max_delay)
            kept = math.exp(-gap / MEMORY_S)
            self._tokens = self._tokens * kept + tokens
            self._seconds = self._seconds * kept + gap
        self._arrived = now

    def _spacing(self, now: float, before: float) -> float:
        """Seconds a token, after `before` tokens have left: the pace, or faster, so that each that waits is in time."""
        if self._seconds <= 0.0:
            return 0.0
        spacing = self._seconds / (self._tokens * HEADROOM)
        for unit in self._units:
            spacing = min(spacing, (unit.arrived + self._max_delay - now) / before)
            before += unit.tokens
        return max(0.0, spacing)


def split(text: str, parts: int) -> list[str]:
    """`text` in at most `parts` pieces of about as many words; where there are no words, of characters.

    A word of ASCII stays whole, and so does what is shown as one character.
    """
    cuts = [match.end() for match in _WORD_END.finditer(text)]
    if not cuts and not text.isascii():
        cuts = [i for i in range(1, len(text)) if _apart(text[i - 1], text[i])]
    parts = min(parts, len(cuts) + 1)
    chosen = [0, *(cuts[part * (len(cuts) + 1) // parts - 1] for part in range(1, parts)), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(chosen)]


def _apart(left: str, right: str) -> bool:
    """Whether the two are shown as two: marks, joiners and modifiers belong to what is before them."""
    return unicodedata.category(right)[0] != "M" and not {
        unicodedata.category(left),
        unicodedata.category(right),
    } & {"Cf", "Sk"}
