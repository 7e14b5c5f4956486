"""What a comparison may say, from its pairs of runs.

    floor pairs ─► floor of each figure ┐
    real pairs  ─► comparison of each ──┴─► Holm over all but the primary ─► rows ─► one sentence
                └► all runs of a side together ─► p99 with an interval over pairs

Rules: a gain is claimed for the primary figure only, and only if its interval excludes none, it is larger than the
floor, and no figure that guards is worse, which is judged before Holm, as that makes losses harder to see; without a
floor nothing is claimed; a p99 over runs is one of all their requests together, never a mean of p99s; losses are said
as plainly as gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace_bench.figures.paired import MIN_PAIRS, Comparison, Pair, compare, floor, holm
from headrace_bench.figures.stats import BLANK_BELOW, Array, percentile, rank
from headrace_bench.figures.trial import Both, Figure

RESAMPLES = 2000
Int = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both sides."""

    figure: Figure
    a: float | None
    """Median over the runs, by nearest rank; seconds, shares of 1."""
    b: float | None
    found: Comparison
    """After Holm, unless it is the primary."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A percentile of all requests of all runs of a side."""

    figure: str
    a: float | None
    """None: too few samples to show it."""
    b: float | None
    ratio: float | None
    low: float | None
    """95 %, by drawing pairs."""
    high: float | None


@dataclass(frozen=True, slots=True)
class Claim:
    """All of it."""

    primary: str
    rows: tuple[Row, ...]
    merged: tuple[Merged, ...]
    claimed: bool
    """A difference of the primary figure is claimed, for better or worse."""
    sentence: str


def conclude(
    a: str, b: str, real: Sequence[Both], flat: Sequence[Both], figures: Sequence[Figure], primary: str, seed: int
) -> Claim:
    """`real`: valid pairs of A and B; `flat`: of A and A. ValueError: `primary` is not among the figures."""
    more = {figure.name: figure.more_is_better for figure in figures}
    single = {figure.name: _compared(figure, real, flat, seed) for figure in figures}
    adjusted = holm(single, primary, more)
    rows = tuple(Row(figure, *_medians(figure, real), adjusted[figure.name]) for figure in figures)
    guards = [
        figure.name
        for figure in figures
        if figure.guards and figure.name != primary and single[figure.name].verdict == "worse"
    ]
    claimed, sentence = _said(a, b, primary, adjusted[primary], guards)
    merged = (
        _merged("ttft_p99", [one.ttfts for one, _ in real], [one.ttfts for _, one in real], seed),
        _merged("gap_p99", [one.gaps for one, _ in real], [one.gaps for _, one in real], seed),
    )
    return Claim(primary, rows, merged, claimed, sentence)


def _compared(figure: Figure, real: Sequence[Both], flat: Sequence[Both], seed: int) -> Comparison:
    limit = floor(_pairs(figure, flat), seed, count=max(MIN_PAIRS, len(real)), scale=figure.scale)
    return compare(_pairs(figure, real), limit, figure.more_is_better, seed, scale=figure.scale)


def _pairs(figure: Figure, both: Sequence[Both]) -> list[Pair]:
    return [Pair(one.figures[figure.name], other.figures[figure.name]) for one, other in both]


def _medians(figure: Figure, real: Sequence[Both]) -> tuple[float | None, float | None]:
    sides = ([one.figures[figure.name] for one, _ in real], [other.figures[figure.name] for _, other in real])
    a, b = (percentile([value for value in side if value is not None], 50) for side in sides)
    return a, b


def _said(a: str, b: str, primary: str, found: Comparison, guards: Sequence[str]) -> tuple[bool, str]:
    text = f"{primary} of {b} against {a}: {found.text()}"
    if found.verdict in ("too few", "no difference"):
        return False, text
    if found.floor is None:
        return False, f"{text}, but not claimed: there is no A/A floor to hold it against"
    if found.verdict == "better" and guards:
        return False, f"{text}, but not claimed: {', '.join(guards)} is worse"
    return True, text


def _merged(name: str, a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], seed: int) -> Merged:
    """The p99 of each side and their ratio. Pairs are drawn, the runs of one stay together."""
    sides = [_Pool.of(runs) for runs in (a, b)]
    values = [
        pool.p99(np.ones(len(a), dtype=np.int64)) if len(pool.ordered) >= BLANK_BELOW[99.0] else None for pool in sides
    ]
    if values[0] is None or values[1] is None or values[0] <= 0:
        return Merged(name, values[0], values[1], None, None, None)
    ratio = values[1] / values[0]
    ends: tuple[float | None, float | None] = (None, None)
    if len(a) >= MIN_PAIRS:
        rng = np.random.default_rng(seed)
        counts = rng.multinomial(len(a), np.full(len(a), 1 / len(a)), size=RESAMPLES)
        drawn = [x / y for x, y in ((sides[1].p99(n), sides[0].p99(n)) for n in counts) if y > 0]
        ends = (percentile(drawn, 2.5), percentile(drawn, 97.5))
    return Merged(name, values[0], values[1], ratio, *ends)


@dataclass(frozen=True, slots=True)
class _Pool:
    """All samples of a side, sorted, and which run each is of."""

    ordered: Array
    owner: Int

    @classmethod
    def of(cls, runs: Sequence[Sequence[float]]) -> _Pool:
        values = np.concatenate([np.asarray(run, dtype=float) for run in runs]) if runs else np.zeros(0)
        order = np.argsort(values, kind="stable")
        return cls(values[order], np.repeat(np.arange(len(runs)), [len(run) for run in runs])[order])

    def p99(self, times: Int) -> float:
        """With each run as often as `times` says; 0 where nothing is left."""
        counted = np.cumsum(times[self.owner])
        total = int(counted[-1])
        return float(self.ordered[np.searchsorted(counted, rank(total, 99))]) if total else 0.0
