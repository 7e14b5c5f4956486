"""How long a server takes to its first text, learned from outside.

    seconds ≈ base + rate · bytes,     bytes: those of the prompt that are not cached, and of the prompts before it

Both are fitted to a fading memory of what was observed (weighted least squares on sums that decay), and kept >= 0.
"""

from __future__ import annotations

FADE = 0.95
"""What an observation still counts after the next one."""


class FirstText:
    """One server's. Seconds and bytes."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, size: float, seconds: float) -> None:
        """First text after `seconds` with `size` bytes to compute."""
        self._n = FADE * self._n + 1.0
        self._x = FADE * self._x + size
        self._y = FADE * self._y + seconds
        self._xx = FADE * self._xx + size * size
        self._xy = FADE * self._xy + size * seconds

    def predict(self, size: float) -> float:
        """Seconds; 0 until something was observed."""
        if not self._n:
            return 0.0
        n, mean = self._n, self._y / self._n
        spread = n * self._xx - self._x * self._x
        rate = 0.0
        # Sizes that hardly differ tell nothing of the rate, and much of rounding.
        if spread > 1e-6 * n * self._xx:
            rate = (n * self._xy - self._x * self._y) / spread
        # Not less than nothing a byte; and if the base were negative, all of it is the rate.
        rate = min(max(0.0, rate), self._y / self._x if self._x else 0.0)
        base = mean - rate * self._x / n
        return base + rate * size
