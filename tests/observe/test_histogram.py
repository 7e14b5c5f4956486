from __future__ import annotations

import random

import pytest

from headrace.observe.histogram import Histogram


def test_counts_are_cumulative_and_bounds_belong_to_their_bucket() -> None:
    histogram = Histogram((0.1, 1.0))
    histogram.observe_all([0.05, 0.1, 0.5, 1.0, 2.0])
    assert histogram.buckets() == [("0.1", 2.0), ("1.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == pytest.approx(3.65)
    assert histogram.count == 5


def test_an_empty_one_is_zero() -> None:
    assert Histogram((1.0,)).buckets() == [("1.0", 0.0), ("+Inf", 0.0)]


def test_agrees_with_counting_by_hand() -> None:
    bounds = (0.01, 0.02, 0.5, 1.0, 7.0)
    for seed in range(20):
        draw = random.Random(seed)
        samples = [draw.choice([*bounds, draw.expovariate(2.0)]) for _ in range(draw.randrange(200))]
        histogram = Histogram(bounds)
        histogram.observe_all(samples)
        expected = [float(sum(sample <= bound for sample in samples)) for bound in bounds]
        assert [count for _, count in histogram.buckets()] == [*expected, float(len(samples))]
