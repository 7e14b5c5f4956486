from __future__ import annotations

import pytest

from headrace_bench.figures.stats import median, percentile


@pytest.mark.parametrize(
    ("values", "p", "expected"),
    [
        ([], 50, None),
        ([7.0], 99, 7.0),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 100, 4.0),
        ([float(i) for i in range(1, 101)], 95, 95.0),
        ([float(i) for i in range(1, 101)], 99, 99.0),
        ([1.0, 2.0], 1, 1.0),
    ],
)
def test_a_percentile_is_a_sample(values: list[float], p: float, expected: float | None) -> None:
    assert percentile(values, p) == expected


def test_a_median_of_nothing_is_refused() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    with pytest.raises(ValueError, match="no samples"):
        median([])
