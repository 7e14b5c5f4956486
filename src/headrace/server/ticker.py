"""One clock for all open streams: it looks at each a few times a second and lets it act on what is due.

Streams must not arm a timer a token, and an idle server must not wake at all: the ticker runs while it has streams, and
not otherwise. It knows how late each of its own ticks was, which is how late every other callback on the loop is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from headrace.core.clock import Clock

INTERVAL_S = 0.25


class Ticking(Protocol):
    """What can be looked at. Hashable by identity."""

    def tick(self, now: float) -> None:
        """`now` in s on the ticker's clock. Does not block and does not raise."""
        ...


class Ticker:
    """Calls `tick` of everything added, every `interval` s. `lag` takes the seconds that a tick came late."""

    def __init__(self, clock: Clock, *, lag: Callable[[float], None], interval: float = INTERVAL_S) -> None:
        self.interval = interval
        self._clock = clock
        self._lag = lag
        self._members: dict[Ticking, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._members)

    @property
    def running(self) -> bool:
        return self._timer is not None

    def add(self, member: Ticking) -> None:
        self._members[member] = None
        if self._timer is None:
            self._arm()

    def remove(self, member: Ticking) -> None:
        """Unknown members are ignored."""
        self._members.pop(member, None)
        if not self._members and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def tick(self, now: float) -> None:
        """Look at all members once."""
        for member in tuple(self._members):
            member.tick(now)

    def _arm(self) -> None:
        due = self._clock() + self.interval
        self._timer = asyncio.get_running_loop().call_later(self.interval, self._fire, due)

    def _fire(self, due: float) -> None:
        now = self._clock()
        self._lag(max(0.0, now - due))
        self._arm()
        self.tick(now)
