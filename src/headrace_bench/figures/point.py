"""One load of a search and what came of it, and the sentence that ends the search. Nothing here acts.

Rules: the attainment that is quoted is the confirmation's own, for that of a winner is flattered by having won; what a
closed loop carries is never called a rate, for its users wait with their requests as long as the server does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from headrace_bench.figures.search import End, Goal, Verdict


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. Of a repeat, `good`, `scheduled` and the bounds are those of all measurements of its load."""

    load: float
    """Requests per second, or users at once."""
    purpose: Literal["search", "again", "confirm"]
    seed: int
    seconds: float
    """Of the window."""
    took: float
    verdict: Verdict
    good: int
    """Of a stopped one, at most."""
    scheduled: int
    low: float
    high: float
    goodput: float | None
    """Good requests per second; None where it was stopped."""
    backlog_per_s: float | None
    growing: bool
    stopped: bool
    invalid: tuple[str, ...]

    def text(self) -> str:
        """`4 met: 97.1 % [95.6, 98.2], 400 of 412`."""
        share = f"{100 * self.good / self.scheduled:.1f} %" if self.scheduled else "–"
        most = "at most " if self.stopped else ""
        said = f"{self.load:.4g} {self.verdict}: {most}{share} [{100 * self.low:.1f}, {100 * self.high:.1f}]"
        beside = f", {self.good} of {self.scheduled}" if not self.stopped else ", stopped early"
        more = f", backlog grows by {self.backlog_per_s:.2g} a second" if self.growing and self.backlog_per_s else ""
        why = f" ({self.invalid[0]})" if self.invalid else ""
        return f"{said}{beside}{more}{why}"


def winner(points: Sequence[Point], end: End) -> Point | None:
    """The measurement that the result is quoted from: the confirmation, or else the last of that load that was met."""
    return next((point for point in reversed(points) if point.load == end.met and point.verdict == "met"), None)


def sentence(points: Sequence[Point], end: End, goal: Goal, slo: str, closed: bool) -> str:
    """What was found, in one line."""
    unit = "users at once" if closed else "requests/s"
    level = f"{slo} at {100 * goal.target:g} %"
    won = winner(points, end)
    if won is None:
        tried = "" if end.unmet is None else f", tried down to {end.unmet:.3g}"
        return f"no load was shown to meet {level}{tried}{_ended(end)}"
    share = f"attainment {100 * won.good / won.scheduled:.1f} % [{100 * won.low:.1f}, {100 * won.high:.1f}]"
    found = f"{won.load:.3g} {unit} meets {level} ({share}, {won.scheduled} requests)"
    sure = "" if end.confirmed else "; not confirmed with a fresh seed"
    label = "; concurrency-limited: this is no capacity at a rate" if closed else ""
    return f"{found}, {_above(won.load, end, closed)}{sure}{label}"


def _above(load: float, end: End, closed: bool) -> str:
    if end.unmet is None:
        return "nothing above it was tried" if end.why == "top" else f"more was not tried{_ended(end)}"
    more = f"{end.unmet:.3g}" if closed else f"{100 * (end.unmet / load - 1):.0f} % more"
    said = {
        "refused": f"{more} does not",
        "unproven": f"{more} is not shown to",
        "unmeasurable": f"{more} cannot be measured from here: the client was not in order",
    }
    return f"{said[end.because or 'refused']}{_ended(end)}"


def _ended(end: End) -> str:
    return {"limit": "; the time ran out", "points": "; the points ran out"}.get(end.why, "")
