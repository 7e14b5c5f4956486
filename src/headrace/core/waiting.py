"""Sequences that wait for a slot, in several orders at once: nothing that a step asks depends on how many they are.

    add ──────► ready, by due and by arrival ──remove──► gone
     │           ▲            │
     │      hold is over    paused
     │           │            ▼
     └──────► held, by end   in no order, until it goes on

Rules: the earliest due comes first, or whoever came first if it is not `by_due`; equals stand as they came, and those
that were sent back before all others. Who is held for a fetch comes in when that is here or too late; who is paused
does not. What an order is made of does not change while a sequence waits.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from itertools import islice

from headrace.core.kv import Outside
from headrace.core.sequence import Sequence

LOOKS = 32
"""Sequences beyond those for whom there are places that a plan looks at: so many may wait for others' prefixes, which
takes no place, before somebody behind them is kept waiting for a place that is free."""

_LAST = math.inf


class _Order:
    """Sequences by a key, then by rank. Each is in it once."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, float, Sequence]] = []

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, _, sequence in self._entries)

    def add(self, key: float, rank: int, sequence: Sequence) -> None:
        insort(self._entries, (key, rank, sequence))

    def discard(self, key: float, rank: int) -> None:
        at = bisect_left(self._entries, (key, rank))
        if at < len(self._entries) and self._entries[at][:2] == (key, rank):
            del self._entries[at]

    def until(self, key: float) -> list[Sequence]:
        """Take out those with keys <= `key`."""
        if not self._entries or self._entries[0][0] > key:
            return []
        end = bisect_right(self._entries, (key, _LAST))
        out = [sequence for _, _, sequence in self._entries[:end]]
        del self._entries[:end]
        return out

    def after(self, key: float) -> float | None:
        """The first key > `key`."""
        at = bisect_right(self._entries, (key, _LAST))
        return self._entries[at][0] if at < len(self._entries) else None


class Waiting:
    """All sequences without a slot. Iteration is by rank: as they came, those that were sent back first."""

    def __init__(self, *, by_due: bool) -> None:
        """`by_due`: the earliest due has the next turn, not the first that came."""
        self._by_due = by_due
        self._ranks: dict[Sequence, int] = {}
        self._choices: dict[int, list[Sequence]] = {}
        """rid → its sequences."""
        self._turns, self._arrivals, self._held = _Order(), _Order(), _Order()
        self._first = self._last = 0
        """Ranks that were given."""
        self.fresh_tokens = self.begun_tokens = 0
        """What is to be computed of those that no step has worked on, and of the others; what choices share counts
        once."""

    def __repr__(self) -> str:
        return f"<Waiting [{len(self)} sequences]>"

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted(self._ranks, key=self._ranks.__getitem__))

    @property
    def rids(self) -> set[int]:
        """Their generations."""
        return set(self._choices)

    # Who waits.

    def add(self, sequence: Sequence) -> None:
        """It came after all others."""
        self._last += 1
        self._enter(sequence, self._last)

    def put_back(self, sequence: Sequence) -> None:
        """It was sent back, and stands before all others."""
        self._first -= 1
        self._enter(sequence, self._first)

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer. Raises KeyError if it did not."""
        self._unfile(sequence)
        del self._ranks[sequence]
        choices = self._choices[sequence.generation.rid]
        choices.remove(sequence)
        if not choices:
            del self._choices[sequence.generation.rid]
        self._count(sequence, -1)

    def discard(self, *rids: int) -> None:
        """Remove generations; unknown ones are ignored."""
        for sequence in [sequence for rid in rids for sequence in self._choices.get(rid, ())]:
            self.remove(sequence)

    def pause(self, rid: int, paused: bool) -> None:
        """Skip a generation from now on, or no longer."""
        for sequence in self._choices.get(rid, ()):
            self._unfile(sequence)
            sequence.paused = paused
            self._file(sequence)

    def fetched(self, rid: int, outside: Outside | None) -> None:
        """What a generation was held for is there, or will not come."""
        for sequence in self._choices.get(rid, ()):
            self._unfile(sequence)
            sequence.outside, sequence.hold = outside, 0.0
            self._file(sequence)

    # Whose turn it is.

    def held_until(self, now: float) -> float | None:
        """When the first of those that are held after `now` gives up."""
        return self._held.after(now)

    def oldest(self, now: float) -> tuple[Sequence, ...]:
        """Who came first of those that may start at `now`, if there are any. Its turn may be far away."""
        self._release(now)
        return tuple(islice(self._arrivals, 1))

    def newcomers(self, now: float, places: int, late_places: int, late: Callable[[Sequence], bool]) -> list[Sequence]:
        """Those in their order that may get a place in the plan of `now`: as many as there are places, LOOKS more, in
        case that some are not let in, and always the first one.

        `places`: for anybody; `late_places`: for those that are `late`, who may take the others too.
        """
        waited = any(late(sequence) for sequence in self.oldest(now))
        lates = late_places + LOOKS if waited and late_places > max(0, places) else 0
        anybody = places + LOOKS if places > 0 else 0
        crowd = max(0, places, late_places)
        out: list[Sequence] = []
        unserved = 0
        for sequence in self._turns:
            if lates <= 0 and anybody <= 0 and unserved > crowd:
                break
            is_late = lates > 0 and late(sequence)
            if is_late or anybody > 0 or unserved <= crowd:
                out.append(sequence)
                unserved += not sequence.drawn
            lates -= is_late
            anybody -= 1
        return out

    def _release(self, now: float) -> None:
        """Let those in whose hold is over: a matter of the orders, nobody is changed by it."""
        for sequence in self._held.until(now):
            self._ready(sequence)

    def _enter(self, sequence: Sequence, rank: int) -> None:
        self._ranks[sequence] = rank
        self._choices.setdefault(sequence.generation.rid, []).append(sequence)
        self._count(sequence, 1)
        self._file(sequence)

    def _count(self, sequence: Sequence, sign: int) -> None:
        if sequence.index == 0:
            tokens = sign * (len(sequence.tokens) - sequence.known)
            if sequence.begun:
                self.begun_tokens += tokens
            else:
                self.fresh_tokens += tokens

    def _file(self, sequence: Sequence) -> None:
        if sequence.paused:
            return
        if sequence.hold > 0.0:
            self._held.add(sequence.hold, self._ranks[sequence], sequence)
        else:
            self._ready(sequence)

    def _ready(self, sequence: Sequence) -> None:
        rank = self._ranks[sequence]
        self._turns.add(sequence.due if self._by_due else 0.0, rank, sequence)
        self._arrivals.add(sequence.arrived, rank, sequence)

    def _unfile(self, sequence: Sequence) -> None:
        rank = self._ranks[sequence]
        self._held.discard(sequence.hold, rank)
        self._turns.discard(sequence.due if self._by_due else 0.0, rank)
        self._arrivals.discard(sequence.arrived, rank)
