"""Does the worker hang, or has it only nothing to say?

    heard ──────── timeout ────────► ping ──────── timeout ────────► kill
      ▲                                │ any sign
      └────────────────────────────────┘

Rules: only a worker with work is watched. One whose readers are all slow computes nothing and is silent, yet it answers
a ping; one whose step never ends does not. Pure: `now` is an argument, in s.
"""

from __future__ import annotations

from enum import Enum, auto


class Verdict(Enum):
    """What to do about the worker."""

    REST = auto()
    PING = auto()
    KILL = auto()


class Watchdog:
    """`timeout`: seconds of silence before the ping, and again after it."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._heard = 0.0
        self._pinged: float | None = None

    def __repr__(self) -> str:
        return f"<Watchdog [{self.timeout:g} s, {'pinged' if self._pinged is not None else 'quiet'}]>"

    def heard(self, now: float) -> None:
        """A sign of life, or the beginning of work."""
        self._heard = now
        self._pinged = None

    def look(self, now: float, busy: bool) -> tuple[Verdict, float]:
        """What to do, and in how many seconds (> 0) to look again. `busy`: streams are live."""
        if not busy:
            self.heard(now)
        since = self._heard if self._pinged is None else self._pinged
        left = since + self.timeout - now
        if left > 0:
            return Verdict.REST, left
        if self._pinged is not None:
            return Verdict.KILL, self.timeout
        self._pinged = now
        return Verdict.PING, self.timeout
