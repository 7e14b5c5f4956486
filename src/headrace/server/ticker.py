"""One clock for all open streams: it looks at each a few times a second and lets it act on what is due.

    next ─▶ [ s1 s2 s3 … sn ] ─▶ a look at a few of them, which then go to the end; all of them once an interval
              └─────◀─────┘

Streams must not arm a timer a token, and an idle server must not wake at all: the ticker runs while it has streams, and
not otherwise. Ten thousand streams are not looked at in one go, because everybody's tokens would wait for that: the
looks are spread over the interval, and no turn takes long. It knows how late each of its own ticks was, which is how
late every other callback on the loop is.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from headrace.core.clock import Clock

INTERVAL_S = 0.25
AT_ONCE = 256
"""Members a turn: a look takes under 1 µs, a heartbeat that it writes 20 µs."""
TURN_S = 0.001
"""A turn that took this long leaves the rest to the next one, which comes after everybody else's."""
CHECKED = 8
"""Members between two looks at the clock."""


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
        self._members: OrderedDict[Ticking, None] = OrderedDict()
        """The one that is looked at next comes first."""
        self._turned = 0.0
        """When the last turn was."""
        self._left = 0
        """Members of whom a look is overdue."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._members)

    @property
    def running(self) -> bool:
        return self._timer is not None

    def add(self, member: Ticking) -> None:
        self._members[member] = None
        if self._timer is None:
            self._turned = self._clock()
            self._arm(self._turned)

    def remove(self, member: Ticking) -> None:
        """Unknown members are ignored."""
        self._members.pop(member, None)
        if not self._members and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left = 0

    def tick(self, now: float) -> None:
        """Look at all members once."""
        for member in tuple(self._members):
            member.tick(now)

    def _arm(self, now: float) -> None:
        """The next turn: at once if this one left something over, or else when a few looks are due."""
        delay = 0.0 if self._left else self.interval / max(1, math.ceil(len(self._members) / AT_ONCE))
        self._timer = asyncio.get_running_loop().call_later(delay, self._fire, now + delay)

    def _fire(self, due: float) -> None:
        fired, now = self._timer, self._clock()
        self._lag(max(0.0, now - due))
        members = self._members
        share = math.ceil(len(members) * (now - self._turned) / self.interval)
        self._left = min(len(members), max(1, self._left + share))
        self._turned = now
        self._turn(now)
        if fired is not None and self._timer is fired:  # not stopped, and not started anew, by a member
            fired.cancel()
            self._arm(self._clock())

    def _turn(self, now: float) -> None:
        """Look at those that are due, for a short while. They may leave, and others come."""
        members, until = self._members, now + TURN_S
        for count in range(1, min(self._left, AT_ONCE) + 1):
            if not members:
                return
            member = next(iter(members))
            members.move_to_end(member)
            self._left -= 1
            member.tick(now)
            if not count % CHECKED and self._clock() > until:
                return
