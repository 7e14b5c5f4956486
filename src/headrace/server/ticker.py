"""One clock for all open streams: it looks at each before something is due there, and lets it act.

    slot   k ─▶ [ s4 s9 ]       a tick an interval: those in its slot are looked at, and say when to look again
         k+1 ─▶ [ s2 ]
        k+60 ─▶ [ s1 s3 … ]     most only wait, and are not touched until their next heartbeat

Streams must not arm a timer a token, and an idle server must not wake at all: the ticker runs while it has streams, and
not otherwise. Ten thousand streams must cost the others nothing: to look at all of them four times a second took 8 % of
a core and, by what it drove out of the caches, half a millisecond of everybody's TTFT. So a stream is looked at when it
said, and no turn takes long. The ticker knows how late each of its own ticks was, which is how late every other
callback on the loop is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from headrace.core.clock import Clock

INTERVAL_S = 0.25
AT_ONCE = 256
"""Members a turn: a look takes a few µs, a heartbeat that it writes 20 µs."""
TURN_S = 0.001
"""A turn that took this long leaves the rest to the next one, which comes after everybody else's."""
CHECKED = 8
"""Members between two looks at the clock."""
GRAIN_S = 0.001
"""The loop's timers are that coarse: one that came too soon would find nothing due, and be armed again and again."""
FAR_S = 60.0
"""Everybody is looked at this often."""
_LOOKED_AT = -1


class Ticking(Protocol):
    """What can be looked at. Hashable by identity."""

    def tick(self, now: float) -> float | None:
        """`now` in s on the ticker's clock. Does not block and does not raise.

        The time by which to look again, which will be at most an interval earlier; None: at the next tick. Whatever
        may happen before that must not bring anything due sooner.
        """
        ...


class Ticker:
    """Calls `tick` of everything added, when each wants it, `interval` s after it came for the first time. `lag` takes
    the seconds that a tick came late."""

    def __init__(self, clock: Clock, *, lag: Callable[[float], None], interval: float = INTERVAL_S) -> None:
        self.interval = interval
        self._clock = clock
        self._lag = lag
        self._slots: dict[int, dict[Ticking, None]] = {}
        """Slot → its members; slot k is due at k intervals."""
        self._where: dict[Ticking, int] = {}
        """Member → slot."""
        self._slot = 0
        """The first that is not done."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._where)

    @property
    def running(self) -> bool:
        return self._timer is not None

    def add(self, member: Ticking) -> None:
        if member in self._where:
            return
        now = self._clock()
        slot = int(now / self.interval) + 1
        if self._timer is None:
            self._slot = slot
            self._arm(now, slot * self.interval)
        self._put(member, slot)

    def remove(self, member: Ticking) -> None:
        """Unknown members are ignored."""
        slot = self._where.pop(member, None)
        if slot is None:
            return
        members = self._slots.get(slot)
        if members is not None:
            members.pop(member, None)
        if not self._where and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._slots.clear()

    def tick(self, now: float) -> None:
        """Look at all members once."""
        for member in tuple(self._where):
            member.tick(now)

    def _put(self, member: Ticking, slot: int) -> None:
        self._where[member] = slot
        self._slots.setdefault(slot, {})[member] = None

    def _arm(self, now: float, due: float) -> None:
        delay = due - now + GRAIN_S if due > now else 0.0
        self._timer = asyncio.get_running_loop().call_later(delay, self._fire, now + delay)

    def _fire(self, due: float) -> None:
        fired, now = self._timer, self._clock()
        self._lag(max(0.0, now - due))
        done = self._turn(now)
        if fired is not None and self._timer is fired:  # not stopped, and not started anew, by a member
            fired.cancel()
            now = self._clock()
            self._arm(now, self._slot * self.interval if done else now)

    def _turn(self, now: float) -> bool:
        """Look at those that are due, for a short while; were those all? They may leave, and others come."""
        current, until, count = int(now / self.interval), now + TURN_S, 0
        while (slot := self._slot) <= current:
            members = self._slots.get(slot)
            while members:
                if count == AT_ONCE or (count and not count % CHECKED and self._clock() > until):
                    return False
                count += 1
                member, _ = members.popitem()
                self._where[member] = _LOOKED_AT
                again = member.tick(now)
                if self._where.get(member) == _LOOKED_AT:
                    due = 0.0 if again is None else min(again, now + FAR_S)
                    self._put(member, max(current + 1, int(due / self.interval)))
            if self._slot == slot:  # or else it was stopped and began anew
                self._slots.pop(slot, None)
                self._slot += 1
        return True
