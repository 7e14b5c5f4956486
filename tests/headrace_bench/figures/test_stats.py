from __future__ import annotations

import numpy as np
import pytest

from headrace_bench.figures.stats import (
    Estimate,
    dispersion,
    effective_n,
    estimate,
    interval_ranks,
    mean,
    median,
    percentile,
    pooled,
    t_quantile,
    wilson,
)


@pytest.mark.parametrize(
    ("values", "p", "expected"),
    [
        ([], 50, None),
        ([7.0], 99, 7.0),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 100, 4.0),
        ([4.0, 1.0, 3.0, 2.0], 99, 4.0),
        ([float(i) for i in range(1, 101)], 95, 95.0),
        ([float(i) for i in range(1, 101)], 99, 99.0),
        ([float(i) for i in range(1, 1002)], 99.9, 1000.0),
        ([float(i) for i in range(1, 1001)], 99.9, 999.0),
        ([1.0, 2.0], 1, 1.0),
    ],
)
def test_a_percentile_is_a_sample(values: list[float], p: float, expected: float | None) -> None:
    assert percentile(values, p) == expected


def test_the_median_is_the_50th_percentile() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 3.0, 1.0, 2.0]) == percentile([4.0, 3.0, 1.0, 2.0], 50) == 2.0
    with pytest.raises(ValueError, match="no samples"):
        median([])


@pytest.mark.parametrize(("p", "fewest"), [(50, 6), (90, 36), (95, 72), (99, 368), (99.9, 3688)])
def test_fewest_samples_that_bound_a_percentile(p: float, fewest: int) -> None:
    assert interval_ranks(fewest - 1, p)[1] is None
    assert interval_ranks(fewest, p)[1] == fewest


@pytest.mark.parametrize(
    ("n", "p", "ranks"),
    [(100, 50, (40, 61)), (100, 90, (84, 96)), (1000, 50, (469, 532)), (100, 99, (97, None)), (0, 50, (None, None))],
)
def test_ranks_of_an_interval(n: int, p: float, ranks: tuple[int | None, int | None]) -> None:
    assert interval_ranks(n, p) == ranks


def test_intervals_hold_what_they_promise() -> None:
    rng = np.random.default_rng(11)
    held = {50: 0, 90: 0, 95: 0}
    true = {p: -np.log(1 - p / 100) for p in held}
    for _ in range(600):
        ordered = np.sort(rng.exponential(size=150))
        for p in held:
            found = estimate(ordered, p)
            assert found is not None
            assert found.low is not None
            assert found.high is not None
            held[p] += found.low <= true[p] <= found.high
    assert all(count >= 0.94 * 600 for count in held.values())


def test_a_99th_percentile_is_blank_below_368_samples() -> None:
    assert estimate(range(367), 99) is None
    assert estimate(range(368), 99) == Estimate(364.0, 359.0, 367.0)
    assert estimate(range(3687), 99.9) is None
    assert estimate([], 50) is None


def test_a_95th_of_few_samples_keeps_its_value_and_loses_its_upper_end() -> None:
    found = estimate(range(1, 51), 95)
    assert found is not None
    assert (found.value, found.high) == (48.0, None)


def test_samples_that_follow_each_other_count_less() -> None:
    rng = np.random.default_rng(5)
    noise = rng.normal(size=4000)
    linked = np.zeros(4000)
    for i in range(1, 4000):
        linked[i] = 0.8 * linked[i - 1] + noise[i]
    assert effective_n(noise) > 3500
    # 4000 · 0.2 / 1.8 = 444; ranks of a normal one are a little less linked.
    assert 350 < effective_n(linked) < 600
    assert effective_n([1.0] * 50) == 50
    assert effective_n([1.0, 2.0, 3.0]) == 3
    wide, narrow = estimate(np.sort(linked), 50, effective_n(linked)), estimate(np.sort(linked), 50)
    assert wide is not None
    assert narrow is not None
    assert wide.low is not None
    assert narrow.low is not None
    assert wide.low < narrow.low


def test_a_mean_and_its_interval() -> None:
    assert mean([]) is None
    assert mean([1.0, 3.0]) == Estimate(2.0)
    found = mean([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert found is not None
    assert found.low is not None
    assert (found.value, found.low) == pytest.approx((3.5, 3.5 - 2.570582 * 1.870829 / 6**0.5), abs=1e-5)


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.706205), (5, 2.570582), (11, 2.200985), (30, 2.042272), (1e6, 1.959966)]
)
def test_student(freedom: float, expected: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(expected, abs=2e-6)


def test_shares() -> None:
    assert wilson(0, 0) is None
    none, half, all_ = wilson(0, 10), wilson(50, 100), wilson(10, 10)
    assert none is not None
    assert half is not None
    assert all_ is not None
    assert (none.low, none.high) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert (half.low, half.high) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    assert (all_.low, all_.high) == pytest.approx((0.72247, 1.0), abs=1e-5)


def test_gaps_of_one_request_are_not_as_many_witnesses() -> None:
    """30 requests whose gaps are all alike tell as much as 30 gaps, not as 3,000."""
    rng = np.random.default_rng(2)
    levels = rng.lognormal(size=30)
    found = pooled([[float(level)] * 100 for level in levels], (50,), np.random.default_rng(1))[50]
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    ordered = np.sort(levels)
    assert found.value == ordered[14]
    assert found.low <= ordered[11]
    assert found.high >= ordered[18]
    assert pooled([[1.0]] * 7, (50,), rng)[50] == Estimate(1.0)
    assert pooled([[], []], (50, 99), rng) == {50: None, 99: None}
    assert pooled([[1.0] * 40] * 9, (99,), rng)[99] is None


def test_dispersion() -> None:
    rng = np.random.default_rng(4)
    poisson = np.cumsum(rng.exponential(0.1, size=20_000)).tolist()
    found = dispersion(poisson, 1.0, 0.0, 1900.0)
    assert found == pytest.approx(1.0, abs=0.12)
    assert dispersion([i / 10 for i in range(100)], 1.0, 0.0, 10.0) == pytest.approx(0.0)
    # All of a window's ten at once, every second window.
    assert dispersion([float(2 * (i // 10)) for i in range(50)], 1.0, 0.0, 10.0) == pytest.approx(250 / 9 / 5)
    assert dispersion(poisson, 60.0, 0.0, 299.0) is None
    assert dispersion([], 1.0, 0.0, 100.0) is None
