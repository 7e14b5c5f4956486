"""Which engine answers a request.

    candidates ─▶ the healthiest ─▶ weight > 0 ─▶ a family, ─▶ longest prefix, ─▶ soonest, shared ─▶ least
                  else the others   else weight 0   by turns     unless late        by its load       load

Rules: weights are shares of requests, exact over each round and not by chance; those of one family add up, since its
engines can stand for each other. Within a family the engine that computed the prompt's beginning already is the best
one, unless it would be later by more than a margin. Who is not well is asked only if nobody is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

SCALE = 10**6
"""Weights are counted in whole millionths: sums of them are exact."""
LEAST_SHARE = 0.05
"""A shorter common beginning is no reason: it costs less than a queue."""
PREFIX_MARGIN_S, PREFIX_MARGIN = 0.1, 0.3
"""How much later the engine with the longest prefix may be: a part of a second, and a share."""
PREFIX_LOAD = 8
"""And how many more requests than twice those of the idlest it may have: a prompt that everybody begins with is soon
computed on a second engine, and then both have it."""
COST_MARGIN_S, COST_MARGIN = 0.02, 0.1
"""Costs that differ by less are the same: a prediction is no better."""


class Condition(IntEnum):
    """How fit an engine is for a request, the best first."""

    WELL = 0
    RESTARTING = 1
    """Requests wait until it is back."""
    DOWN = 2
    """Its last probe failed."""
    FAILING = 3
    """Its last requests failed, and no trial is due."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that may be asked at all."""

    name: str
    family: str
    weight: float
    condition: Condition = Condition.WELL
    in_flight: int = 0
    last: int = 0
    """When it was chosen last; any number that grows."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a request would find there."""

    shared: float = 0.0
    """Of the prompt, 0 to 1: what it has computed before."""
    ttft: float = 0.0
    """Predicted, in s; 0: not known."""


Look = Callable[[Candidate], Sight]


class Turns:
    """Smooth weighted round robin: of any `sum of weights` turns in a row each family gets its weight, spread as evenly
    as can be. (Each turn adds every weight to its family's account; the fullest one is chosen and pays for all.)"""

    def __init__(self) -> None:
        self._accounts: dict[str, int] = {}

    def next(self, weights: Mapping[str, float]) -> str:
        """The family whose turn it is; if all weights are 0, they are equal. `weights` is not empty."""
        if len(weights) == 1:
            return next(iter(weights))
        parts = {family: round(weight * SCALE) or bool(weight) for family, weight in weights.items()}
        if not any(parts.values()):
            parts = dict.fromkeys(parts, 1)
        accounts = self._accounts
        for family, part in parts.items():
            accounts[family] = accounts.get(family, 0) + part
        chosen = max(parts, key=accounts.__getitem__)
        accounts[chosen] -= sum(parts.values())
        return chosen


def choose(candidates: Sequence[Candidate], turns: Turns, look: Look) -> Candidate | None:
    """None if there are none. `look` is asked only where there is a choice within a family."""
    if not candidates:
        return None
    best = min((one.condition, one.weight == 0) for one in candidates)
    fit = [one for one in candidates if (one.condition, one.weight == 0) == best]
    weights: dict[str, float] = {}
    for one in fit:
        weights[one.family] = weights.get(one.family, 0.0) + one.weight
    family = turns.next(weights)
    return pick([one for one in fit if one.family == family], look)


def pick(members: Sequence[Candidate], look: Look) -> Candidate:
    """One of a family; `members` is not empty."""
    if len(members) == 1:
        return members[0]
    sights = {one.name: look(one) for one in members}
    soonest = min((sight.ttft for sight in sights.values() if sight.ttft > 0), default=0.0)
    late = soonest * (1.0 + PREFIX_MARGIN) + PREFIX_MARGIN_S
    busy = 2 * min(one.in_flight for one in members) + PREFIX_LOAD
    warm = [
        one
        for one in members
        if (sight := sights[one.name]).shared >= LEAST_SHARE and sight.ttft <= late and one.in_flight <= busy
    ]
    if warm:
        longest = max(sights[one.name].shared for one in warm)
        fit = [one for one in warm if sights[one.name].shared == longest]
    else:
        # A measured time says nothing of the requests that came since: multiplied by those in flight it does, and
        # not everybody runs to the engine that was the fastest a moment ago. Who is not known may be the fastest.
        costs = {one.name: (sights[one.name].ttft or soonest) * (1 + one.in_flight) for one in members}
        most = min(costs.values()) * (1.0 + COST_MARGIN) + COST_MARGIN_S
        fit = [one for one in members if costs[one.name] <= most]
    return min(fit, key=lambda one: (one.in_flight, one.last, one.name))
