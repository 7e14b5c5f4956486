"""When to leave alone what does not answer, and when to try it again."""

from __future__ import annotations


class Breaker:
    """Lets calls through while they succeed. After `limit` failures in a row none for a while, which doubles up to
    `longest` s; then one trial, on which it depends."""

    def __init__(self, limit: int = 1, first: float = 0.5, longest: float = 30.0) -> None:
        self._limit, self._first, self._longest = limit, first, longest
        self._failures = 0
        self._wait = 0.0
        self._until = 0.0
        self._trying = False

    @property
    def open(self) -> bool:
        """Calls are not let through, but for trials."""
        return self._wait > 0

    def ready(self, now: float) -> bool:
        """Would a call be let through?"""
        return not self.open or (not self._trying and now >= self._until)

    def due(self, now: float) -> float:
        """Seconds until a trial is let through; 0: none is waited for, or it is now."""
        return max(0.0, self._until - now) if self.open else 0.0

    def allow(self, now: float) -> bool:
        """May a call be made? Its outcome must be told."""
        allowed = self.ready(now)
        self._trying = self.open and (allowed or self._trying)
        return allowed

    def forget(self) -> None:
        """A call was given up by its caller: it says nothing."""
        self._trying = False

    def success(self) -> None:
        self._failures, self._wait, self._trying = 0, 0.0, False

    def failure(self, now: float) -> None:
        self._trying = False
        self._failures += 1
        if self._failures >= self._limit:
            self._wait = min(self._longest, 2 * self._wait or self._first)
            self._until = now + self._wait
