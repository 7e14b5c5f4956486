"""Runs that were recorded earlier, as the sides of a comparison.

    A: run-1 run-2 run-3      two runs are a pair if they asked the same at the same times,
       │     └──┐             each run is in one pair at most, and nothing else is paired
    B: run-7 run-8

Rules: pairs are found, never made up: runs that asked different things are left out of every verdict, and said; a run
that was cut short has no health, so nobody knows whether it counts, and it does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_bench.fault import Misuse
from headrace_bench.figures.slo import Slo
from headrace_bench.figures.trial import FIGURES, Both, Place, Trial, Which, reduce
from headrace_bench.pairing import alike
from headrace_bench.report.folder import Folder, read


@dataclass(frozen=True, slots=True)
class Recorded:
    """What two lists of folders have in common."""

    pairs: tuple[Both, ...]
    dropped: tuple[tuple[str, str, tuple[str, ...]], ...]
    """A's folder, B's folder, why the pair does not count."""
    alone: tuple[str, ...]
    """Folders without a partner."""


def pair_up(a: Sequence[Path], b: Sequence[Path], slo: Slo) -> Recorded:
    """Reads all folders. Misuse: one cannot be read, is on both sides, or on one side twice."""
    for side in (a, b):
        twice = [path for path, count in Counter(path.resolve() for path in side).items() if count > 1]
        if twice:
            raise Misuse(f"--folders: {twice[0]} is given twice on a side; a run counts once")
    both = {path.resolve() for path in a} & {path.resolve() for path in b}
    if both:
        raise Misuse(f"--folders: {min(both)} is on both sides; a run says nothing against itself")
    left, right = [read(path) for path in a], [read(path) for path in b]
    pairs: list[Both] = []
    dropped: list[tuple[str, str, tuple[str, ...]]] = []
    alone: list[str] = []
    for one in left:
        partner = next((other for other in right if alike(one.schedule, other.schedule)), None)
        if partner is None:
            alone.append(str(one.path))
            continue
        right.remove(partner)
        reasons = (*_reasons(one), *_reasons(partner))
        if reasons or one.health is None or partner.health is None:
            dropped.append((str(one.path), str(partner.path), reasons))
        else:
            pairs.append((_trial(one, "a", len(pairs), slo), _trial(partner, "b", len(pairs), slo)))
    return Recorded(tuple(pairs), tuple(dropped), (*alone, *(str(one.path) for one in right)))


def _reasons(run: Folder) -> tuple[str, ...]:
    if run.health is None:
        return (f"{run.path} was cut short",)
    return run.health.invalid


def _trial(run: Folder, which: Which, pair: int, slo: Slo) -> Trial:
    assert run.health is not None
    nth = 0 if which == "a" else 1
    return reduce(str(run.path), Place("pair", pair, nth, which), run.schedule, run.records, run.health, slo, FIGURES)
