from __future__ import annotations

import random

import pytest

from headrace_bench.figures.histogram import Histogram
from headrace_bench.figures.stats import percentile


def test_merged_histograms_are_one_of_all() -> None:
    rng = random.Random(3)
    values = [rng.lognormvariate(-2, 1) for _ in range(5000)]
    merged = Histogram(values[:1000])
    merged.merge(Histogram.decode(Histogram(values[1000:]).encode()))
    assert len(merged) == 5000
    for p in (1, 50, 90, 99, 99.9, 100):
        assert merged.percentile(p) == pytest.approx(percentile(values, p), rel=2e-3)


def test_nothing_has_no_percentile() -> None:
    assert Histogram().percentile(50) is None
    assert len(Histogram.decode(Histogram().encode())) == 0


def test_ends() -> None:
    histogram = Histogram([0.0, 1e-6, 1e6])
    assert histogram.percentile(1) == 0.0
    assert histogram.percentile(100) == pytest.approx(3600, rel=1e-3)


@pytest.mark.parametrize("wrong", [-0.001, float("nan")])
def test_clocks_do_not_run_backwards(wrong: float) -> None:
    with pytest.raises(ValueError, match="a duration of"):
        Histogram([wrong])


@pytest.mark.parametrize("text", ["", "zz", "HISTzzzz", "é"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a histogram"):
        Histogram.decode(text)
