"""The highest load that meets a target, found point by point; nothing here runs a load or knows the time.

    met ●────────●───────────────●───────●──●···○ the next    above the last ○ and below the first ✕: bisect, until 5 %
        1        2               4       6  6.7
    not met                                          ✕───────────────✕
                                                     7               8

    start ─► rise (×2 until one is not met) ─► narrow (geometric middle) ─► confirm (a fresh seed) ─► End
               └► sink (÷2 until one is met)      ▲                           │ not met: it is a ✕ now
                                                  └───────────────────────────┘

Rules: a point is met only where the lower bound of its attainment reaches the target and its backlog does not grow; it
is not met where the upper bound stays below, or where the backlog grows. Between the two it is measured again, longer,
and counts together with what it had, until the repeats are used up: then it is unproven, and no load to name either. An
invalid point is repeated once; twice invalid, what lies there cannot be measured from here, and the search goes below.
Every answer uses up something bounded, and no point is asked for that could end after the limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

from headrace_bench.figures.stats import wilson

Verdict = Literal["met", "not met", "unsure", "invalid"]
SPARE = 1.5
"""As many requests as a proof takes if all are good, times this: some may be bad."""
Why = Literal["confirmed", "none", "top", "limit", "points"]
"""confirmed: found. none: even the lowest is not met. top: `high` is met. limit, points: time or points ran out."""
Because = Literal["refused", "unproven", "unmeasurable"]
"""refused: shown to be too much. unproven: not shown to be met. unmeasurable: the client was not in order."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What is searched. Misfits are the caller's: 0 < low <= high, 0 < target < 1, 0.5 < confidence < 1."""

    target: float
    """Share of all scheduled requests that have to be good."""
    confidence: float = 0.95
    """Two-sided, of the interval of the share."""
    low: float = 1.0
    """The first load that is tried."""
    high: float | None = None
    """None: nothing is too much."""
    within: float = 0.05
    whole: bool = False
    """Loads are whole numbers: users of a closed loop."""
    seconds: float = 30.0
    """Least length of a point; its first repeat is as long, the next twice that."""
    overhead: float = 0.0
    """Seconds that a point may take beyond its length: warm-up and drain."""
    limit: float = 3600.0
    """Seconds of all points together, at most."""
    longer: int = 2
    """How often an unsure point may be measured again."""
    points: int = 60

    def seconds_at(self, load: float) -> float:
        """Long enough that its requests could prove the target: Wilson's bound of n good of n is n / (n + z²)."""
        least = self.z() ** 2 * self.target / (1 - self.target)
        return self.seconds if self.whole else max(self.seconds, SPARE * least / load)

    def z(self) -> float:
        """Of the normal distribution."""
        return NormalDist().inv_cdf((1 + self.confidence) / 2)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one point."""

    good: int
    scheduled: int
    growing: bool
    """The backlog grew, more than chance explains."""
    invalid: bool
    took: float
    """Seconds, all told."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A point to measure."""

    load: float
    seconds: float
    draw: int
    """Seeds: points of one search share draw 0; each repeat has its own, and so has each confirmation."""
    purpose: Literal["search", "again", "confirm"]


@dataclass(frozen=True, slots=True)
class End:
    """How it ended: `met` is the highest load that was met, `unmet` the lowest above it that was not."""

    why: Why
    met: float | None
    unmet: float | None
    confirmed: bool
    because: Because | None
    """Of `unmet`."""


@dataclass(frozen=True, slots=True)
class State:
    """Between two points."""

    goal: Goal
    load: float
    """Of the point that is being measured."""
    met: tuple[float, ...] = ()
    """Rising."""
    unmet: float | None = None
    because: Because | None = None
    confirming: bool = False
    confirmed: bool = False
    good: int = 0
    scheduled: int = 0
    """Both of the point so far, over its repeats."""
    repeats: int = 0
    invalids: int = 0
    draws: int = 0
    spent: float = 0.0
    points: int = 0
    over: bool = False
    """Nothing is left to measure."""


def start(goal: Goal) -> State:
    """Before the first point."""
    return State(goal, _whole(goal, goal.low))


def bounds(good: int, scheduled: int, z: float) -> tuple[float, float]:
    """Wilson's interval of a share. Of nothing, all is possible."""
    share = wilson(good, scheduled, z)
    return (0.0, 1.0) if share is None or share.low is None or share.high is None else (share.low, share.high)


def judge(goal: Goal, good: int, scheduled: int, growing: bool) -> Verdict:
    """Of a valid point."""
    low, high = bounds(good, scheduled, goal.z())
    if growing or high < goal.target:
        return "not met"
    return "met" if low >= goal.target else "unsure"


def hopeless(goal: Goal, bad: int, scheduled: int, earlier: tuple[int, int] = (0, 0)) -> bool:
    """Were all other requests good, the point would still not be met: it need not go on. `earlier`: good, scheduled."""
    good, total = scheduled - bad + earlier[0], scheduled + earlier[1]
    return total > 0 and bounds(good, total, goal.z())[1] < goal.target


def ask(state: State) -> Ask | End:
    """The next point, or the end."""
    goal = state.goal
    seconds = goal.seconds_at(state.load) * 2 ** max(0, state.repeats - 1)
    if state.over:
        return _end(state, "none" if not state.met else "top" if state.unmet is None else "confirmed")
    if state.points >= goal.points:
        return _end(state, "points")
    if state.spent + seconds + goal.overhead > goal.limit:
        return _end(state, "limit")
    again = state.repeats > 0 or state.invalids > 0
    purpose: Literal["search", "again", "confirm"] = "confirm" if state.confirming else "again" if again else "search"
    return Ask(state.load, seconds, state.draws if again or state.confirming else 0, purpose)


def told(state: State, outcome: Outcome) -> State:
    """What follows from the point that was asked for last."""
    goal = state.goal
    state = replace(state, spent=state.spent + outcome.took, points=state.points + 1, draws=state.draws + 1)
    if outcome.invalid:
        if state.invalids == 0:
            return replace(state, invalids=1)
        return _refused(state, "unmeasurable")
    good, scheduled = state.good + outcome.good, state.scheduled + outcome.scheduled
    verdict = judge(goal, good, scheduled, outcome.growing)
    if verdict == "unsure" and state.repeats < goal.longer:
        return replace(state, good=good, scheduled=scheduled, repeats=state.repeats + 1, invalids=0)
    if verdict == "met":
        return _accepted(state)
    return _refused(state, "refused" if verdict == "not met" else "unproven")


def _accepted(state: State) -> State:
    if state.confirming:
        return replace(state, confirmed=True, over=True)
    return _onwards(replace(state, met=(*state.met, state.load)))


def _refused(state: State, because: Because) -> State:
    below = tuple(load for load in state.met if load < state.load)
    return _onwards(replace(state, met=below, unmet=state.load, because=because))


def _onwards(state: State) -> State:
    """The next load, with nothing known of it."""
    goal = state.goal
    state = replace(state, good=0, scheduled=0, repeats=0, invalids=0, confirming=False)
    best = state.met[-1] if state.met else None
    if best is None:
        assert state.unmet is not None
        lower = _whole(goal, state.unmet / 2)
        # A thousandth of the first load: there is no use in a server that is slower than that.
        return replace(state, load=lower, over=lower >= state.unmet or lower < goal.low / 1024)
    if state.unmet is None:
        if goal.high is not None and best >= goal.high:
            return replace(state, load=best, confirming=True)
        return replace(state, load=_whole(goal, best * 2 if goal.high is None else min(best * 2, goal.high)))
    if _close(goal, best, state.unmet):
        return replace(state, load=best, confirming=True)
    middle = _whole(goal, math.sqrt(best * state.unmet))
    return replace(state, load=min(max(middle, best + 1), state.unmet - 1) if goal.whole else middle)


def _close(goal: Goal, best: float, unmet: float) -> bool:
    return unmet <= best * (1 + goal.within) * (1 + 1e-9) or (goal.whole and unmet - best <= 1)


def _whole(goal: Goal, load: float) -> float:
    return max(1.0, float(round(load))) if goal.whole else load


def _end(state: State, why: Why) -> End:
    best = state.met[-1] if state.met else None
    return End(why, best, state.unmet, state.confirmed, state.because)
