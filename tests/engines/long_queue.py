"""What a long queue costs: CPU of the scheduler and of the server's book, beside requests that only wait.

    python tests/engines/long_queue.py [--waiting 10000] [--seconds 20]

        20 come a second ──► book ──► scheduler ──► 10 steps a second, sixteen that read
        as many leave    ◄── what they give, told to their readers

Rules: nothing sleeps, a second here is 10 steps and 20 arrivals, however long they take; what is measured is this
process's CPU time for a second. The engine is scripted and costs nothing that depends on the queue, so the difference
between two lengths of it is what those requests cost.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.admission import Backlog, Bounds
from headrace.core.budget import Pace
from headrace.core.events import Event
from headrace.core.limits import Limits
from headrace.core.request import Generation
from headrace.engines.base import EngineStats
from headrace.engines.stepper import Stepper
from headrace.engines.streams import Streams
from headrace.testing import ManualClock, ScriptedEngine

STEPS, ARRIVALS = 10, 20
"""A second."""

ANSWER = 80
"""Tokens: of twenty that come, two find a place, and the others leave after a while."""

LIMITS = Limits(
    max_batch=8,
    max_running=16,
    step_tokens=576,
    prefill_chunk=512,
    idle_cells=1536,
    earliest_deadline=True,
    pace=Pace(),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """`burst_s`: CPU seconds for all that wait to come; `engine`, `server`: CPU seconds a second, with that queue."""

    waiting: int
    burst_s: float
    engine: float
    server: float


class Queue:
    """A scheduler and a server's book, without threads and sockets between them."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self.clock = ManualClock()
        engine = ScriptedEngine(
            [[b" word"]] * ANSWER, step_s=1 / STEPS, clock=self.clock, wait=self._wait, cells=65_536, record=False
        )
        self.stepper = Stepper(engine, LIMITS, self.clock, self._deliver)
        bounds = Bounds(max_waiting=10**6, max_waiting_tokens=10**9, places=LIMITS.max_running)
        self.streams = Streams(Backlog(bounds), self.clock)
        self._rids = 0
        self.left: deque[int] = deque()
        """Who waits, in order of arrival; some may have begun, or be over."""
        self.server_s = 0.0
        """CPU spent on the server's side."""

    @property
    def waiting(self) -> int:
        return len(self.stepper.scheduler.waiting)

    def arrive(self) -> None:
        self._rids += 1
        rng = self._rng
        prompt = list(rng.randbytes(rng.choice((20, 100, 400, 1500))))
        generation = Generation(self._rids, prompt, ANSWER)
        began = time.process_time()
        self.streams.predict(len(prompt), generation.priority)  # the router asks before it gives it to an engine
        self.streams.open(generation, lambda event: None)
        self.server_s += time.process_time() - began
        self.stepper.scheduler.submit(generation, self.clock())
        self.left.append(generation.rid)

    def leave(self) -> None:
        """Whoever came first of those that still wait gives up."""
        waiting = self.stepper.scheduler.waiting
        length = len(waiting)
        while len(waiting) == length and self.left:
            rid = self.left.popleft()
            if rid in self._running():
                continue
            began = time.process_time()
            self.streams.close(rid)
            self.server_s += time.process_time() - began
            self.stepper.scheduler.cancel(rid)
            waiting = self.stepper.scheduler.waiting

    def step(self) -> None:
        plan = self.stepper.scheduler.plan(self.clock())
        assert plan is not None
        self.stepper.step(plan)

    def _running(self) -> set[int]:
        return {sequence.generation.rid for sequence in self.stepper.scheduler.running}

    def _wait(self, seconds: float) -> bool:
        self.clock.advance(seconds)
        return False

    def _deliver(self, events: list[Event], stats: EngineStats) -> None:
        began = time.process_time()
        self.streams.learn(stats)
        self.streams.deliver(events)
        self.server_s += time.process_time() - began


def measure(waiting: int, seconds: int) -> Cost:
    """CPU beside a queue that long."""
    queue = Queue()
    for _ in range(2 * LIMITS.max_running):
        queue.arrive()
    for _ in range(4 * STEPS):
        queue.step()
    began = time.process_time()
    while queue.waiting < waiting:
        queue.arrive()
    burst_s = time.process_time() - began
    queue.server_s, began = 0.0, time.process_time()
    for step in range(seconds * STEPS):
        for _ in range(ARRIVALS // STEPS):
            queue.arrive()
        while queue.waiting > waiting:
            queue.leave()
        if step or queue.waiting:
            queue.step()
    both = time.process_time() - began
    return Cost(waiting, burst_s, (both - queue.server_s) / seconds, queue.server_s / seconds)


def table(costs: Sequence[Cost]) -> str:
    """One row for each length, and what the longest adds to the shortest."""
    rows = ["| waiting | all come at once | engine's process | server's process |", "|---|---|---|---|"]
    rows += [
        f"| {cost.waiting:,} | {cost.burst_s * 1e3:.0f} ms | {cost.engine:.2%} | {cost.server:.2%} |" for cost in costs
    ]
    first, last = costs[0], costs[-1]
    rows.append(f"| they cost | | {last.engine - first.engine:.2%} | {last.server - first.server:.2%} |")
    return "\n".join(rows)


def main() -> None:
    """Of a core."""
    parser = argparse.ArgumentParser(prog="long_queue.py", description=__doc__)
    parser.add_argument("--waiting", type=int, default=10_000, help="requests that wait")
    parser.add_argument("--seconds", type=int, default=20, help="seconds of the queue's time to measure")
    asked = parser.parse_args()
    costs = [measure(waiting, asked.seconds) for waiting in (LIMITS.max_running, asked.waiting)]
    sys.stdout.write(table(costs) + "\n")


if __name__ == "__main__":
    main()
