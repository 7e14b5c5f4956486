"""The queues as they are defined: everybody in them is looked at for every question. And how much a call looks at."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import FrameType
from typing import Any

from headrace.core.admission import Backlog, _Prompt, _whole
from headrace.core.queued import AGEING
from headrace.core.scheduler import Scheduler
from headrace.core.sequence import Sequence


def lines(call: Callable[[], Any]) -> int:
    """Lines of Python that `call` runs; each turn of a loop counts."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class WalkedBacklog(Backlog):
    """Asks every prompt."""

    @property
    def waiting(self) -> int:
        return sum(1 for _ in self._waits())

    def _waits(self) -> Iterator[_Prompt]:
        return (p for p in self._live.values() if p.cached is None)

    def _quiet(self) -> bool:
        live = self._live.values()
        return all(p.reading for p in live) and 2 * sum(p.choices for p in live) <= self.bounds.places

    def _place(self, choices: int, priority: int, now: float) -> float:
        places = self.bounds.places
        holders = [p for p in self._live.values() if p.cached is not None]
        need = choices - places + sum(p.choices for p in holders)
        need += sum(p.choices for p in self._waits() if p.priority <= priority)
        if need <= 0 or not holders or not places or not self._holders:
            return 0.0
        hold = self._held_s / self._holders
        first = hold - max(now - p.begun for p in holders)
        return min(hold / places, max(0.0, first)) + (need - 1) * hold / places

    def _ahead(self, size: float, priority: int, now: float) -> float:
        scale, ahead = self._split()
        own = self._seconds(size)
        for p in self._live.values():
            if p.reading or p.priority > priority:
                continue
            left = self._size(p.tokens, p.reuses, p.shared) if p.cached is None else scale * _whole(p)
            if p.priority < priority or self._seconds(left) - AGEING * (now - p.arrived) <= own:
                ahead += left
        return ahead

    def _split(self) -> tuple[float, float]:
        begun = [p for p in self._live.values() if p.cached is not None]
        whole = sum(_whole(p) for p in begun if not p.reading)
        scale = min(1.0, self._reported / whole) if whole else 0.0
        return scale, max(0.0, self._reported - whole) if begun else 0.0

    def _check(self, prompt: _Prompt, deadline: float | None) -> None:
        """Only what it finds is checked: the limits are in `without_place`."""
        count, tokens, work = self.without_place()
        start = self._queued.seat(self._free())[1]
        assert self._queued.tokens(start) == tokens
        assert abs(self._queued.work(1.0 - self.hit_ratio, start) - work) <= 1e-9 * work
        assert self._queued.seat(self._free())[0] == count
        super()._check(prompt, deadline)

    def _free(self) -> int:
        return self.bounds.places - sum(p.choices for p in self._live.values() if p.cached is not None)

    def without_place(self) -> tuple[int, int, float]:
        """Who waits although all places that are free now are taken: how many, their tokens, their work."""
        free, queued = self._free(), list[_Prompt]()
        for p in self._waits():
            if queued or p.choices > free:
                queued.append(p)
            else:
                free -= p.choices
        return len(queued), sum(p.tokens for p in queued), sum(self._size(p.tokens, p.reuses, p.shared) for p in queued)


class WalkedScheduler(Scheduler):
    """Plans with all that wait."""

    def _in_order(self, running: list[Sequence], batch: int, now: float) -> list[Sequence]:
        waiting = [s for s in self.waiting if not s.paused and now >= s.hold]
        if not self.limits.earliest_deadline:
            return running + waiting
        return sorted(running + waiting, key=attrgetter("due"))
