"""How well an engine is, from what became of its requests and from probes.

    first_text, end ──▶ Breaker ── open: nothing but one trial at a time
    probed ─────────▶ down ─────── until a probe succeeds
    first_text ─────▶ ttft ─────── a moving average, for engines that cannot predict

Rules: an attempt that failed or was slow counts against its engine, one that was refused or cancelled says nothing.
While the breaker is open only the trial's outcome counts: whatever else still runs began before.
"""

from __future__ import annotations

import math

from headrace.core.breaker import Breaker
from headrace.gateway.backend import End

FAILURES = 3
"""In a row, until the breaker opens."""
FIRST_S = 1.0
LONGEST_S = 30.0
WEIGHT = 0.2
"""Of a new time to the first text in the average."""
STALE_S = 30.0
"""An average without a new figure for that long counts as unknown: else an engine that was slow once is never asked
again."""


class Health:
    """Of one engine, from its load on."""

    def __init__(self) -> None:
        self._breaker = Breaker(FAILURES, FIRST_S, LONGEST_S)
        self._ttft = 0.0
        self._measured = -math.inf
        self.in_flight = 0
        self.down = ""
        """Why the last probe failed, "" if it did not."""
        self.reason = ""
        """What its breaker opened for."""

    @property
    def open(self) -> bool:
        """It gets nothing but trials."""
        return self._breaker.open

    def ready(self, now: float) -> bool:
        """It may be tried: it is well, or a trial is due."""
        return self._breaker.ready(now)

    def retry_after(self, now: float) -> float:
        """Seconds until a trial is due, 0 if it may be tried now."""
        return self._breaker.due(now)

    def ttft(self, now: float) -> float:
        """Seconds to the first text, of late; 0: not known."""
        return self._ttft if now - self._measured <= STALE_S else 0.0

    def begin(self, now: float) -> bool:
        """An attempt begins; is it the trial?"""
        self.in_flight += 1
        was_open = self._breaker.open
        return self._breaker.allow(now) and was_open

    def first_text(self, seconds: float, now: float, *, trial: bool) -> None:
        """`seconds` after its submit."""
        self._ttft = self._ttft + WEIGHT * (seconds - self._ttft) if self.ttft(now) else seconds
        self._measured = now
        if trial:
            # Its end may be minutes away, and nobody else gets in before.
            self._mend()

    def end(self, end: End, now: float, *, trial: bool) -> None:
        """An attempt is over."""
        self.in_flight -= 1
        counts = trial or not self._breaker.open
        if end in ("failed", "slow"):
            if counts:
                self._fail("it gave no text in time" if end == "slow" else "its requests failed", now)
        elif end == "ok":
            if counts:
                self._mend()
        elif trial:
            self._breaker.forget()

    def probed(self, failure: str) -> None:
        """A probe came back: why it failed, "" if it did not."""
        if self.down and not failure:
            # It was away and is back: what failed in between says nothing of now.
            self._mend()
        self.down = failure

    def _fail(self, reason: str, now: float) -> None:
        self._breaker.failure(now)
        if self._breaker.open:
            self.reason = reason

    def _mend(self) -> None:
        self._breaker.success()
        self.reason = ""
