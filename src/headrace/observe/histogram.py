"""A histogram that takes a whole list of samples at once.

A response brings all its inter-token gaps at its end; one call and one search a sample keep that off the other streams'
time. Not thread-safe: the event loop owns it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


class Histogram:
    """Counts of samples <= each bound, Prometheus style. Bounds ascend; +Inf is implied."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0
        """Sum of all samples."""

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, sample: float) -> None:
        self._counts[bisect_left(self._bounds, sample)] += 1
        self.total += sample

    def observe_all(self, samples: Iterable[float]) -> None:
        for sample in samples:
            self.observe(sample)

    def buckets(self) -> list[tuple[str, float]]:
        """(bound, samples at or below it) in ascending order, ending with ("+Inf", count)."""
        out: list[tuple[str, float]] = []
        below = 0
        for bound, count in zip((*map(repr, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            below += count
            out.append((bound, float(below)))
        return out
