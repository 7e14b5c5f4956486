"""A server under load in virtual time: what becomes of requests that are more than it can answer.

It computes prompts in steps, least work first with ageing, as the scheduler does; an answer holds its place until it is
read; and it never gives up on a request that it took. Nothing is random but the arrivals, and these come from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.admission import Backlog, Bounds
from headrace.core.errors import Overloaded
from headrace.core.events import Admitted, Delta
from headrace.core.queued import AGEING
from headrace.core.request import Generation

PREFILL_S = 0.0005
"""A prompt token."""
DECODE_SHARE = 0.2
STEP_S = 0.05
DEADLINE_S = 2.0


@dataclass(frozen=True)
class Kind:
    """What is asked for, and of whom."""

    sizes: tuple[int, ...]
    """Prompts, in tokens, one as likely as another."""
    places: int = 1000
    answer_s: float = 0.0
    """From the first token to the last."""
    error: float = 1.0
    """What the server says of a token's time, as a multiple of what it takes."""

    @property
    def capacity(self) -> float:
        """Requests a second that can be answered."""
        prefill_s = sum(self.sizes) / len(self.sizes) * PREFILL_S / (1.0 - DECODE_SHARE)
        return min(1.0 / prefill_s, self.places / (prefill_s + self.answer_s))


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
        self.placed = False
        self.over: float | None = None
        """When its last token is out."""

    def rank(self, now: float) -> float:
        return self.left * PREFILL_S / (1.0 - DECODE_SHARE) - AGEING * (now - self.arrived)


class Server:
    """`kind` tells what it is like; `backlog` is asked and told as the engines' streams do."""

    def __init__(self, kind: Kind, backlog: Backlog) -> None:
        self._kind = kind
        self._backlog = backlog
        self._live: list[_Work] = []
        self.waits: list[float] = []
        """Until their first tokens, of those that had one."""

    def __len__(self) -> int:
        return len(self._live)

    def take(self, rid: int, tokens: int, at: float) -> None:
        """Raises Overloaded."""
        self._backlog.add(Generation(rid, [0] * tokens, 1, cache=False, deadline=DEADLINE_S), at)
        self._live.append(_Work(rid, tokens, at))

    def plan(self, now: float) -> list[tuple[_Work, float]]:
        """Who is in the step that begins now, with how many tokens."""
        budget, step = STEP_S * (1.0 - DECODE_SHARE) / PREFILL_S, []
        free = self._kind.places - sum(work.placed for work in self._live)
        for work in sorted((w for w in self._live if w.left > 0.0), key=lambda w: w.rank(now)):
            if budget > 0.0 and (work.placed or free > 0):
                if not work.placed:
                    work.placed = True
                    free -= 1
                    self._learn()
                    self._backlog.book(Admitted(work.rid, 0, 0), now)
                step.append((work, min(budget, work.left)))
                budget -= step[-1][1]
        return step

    def _learn(self) -> None:
        begun_tokens = round(sum(work.left for work in self._live if work.placed))
        self._backlog.learn(self._kind.error * PREFILL_S, DECODE_SHARE, begun_tokens)

    def report(self, step: Sequence[tuple[_Work, float]], now: float) -> None:
        """The step has been computed."""
        for work, tokens in step:
            work.left -= tokens
        self._learn()
        for work, _ in step:
            if work.left <= 0.0:
                self._backlog.book(Delta(work.rid, 0, "x", 1), now)
                self.waits.append(now - work.arrived)
                work.over = now + self._kind.answer_s
        for work in [w for w in self._live if w.over is not None and w.over <= now]:
            self._live.remove(work)
            self._backlog.remove(work.rid, now)


def offer(kind: Kind, load: float, *, predict: bool, seconds: float = 60.0, seed: int = 1) -> Run:
    """Poisson arrivals at `load` times the capacity for that long, then time to come to an end."""
    rng = random.Random(seed)
    rate = load * kind.capacity
    arrivals, at = [], rng.expovariate(rate)
    while at < seconds:
        arrivals.append((at, rng.choice(kind.sizes)))
        at += rng.expovariate(rate)
    bounds = Bounds(max_waiting=10**6, max_waiting_tokens=10**9, places=kind.places, predict=predict)
    server = Server(kind, Backlog(bounds))
    refused = rid = 0
    now = 0.0
    while rid < len(arrivals) or len(server):
        step, now = server.plan(now), now + STEP_S
        while rid < len(arrivals) and arrivals[rid][0] < now:  # while the step runs
            at, tokens = arrivals[rid]
            rid += 1
            try:
                server.take(rid, tokens, at)
            except Overloaded:
                refused += 1
        server.report(step, now)
    late = sum(wait > DEADLINE_S for wait in server.waits)
    return Run((len(server.waits) - late) / seconds, len(server.waits), late, refused)
