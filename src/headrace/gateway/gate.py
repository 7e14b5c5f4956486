"""Is a candidate as good as what it shall replace? Figures of both over the same requests, and the verdict.

    live ──────▶ Figures ─┐
                          ├─ judge ─▶ waiting | promote | reject
    candidate ─▶ Figures ─┘

Rules: a pair counts only if the live answer was whole: what failed on both sides says nothing of the candidate. A
window of N pairs is judged once it is full, then a new one begins. Percentiles come from logarithmic classes that are
2 % wide, so memory does not grow and the error is about 1 %.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Decision = Literal["waiting", "promote", "reject"]

_WIDTH = math.log(1.02)
_LEAST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Seen:
    """One answer. Seconds."""

    ok: bool
    ttft: float | None
    """From the submit to the first text; None: not streamed, or no text."""
    gaps: tuple[float, ...] = ()
    """Between pieces of text."""


class Quantiles:
    """Percentiles of positive numbers, to within 1 %."""

    def __init__(self) -> None:
        self._classes: Counter[int] = Counter()
        self.count = 0

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            self._classes[round(math.log(max(value, _LEAST_S)) / _WIDTH)] += 1
            self.count += 1

    def at(self, share: float) -> float | None:
        """The smallest value that `share` (0 to 1) of all do not exceed; None if there are none."""
        rank, seen = max(1, math.ceil(share * self.count)), 0
        for index in sorted(self._classes):
            seen += self._classes[index]
            if seen >= rank:
                return math.exp(index * _WIDTH)
        return None


@dataclass(slots=True)
class Figures:
    """One side's answers in a window."""

    requests: int = 0
    errors: int = 0
    ttft: Quantiles = field(default_factory=Quantiles)
    gaps: Quantiles = field(default_factory=Quantiles)

    def add(self, seen: Seen) -> None:
        self.requests += 1
        self.errors += not seen.ok
        if seen.ttft is not None:
            self.ttft.add((seen.ttft,))
        self.gaps.add(seen.gaps)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`why`: one line with the numbers."""

    decision: Decision
    why: str


def judge(live: Figures, candidate: Figures, *, requests: int, tolerance: float) -> Verdict:
    """Over `requests` pairs the candidate has no errors, and its TTFT p95 and ITL p99 are at most (1 + `tolerance`)
    times the live ones; an ITL is asked for only where the live side has one."""
    if candidate.errors:
        return Verdict("reject", f"{candidate.errors} of {candidate.requests} mirrored requests failed")
    if candidate.requests < requests:
        return Verdict("waiting", f"{candidate.requests} of {requests} mirrored requests are done")
    theirs, mine = live.ttft.at(0.95), candidate.ttft.at(0.95)
    if theirs is None or mine is None:
        return Verdict("reject", "no streamed answers: there is no time to first token to compare")
    said = f"TTFT p95 {mine * 1e3:.1f} ms against {theirs * 1e3:.1f} ms"
    fits = mine <= theirs * (1.0 + tolerance)
    theirs, mine = live.gaps.at(0.99), candidate.gaps.at(0.99)
    if theirs is not None:
        said += f", ITL p99 {_ms(mine)} against {_ms(theirs)}"
        fits = fits and mine is not None and mine <= theirs * (1.0 + tolerance)
    return Verdict("promote" if fits else "reject", f"{said}; {tolerance:.0%} more is allowed")


def agreement(live: str, candidate: str) -> float:
    """The share of the longer text that both begin with, 0 to 1."""
    longest = max(len(live), len(candidate))
    if not longest:
        return 1.0
    shortest = min(len(live), len(candidate))
    same = next((i for i in range(shortest) if live[i] != candidate[i]), shortest)
    return same / longest


def _ms(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds * 1e3:.1f} ms"
