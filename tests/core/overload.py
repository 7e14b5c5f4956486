"""A server under load in virtual time: what becomes of requests that are more than it can answer.

It computes prompts in steps, least work first with ageing, as the scheduler does, and never gives up on one that it
took. Nothing is random but the arrivals, and these come from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.admission import AGEING, Backlog, Bounds
from headrace.core.errors import Overloaded
from headrace.core.events import Admitted, Delta
from headrace.core.request import Generation

PREFILL_S = 0.0005
"""A prompt token."""
DECODE_SHARE = 0.2
STEP_S = 0.05
STEP_TOKENS = STEP_S * (1.0 - DECODE_SHARE) / PREFILL_S
DEADLINE_S = 2.0


@dataclass(frozen=True)
class Run:
    """What a load came to."""

    goodput: float
    """Requests a second that had their first token within the deadline."""
    taken: int
    late: int
    """Of those taken."""
    refused: int


class _Work:
    def __init__(self, rid: int, tokens: int, arrived: float) -> None:
        self.rid = rid
        self.left = float(tokens)
        self.arrived = arrived

    def rank(self, now: float) -> float:
        return self.left * PREFILL_S / (1.0 - DECODE_SHARE) - AGEING * (now - self.arrived)


def offer(
    load: float, *, predict: bool, sizes: Sequence[int], error: float = 1.0, seconds: float = 60.0, seed: int = 1
) -> Run:
    """Poisson arrivals of prompts of these `sizes` at `load` times the capacity for that long, then time to come to an
    end. `error`: what the server says of a token's time, as a multiple of what it takes."""
    rate = load * (1.0 - DECODE_SHARE) / PREFILL_S / (sum(sizes) / len(sizes))
    rng = random.Random(seed)
    backlog = Backlog(Bounds(max_waiting=10**6, max_waiting_tokens=10**9, predict=predict))
    arrivals, at = [], rng.expovariate(rate)
    while at < seconds:
        arrivals.append((at, rng.choice(sizes)))
        at += rng.expovariate(rate)
    queue: list[_Work] = []
    good = late = refused = rid = 0
    now = 0.0
    while rid < len(arrivals) or queue:
        step, now = _step(queue, now), now + STEP_S
        while rid < len(arrivals) and arrivals[rid][0] < now:  # while the step ran
            at, tokens = arrivals[rid]
            rid += 1
            try:
                backlog.add(Generation(rid, [0] * tokens, 1, cache=False, deadline=DEADLINE_S), at)
            except Overloaded:
                refused += 1
            else:
                queue.append(_Work(rid, tokens, at))
        backlog.learn(error * PREFILL_S, DECODE_SHARE, round(sum(work.left for work in queue)))
        for work in step:
            backlog.book(Admitted(work.rid, 0, 0), now)
            if work.left <= 0.0:
                queue.remove(work)
                backlog.book(Delta(work.rid, 0, "x", 1), now)
                backlog.remove(work.rid)
                late += now - work.arrived > DEADLINE_S
                good += now - work.arrived <= DEADLINE_S
    return Run(good / seconds, good + late, late, refused)


def _step(queue: list[_Work], now: float) -> list[_Work]:
    """Compute one step; who was in it."""
    budget, members = STEP_TOKENS, []
    for work in sorted(queue, key=lambda w: w.rank(now)):
        if budget <= 0.0:
            break
        done = min(budget, work.left)
        work.left -= done
        budget -= done
        members.append(work)
    return members
