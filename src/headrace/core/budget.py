"""How long may the next step be, and how many prompt tokens is that?

    nobody reads              no longer than a newcomer may be kept waiting for the end of a step          guard
    somebody reads            the target for gaps between tokens                                           itl
    … and a prompt has        the most that a gap may be while it waits for its first token                itl_hard
      burnt its fuse
    a crowd of newcomers      what nobody would mind once: it brings them all to their first tokens        stall
      could be finished

Rules: a step always brings some prompt forward. Of the sizes that fit, the one with the most tokens per second is
taken, not the largest: attention in tiles makes 64 rows cheaper than 60, and 128 cheaper than 72, and kernels that take
16 rows at a time make 16 cheaper than 15. Beside readers a size may be longer than the target if it at least doubles
the tokens per second, up to 15 % beyond `itl_hard`. Readers and prompts of a step are computed one after the other, and
steps are filled up to a tile, or to a whole group of rows, with rows that nobody reads, where that is cheaper. Where
nobody reads, a prompt that a step can end within `stall` is not cut if two steps would end later than one. Sizes come
from buckets of rows, decodes included, coarser as they grow, so that large shapes come again. Without a cost model a
step is a fixed number of tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headrace.core.attention import TILE, Attention
from headrace.core.costmodel import GROUP, CostModel, Work, positions

LEAST = 8
"""Prompt tokens that a step computes at least, however deep in the prompt they are."""

DOUBLE = 2.0
"""How many times the tokens per second a step must bring that is longer than the target."""

BEYOND = 1.04
"""Of `itl_hard`: no step beside readers is predicted to take longer for a prompt's sake. Predictions are off by some
percent, and readers are promised 15 %."""

FARTHER, MORE = 1.25, 1.4
"""Where even the least step is longer than a step may be, one of FARTHER times its length is better that brings MORE
times its tokens a second: on two slow cores a 1B model computes 15 tokens in a fifth more time than 8."""

PAYS = 0.9
"""A step is split or padded if it is predicted to take at most this part of the time: predictions are off by some
percent, and rows that nobody reads should not be computed for nothing."""

ALIKE = 0.97
"""A smaller step must bring more than a larger one by this much: the larger one ends sooner what has to be computed."""

EASY = 0.5
"""Of `itl`: steps of readers alone that are shorter leave room for more readers. In virtual time, sixteen users at once
waited 410 ms instead of 500 for their first tokens on a machine with AMX, and 710 instead of 920 on one without."""

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

    def longest(self, reading: int) -> float:
        """The most that an efficient step may take, in seconds."""
        return BEYOND * self.itl_hard if reading else self.guard

    def batch(self, model: CostModel | None, base: Work, least: int, most: int) -> int:
        """Sequences that are computed at the same time: `least`, or up to `most` as long as a step of their next tokens
        takes no more than EASY of `itl`. Whoever waits for a place although there is time for it waits in vain.
        """
        if model is None:
            return least
        read, n = base.positions // max(1, base.decode), least
        while n < most and model.predict(Work(0, n + 1, (n + 1) * read, base.width)) <= EASY * self.itl:
            n += 1
        return n

    def crowd(self, reading: int, finishing: int) -> bool:
        """Are `finishing` newcomers worth one long gap to `reading` readers?"""
        return CROWD * finishing > max(reading, CROWD)

    def seconds(self, reading: int, *, burnt: bool, crowd: bool) -> float:
        """Of a step beside `reading` readers; `burnt`: some prompt is past its fuse."""
        usual = self.itl_hard if reading and burnt else self.itl if reading else self.guard
        return max(usual, self.stall) if crowd else usual


@dataclass(frozen=True, slots=True)
class Size:
    """One way to go on: `count` tokens of a prompt in a step of `seconds`."""

    count: int
    seconds: float

    def rate(self, taken: int) -> float:
        """Prompt tokens a second, with the `taken` ones that the step has already."""
        return (taken + self.count) / self.seconds


@dataclass(frozen=True, slots=True)
class Ways:
    """How a step may be made more efficient. `longest`: seconds that it may take if it is twice as efficient; 0: none.

    `uncut`: seconds that it may take if it ends a prompt sooner than two steps would. `splits`: its readers and its
    prompts may be computed one after the other. `pads`: it may be filled up to a tile or to a whole group of rows.
    """

    longest: float = 0.0
    uncut: float = 0.0
    splits: bool = False
    pads: bool = False


class Room:
    """What is left of one step while its shares are given out."""

    def __init__(
        self,
        model: CostModel | None,
        base: Work,
        *,
        seconds: float,
        tokens: int,
        whole: bool = False,
        ways: Ways = Ways(),
    ) -> None:
        """`base`: what the step computes anyway; `seconds` for all of it; `tokens`: prompt tokens at most.

        `whole`: after the first prompt only such as fit whole: a part of one lengthens the gap of all others and brings
        nobody a token.
        """
        self._whole = whole
        self._model = model
        self._base = base
        late = 1.0 if model is None else model.late
        self._seconds = seconds / late
        self._efficient = ways.longest > 0.0
        self._longest = max(seconds, ways.longest) / late
        self._uncut = ways.uncut / late if self._efficient else 0.0
        self._left = tokens
        attention = Attention(tiled=False) if model is None else model.attention
        self._tiled = attention.tiled
        self._splits = ways.splits and attention.tiled and attention.splits and base.decode > 0
        self._pads = ways.pads and attention.pads
        self._taken = 0
        self._positions = 0

    @property
    def full(self) -> bool:
        """Nothing more fits."""
        return self._left <= 0

    @property
    def work(self) -> Work:
        """The step as it is now, in the arrangement that is predicted to be fastest."""
        return self._arranged(0, 0)[0] if self._taken else self._base

    def finishing(self, newcomers: Iterable[tuple[int, int]]) -> int:
        """How many prompts, each (computed, lacking), in their order, it brings to their ends; it is used up."""
        found = 0
        for start, pending in newcomers:
            if pending > self._left or self._cost(start, pending) > self._seconds:
                break
            self._take(start, pending)
            found += 1
        return found

    def give(self, start: int, pending: int) -> int:
        """Tokens for a prompt that has computed `start` and lacks `pending`: 0 to `pending`. What is given is taken."""
        count = self._most(start, pending)
        self._take(start, count)
        if count < pending and (count or not self._whole):
            self._left = 0
        return count

    def _take(self, start: int, count: int) -> None:
        self._left -= count
        self._taken += count
        self._positions += positions(start, count)

    def _most(self, start: int, pending: int) -> int:
        most = min(pending, self._left)
        if self._model is None or most <= 0:
            return max(0, most)
        if most == pending and self._cost(start, most) <= self._seconds:
            return most
        if self._whole and self._taken:
            return 0
        best = self._best(start, most, self._seconds)
        if self._taken:
            return best.count if best else 0
        if best is None:
            least = min(LEAST, most)
            best = Size(least, self._cost(start, least))
        if self._efficient and max(self._longest, best.seconds) > self._seconds:
            within = best.seconds <= self._longest
            better = self._best(start, most, self._longest if within else FARTHER * best.seconds)
            if better is not None and better.rate(0) >= (DOUBLE if within else MORE) * best.rate(0):
                best = better
        if most == pending and self._ends_sooner(start, most, best):
            return most
        return best.count

    def _ends_sooner(self, start: int, pending: int, cut: Size) -> bool:
        """Is a prompt's end in this step sooner than in the next one, after a step of size `cut`, and soon enough?"""
        if not self._uncut:
            return False
        seconds = self._cost(start, pending)
        rest = Room(self._model, self._base, seconds=0.0, tokens=pending, ways=Ways(pads=self._pads))
        twice = cut.seconds + rest._cost(start + cut.count, pending - cut.count)
        return seconds <= self._uncut and seconds <= ALIKE * twice

    def _best(self, start: int, most: int, seconds: float) -> Size | None:
        """Of the sizes that take at most so many seconds, the one with the most tokens a second."""
        rows = self._base.decode + self._taken
        low, high = bisect_right(BUCKETS, rows), bisect_right(BUCKETS, rows + most)
        counts = [BUCKETS[i] - rows for i in range(low, high)]
        if self._splits:  # the prompts are a batch of their own: whole tiles are these
            counts = sorted({*counts, *range(TILE - self._taken % TILE, most + 1, TILE)})
        best: Size | None = None
        grouped = False
        for count in reversed(counts):
            # Below a tile, however arranged, more rows are more tokens a second, but for those of no whole group.
            if grouped and (rows + count) % GROUP:
                continue
            size = Size(count, self._cost(start, count))
            if size.seconds > seconds:
                continue
            if best is None or ALIKE * size.rate(self._taken) > best.rate(self._taken):
                best = size
            grouped = rows + count < TILE
        return best

    def _cost(self, start: int, count: int) -> float:
        """Seconds of the step with `count` tokens more."""
        return self._arranged(start, count)[1]

    def _arranged(self, start: int, count: int) -> tuple[Work, float]:
        """The step with `count` tokens more, arranged to take the least time, and that time."""
        base, taken = self._base, self._taken + count
        back = base.positions + self._positions + positions(start, count)
        width, model = base.width + taken, self._model
        plain = Work(taken, base.decode, back, width, base.reading)
        if model is None:
            return plain, 0.0
        best, least = plain, model.predict(plain)
        limit = PAYS * least
        for pad, split in self._arrangements(model, taken):
            work = Work(taken, base.decode, back, width, base.reading, pad, split)
            seconds = model.predict(work)
            if seconds <= limit and seconds < least:
                best, least = work, seconds
        return best, least

    def _arrangements(self, model: CostModel, taken: int) -> Iterator[tuple[int, bool]]:
        """What else a step of `taken` prompt tokens could be: (rows that fill it up, whether its readers are apart)."""
        decode, lacking = self._base.decode, TILE - taken
        if self._splits and lacking <= 0:
            yield 0, True
        if not self._pads or not taken:
            return
        if self._tiled and lacking > 0:
            if decode < lacking and decode + taken > 1:
                yield lacking - decode, False
            if self._splits:
                yield lacking, True
        if pad := fill(model, decode + taken):
            yield pad, False
        if self._splits and lacking <= 0 and (pad := fill(model, taken)):
            yield pad, True


def fill(model: CostModel, rows: int) -> int:
    """Rows that fill `rows` up to whole groups, if the engine can do that and it may pay; else 0."""
    over = rows % GROUP if model.attention.pads else 0
    return GROUP - over if over * model.per_loose > (GROUP - over) * model.per_token else 0


def filled(model: CostModel, base: Work) -> Work:
    """A step of readers alone, filled up to a whole group of rows if that pays."""
    pad = fill(model, base.decode)
    if not pad:
        return base
    work = Work(0, base.decode, base.positions, base.width, base.reading, pad)
    return work if model.predict(work) <= PAYS * model.predict(base) else base
