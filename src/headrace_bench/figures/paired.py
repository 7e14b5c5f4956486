"""Is B better than A? Decided on pairs of runs, never on pooled requests.

    pair 1  a b ─ log(b/a) ┐
    pair 2  b a ─ log(b/a) ├─ middle: Hodges-Lehmann, the median of all means of two ── effect, interval, p
    …                      ┘
    A/A     a a ─ log(a/a) ── the same middle, drawn again and again ── floor: how far it strays with nothing to find

Rules: a pair is two runs of one schedule close in time, in random order, and a new schedule each pair; a difference is
claimed only if the interval excludes it being none, the sign-flip test agrees, and it is larger than the A/A floor;
below 6 pairs nothing is claimed; of several figures one is named primary beforehand, the others pay for their number
(Holm).

The p-value is Wilcoxon's, exact: under no difference every log ratio is as likely with the other sign, which random
order makes true whatever the noise, its tails or its drift. The interval is the wider, at each end, of that test's own
interval and the bootstrap over pairs; the bootstrap alone is too narrow with few pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from headrace_bench.figures.stats import ALPHA, percentile

Verdict = Literal["better", "worse", "no difference", "too few"]
Scale = Literal["ratio", "difference"]

MIN_PAIRS = 6
"""Fewest with which the exact test can reach 5 %: 2 of 2^6 signs."""
RESAMPLES = 10_000
Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Pair:
    """One figure of two runs; None where a run has it not."""

    a: float | None
    b: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """B against A. On the scale `ratio`, 1.07 is "B is 7 % more"; on `difference`, b - a in the figure's unit."""

    ratio: float | None
    low: float | None
    high: float | None
    """95 % interval."""
    p: float | None
    """Of the sign-flip test; after `holm`, adjusted."""
    verdict: Verdict
    """Of B: better, worse."""
    pairs: int
    """Used."""
    dropped: int
    """Pairs without the figure on a side, or with a 0 that has no ratio."""
    floor: float | None
    """As given to `compare`."""
    scale: Scale = "ratio"

    def text(self) -> str:
        """`7.0 % more [3.1 %, 11.2 %], 12 pairs, p 0.002, A/A floor ±2.0 %: better`."""
        if self.ratio is None or self.low is None or self.high is None or self.p is None:
            return f"{self.pairs} pairs: {self.verdict}"
        if self.scale == "ratio":
            value, low, high = ((end - 1) * 100 for end in (self.ratio, self.low, self.high))
            effect = f"{abs(value):.1f} % {'more' if value >= 0 else 'less'} [{low:+.1f} %, {high:+.1f} %]"
            floor = None if self.floor is None else f"±{self.floor * 100:.1f} %"
        else:
            effect = f"{self.ratio:+.4g} [{self.low:+.4g}, {self.high:+.4g}]"
            floor = None if self.floor is None else f"±{self.floor:.4g}"
        beside = f", A/A floor {floor}" if floor else ""
        return f"{effect}, {self.pairs} pairs, p {self.p:.3g}{beside}: {self.verdict}"


def compare(
    pairs: Sequence[Pair],
    floor: float | None = None,
    more_is_better: bool = False,
    seed: int = 0,
    *,
    scale: Scale = "ratio",
    resamples: int = RESAMPLES,
) -> Comparison:
    """Decide about one figure.

    `floor`: what `floor` gave, on the same scale: 0.02 is ±2 %. None: the A/A runs are still to come, and only the
    interval decides. `difference` is for figures that can be 0, like stalls or attainment.
    """
    effects = _effects(pairs, scale)
    n = len(effects)
    none = Comparison(None, None, None, None, "too few", n, len(pairs) - n, floor, scale)
    if n < MIN_PAIRS:
        return none
    middle = float(_middle(effects[None, :])[0])
    low, high = _interval(effects, middle, np.random.default_rng(seed), resamples)
    p = sign_flip_p(effects)
    found = replace(none, ratio=_show(middle, scale), low=_show(low, scale), high=_show(high, scale), p=p)
    return replace(found, verdict=_verdict(found, more_is_better))


def floor(pairs: Sequence[Pair], seed: int = 0, *, count: int | None = None, scale: Scale = "ratio") -> float | None:
    """How far the middle of `count` A/A pairs (default: as many as given) strays from none, 95 % of the time.

    Pairs are drawn with replacement and with either sign. On the scale `ratio` a share: 0.02 is ±2 %. None below 6.
    """
    effects = _effects(pairs, scale)
    if len(effects) < MIN_PAIRS:
        return None
    rng, size = np.random.default_rng(seed), count or len(effects)
    drawn = rng.choice(effects, size=(_affordable(size, RESAMPLES), size))
    strays = np.abs(_middle(drawn * rng.choice((-1.0, 1.0), size=drawn.shape)))
    far = percentile(strays.tolist(), 95) or 0.0
    return math.expm1(far) if scale == "ratio" else far


def holm(
    found: Mapping[str, Comparison], primary: str, more_is_better: Mapping[str, bool] | None = None
) -> dict[str, Comparison]:
    """Adjust all but the primary figure for their number, by Holm's steps, and take back what no longer holds."""
    if primary not in found:
        raise ValueError(f"the primary figure {primary!r} is not among {', '.join(found)}")
    better = more_is_better or {}
    others = sorted(
        ((c.p, name) for name, c in found.items() if name != primary and c.p is not None), key=lambda pair: pair[0]
    )
    adjusted, highest = dict(found), 0.0
    for place, (p, name) in enumerate(others):
        highest = max(highest, min(1.0, p * (len(others) - place)))
        one = replace(found[name], p=highest)
        adjusted[name] = replace(one, verdict=_verdict(one, better.get(name, False)))
    return adjusted


def _effects(pairs: Sequence[Pair], scale: Scale) -> Array:
    """Log ratios, or differences, of the pairs that have one. Two zeros are equal on either scale."""
    effects = []
    for pair in pairs:
        if pair.a is None or pair.b is None:
            continue
        if scale == "difference" or pair.a == pair.b:
            effects.append(pair.b - pair.a)
        elif pair.a > 0 and pair.b > 0:
            effects.append(math.log(pair.b / pair.a))
    return np.asarray(effects, dtype=float)


def _show(effect: float, scale: Scale) -> float:
    return math.exp(effect) if scale == "ratio" else effect


def _verdict(found: Comparison, more_is_better: bool) -> Verdict:
    if found.ratio is None or found.low is None or found.high is None or found.p is None:
        return "too few"
    none = 1.0 if found.scale == "ratio" else 0.0
    # ±2 % is as far as 1.02 upwards, and as 1 / 1.02 downwards: logs are even, shares are not.
    size = math.expm1(abs(math.log(found.ratio))) if found.scale == "ratio" else abs(found.ratio)
    excluded = found.low > none or found.high < none
    if not excluded or found.p > ALPHA or size <= (found.floor or 0.0):
        return "no difference"
    return "better" if (found.ratio > none) == more_is_better else "worse"


def _middle(rows: Array) -> Array:
    """Hodges-Lehmann of each row: the median of the means of all two, each with itself included."""
    i, j = np.triu_indices(rows.shape[1])
    return np.median((rows[:, i] + rows[:, j]) / 2, axis=1)


def _affordable(pairs: int, resamples: int) -> int:
    """Fewer resamples for very many pairs, whose interval needs them less."""
    return max(1000, min(resamples, 20_000_000 // (pairs * pairs)))


def _interval(effects: Array, middle: float, rng: np.random.Generator, resamples: int) -> tuple[float, float]:
    n = len(effects)
    i, j = np.triu_indices(n)
    walsh = np.sort((effects[i] + effects[j]) / 2)
    outside = _outside(n)
    drawn = np.sort(_middle(effects[rng.integers(0, n, size=(_affordable(n, resamples), n))]))
    cut = int(ALPHA / 2 * len(drawn))
    low = min(float(walsh[outside]), float(drawn[cut]), middle)
    high = max(float(walsh[-1 - outside]), float(drawn[-1 - cut]), middle)
    return low, high


@lru_cache(maxsize=256)
def _outside(n: int) -> int:
    """How many of the sorted means of two lie outside the test's interval, at each end."""
    below = np.cumsum(_signed_ranks(tuple(range(1, n + 1))))
    return max(0, int(np.searchsorted(below, ALPHA / 2, side="right")) - 1)


@lru_cache(maxsize=1024)
def _signed_ranks(ranks: tuple[int, ...]) -> Array:
    """P(the ranks with a positive sign add up to s), s from 0, when every sign is a fair coin's."""
    chance: Array = np.zeros(sum(ranks) + 1)
    chance[0] = 1.0
    for one in ranks:
        shifted = np.zeros_like(chance)
        shifted[one:] = chance[: len(chance) - one]
        chance = (chance + shifted) / 2
    return chance


def sign_flip_p(effects: Sequence[float] | Array) -> float:
    """Two-sided and exact, over all signs of the effects' ranks (Wilcoxon; ties share ranks, zeros keep theirs)."""
    array = np.asarray(effects, dtype=float)
    sizes = np.abs(array)
    # Twice the shared rank is whole: those below, twice, and those equal, and one.
    doubled = [int(2 * (sizes < size).sum() + (sizes == size).sum() + 1) for size in sizes]
    moving = [(rank, sign > 0) for rank, sign in zip(doubled, array, strict=True) if sign != 0]
    if not moving:
        return 1.0
    chance = _signed_ranks(tuple(sorted(rank for rank, _ in moving)))
    positive = sum(rank for rank, up in moving if up)
    extreme = min(positive, len(chance) - 1 - positive)
    return float(min(1.0, 2 * chance[: extreme + 1].sum()))
