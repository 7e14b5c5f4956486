"""Figures from samples, and how sure they are.

One method for every percentile in every report: nearest rank. The p-th percentile of n samples is the one with rank
ceil(p/100 · n), so it is always a sample, and never one interpolated towards a better neighbour: of 1, 2, 3, 4 the
50th is 2, the 99th 4.

    rank        1 ······ l ········ r ········ u ······ n        r: the percentile, l and u: its 95 % interval,
                         └── 95 % of the time the ──┘            by the binomial count of samples below the true one
                             true one lies in here

Rules: nothing of nothing is None, never 0; a p99 below 368 samples and a p99.9 below 3688 are blank, for no sample
bounds them from above; lower percentiles keep their value and lose the end of their interval; requests of one run
resemble their neighbours, so an interval counts fewer of them than there are (`effective_n`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

ALPHA = 0.05
BLANK_BELOW = {99.0: 368, 99.9: 3688}
"""Fewest samples with which these are shown at all."""
MIN_WINDOWS = 5


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval; an end that the samples cannot give is None."""

    value: float
    low: float | None = None
    high: float | None = None


def rank(n: int, p: float) -> int:
    """Of the p-th percentile (0 < p <= 100) among n >= 1 sorted samples, from 1."""
    return min(n, max(1, math.ceil(round(p * n / 100, 9))))


def percentile(values: Sequence[float], p: float) -> float | None:
    """The p-th percentile (0 < p <= 100) by nearest rank; None of nothing."""
    return sorted(values)[rank(len(values), p) - 1] if len(values) else None


def median(values: Sequence[float]) -> float:
    """The 50th percentile, so the lower of two in the middle. ValueError for none."""
    if not values:
        raise ValueError("the median of no samples")
    return sorted(values)[rank(len(values), 50) - 1]


@lru_cache(maxsize=4096)
def interval_ranks(n: int, p: float, alpha: float = ALPHA) -> tuple[int | None, int | None]:
    """Ranks (from 1) of the samples between which the true p-th percentile lies, with 1 - alpha and no assumed shape.

    The count of samples below it is binomial (n, p/100). The upper rank exists from 6 samples for p50, 36 for p90, 72
    for p95, 368 for p99 and 3688 for p99.9.
    """
    if n < 1:
        return None, None
    share = p / 100
    k = np.arange(1, n + 1)
    steps = np.log((n - k + 1) / k) + math.log(share / (1 - share))
    pmf = np.exp(n * math.log1p(-share) + np.concatenate(([0.0], np.cumsum(steps))))
    below = np.cumsum(pmf)  # below[j] = P(count <= j)
    above = np.cumsum(pmf[::-1])[::-1]  # above[j] = P(count >= j)
    low = int(np.searchsorted(below, alpha / 2, side="right"))
    enough = np.nonzero(above <= alpha / 2)[0]
    return low or None, int(enough[0]) if len(enough) else None


def effective_n(values: Sequence[float] | Array) -> float:
    """How many independent samples tell as much as these, which stand in the order of time: n (1 - r) / (1 + r).

    r is the lag-1 autocorrelation of their ranks, for a few slow requests must not decide it; what is within
    the noise of independent samples counts as 0. The formula is that of a first-order autoregression.
    """
    n = len(values)
    if n < 4:
        return float(n)
    ranks = np.argsort(np.argsort(np.asarray(values), kind="stable"), kind="stable").astype(float)
    if np.ptp(np.asarray(values)) == 0:
        return float(n)
    centred = ranks - ranks.mean()
    r = float(np.dot(centred[1:], centred[:-1]) / np.dot(centred, centred))
    # A lag-1 autocorrelation has this much noise; less is no sign of a memory.
    r = 0.0 if r < 1.645 / math.sqrt(n) else min(r, 0.99)
    return max(1.0, n * (1 - r) / (1 + r))


def estimate(ordered: Sequence[float] | Array, p: float, n_eff: float | None = None) -> Estimate | None:
    """The p-th percentile of sorted samples with its interval; None for none, and where `BLANK_BELOW` says so.

    `n_eff` narrows what the interval may count on: its ranks are those of so many samples, stretched over all.
    """
    n = len(ordered)
    if n == 0 or n < BLANK_BELOW.get(p, 0):
        return None
    counted = max(1, min(n, int(n if n_eff is None else n_eff)))
    low, high = interval_ranks(counted, p)
    stretch = n / counted
    return Estimate(
        value=float(ordered[rank(n, p) - 1]),
        low=None if low is None else float(ordered[max(1, math.floor(low * stretch)) - 1]),
        high=None if high is None else float(ordered[min(n, math.ceil(high * stretch)) - 1]),
    )


def mean(values: Sequence[float] | Array, n_eff: float | None = None) -> Estimate | None:
    """The mean with its t interval on `n_eff` samples; without an interval below 6."""
    n = len(values)
    if n == 0:
        return None
    array = np.asarray(values, dtype=float)
    value = float(array.mean())
    counted = n if n_eff is None else min(float(n), n_eff)
    if n < 6 or counted < 2:
        return Estimate(value)
    half = t_quantile(1 - ALPHA / 2, counted - 1) * float(array.std(ddof=1)) / math.sqrt(counted)
    return Estimate(value, value - half, value + half)


def wilson(good: int, n: int, z: float = 1.959964) -> Estimate | None:
    """The share good/n with Wilson's score interval, which holds at 0 and 1 too; None of none."""
    if n == 0:
        return None
    share = good / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Estimate(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))


def pooled(
    groups: Sequence[Sequence[float]], percentiles: Sequence[float], rng: np.random.Generator, resamples: int = 1000
) -> dict[float, Estimate | None]:
    """Percentiles of all samples of all groups, with intervals in which the unit is the group.

    Groups are requests in the order of time, samples their gaps: gaps of one request share its fate. Blocks of n^(1/3)
    neighbouring groups are drawn with replacement, round a circle; fewer resamples, down to 200, of very many gaps. No
    interval below 8 groups that have samples.
    """
    filled = [np.asarray(group, dtype=float) for group in groups if len(group)]
    if not filled:
        return dict.fromkeys(percentiles)
    values = np.concatenate(filled)
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    owner = np.repeat(np.arange(len(filled)), [len(group) for group in filled])[order]
    shown = [p for p in percentiles if len(values) >= BLANK_BELOW.get(p, 0)]
    found = {p: Estimate(float(ordered[rank(len(values), p) - 1])) for p in shown}
    if len(filled) >= 8:
        resamples = int(min(resamples, max(200, 2e8 // len(values))))
        drawn = np.array([_resampled(ordered, owner, shown, len(filled), rng) for _ in range(resamples)])
        for column, p in enumerate(shown):
            low, high = (percentile(drawn[:, column].tolist(), q) for q in (2.5, 97.5))
            value = found[p].value
            found[p] = Estimate(
                value, None if low is None else min(low, value), None if high is None else max(high, value)
            )
    return {p: found.get(p) for p in percentiles}


def _resampled(
    ordered: Array,
    owner: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    ps: Sequence[float],
    n: int,
    rng: np.random.Generator,
) -> list[float]:
    """Percentiles of one draw of blocks: the samples stay sorted, only how often each counts is drawn."""
    block = max(1, round(n ** (1 / 3)))
    starts = rng.integers(0, n, size=-(-n // block))
    chosen = ((starts[:, None] + np.arange(block)) % n).ravel()[:n]
    times = np.cumsum(np.bincount(chosen, minlength=n)[owner])
    ranks = [rank(int(times[-1]), p) for p in ps]
    return [float(ordered[i]) for i in np.searchsorted(times, ranks)]


def dispersion(times: Sequence[float], window: float, start: float, end: float) -> float | None:
    """Index of dispersion for counts: variance over mean of the arrivals in windows of so many seconds; 1 is Poisson.

    Over whole windows from `start`; None for fewer than 5 of them, and without arrivals.
    """
    windows = int((end - start) / window + 1e-9)
    if windows < MIN_WINDOWS:
        return None
    inside = np.asarray([t for t in times if start <= t < start + windows * window], dtype=float)
    if len(inside) == 0:
        return None
    counts = np.bincount(np.minimum(((inside - start) / window).astype(int), windows - 1), minlength=windows)
    return float(counts.var(ddof=1) / counts.mean())


@lru_cache(maxsize=4096)
def t_quantile(q: float, freedom: float) -> float:
    """The q-quantile (0.5 <= q < 1) of Student's t, by halving, to 1e-10."""
    low, high = 0.0, 1.0
    while _t_below(high, freedom) < q:
        low, high = high, high * 2
    while high - low > 1e-10 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, freedom) < q else (low, middle)
    return (low + high) / 2


def _t_below(t: float, freedom: float) -> float:
    """P(T <= t) for t >= 0, by the regularised incomplete beta function."""
    return 1 - 0.5 * _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b), by its continued fraction (DLMF 8.17.22), from the side where it converges fast."""
    if x <= 0 or x >= 1:
        return min(1.0, max(0.0, x))
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    fraction = 1.0
    for m in range(200, 0, -1):
        odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        fraction = 1 + odd / (1 + even / fraction)
    return front / (a * fraction)
