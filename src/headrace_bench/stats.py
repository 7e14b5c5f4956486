"""Figures from samples. A percentile is a sample, by rank, never interpolated downwards; of nothing it is None."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(values: Sequence[float], p: float) -> float | None:
    """The p-th percentile (0 < p <= 100) by nearest rank."""
    if not values:
        return None
    ordered = sorted(values)
    rank = -(-int(p * len(ordered)) // 100)
    return ordered[min(len(ordered), max(1, rank)) - 1]


def median(values: Sequence[float]) -> float:
    """The middle sample, the upper of two. ValueError for none."""
    if not values:
        raise ValueError("the median of no samples")
    return sorted(values)[len(values) // 2]
