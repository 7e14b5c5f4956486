"""The scheduler in virtual time: a step takes as long as a true cost function says, whatever the scheduler believes."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

from headrace.core.attention import Attention
from headrace.core.costmodel import CostModel, Work, positions
from headrace.core.events import Delta
from headrace.core.limits import Limits
from headrace.core.plan import Drawn, Plan, StepResult
from headrace.core.request import Generation, Sampling
from headrace.core.scheduler import Scheduler
from headrace.core.sequence import Sequence as Choice
from headrace.kv.pool import Pool
from headrace.kv.radix import Radix

TRUE = (2.0e-3, 2.85e-3, 0.0, 3.9e-3, 1.4e-6, 2.6e-6, 0.0)
"""Seconds, as `costmodel.TERMS`: a small model on two cores."""

_GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Part:
    """A prompt's share of a step."""

    choice: Choice
    start: int
    count: int
    lacked: int
    """Tokens it lacked before."""

    @property
    def finishes(self) -> bool:
        return self.count == self.lacked


@dataclass(frozen=True)
class Step:
    began: float
    seconds: float
    reading: tuple[Choice, ...]
    """Those that got one token more."""
    awake: int
    """Those that wait for their next token."""
    prompts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        return len(self.reading) + sum(part.count for part in self.prompts)

    @property
    def ended(self) -> float:
        return self.began + self.seconds

    def of(self, rid: int) -> int:
        """Prompt tokens computed for it."""
        return sum(part.count for part in self.prompts if part.choice.generation.rid == rid)


class Simulator:
    """`ask` for all that shall come, then `run`."""

    def __init__(
        self,
        limits: Limits,
        *,
        cells: int = 16384,
        slots: int = 64,
        noise: float = 0.0,
        seed: int = 0,
        true: tuple[float, ...] = TRUE,
        attention: Attention = Attention(heads=9, threads=2, splits=True, pads=True),  # noqa: B008 - frozen
    ) -> None:
        """`noise`: by which part steps take longer or shorter than the truth."""
        self.scheduler = Scheduler(
            limits,
            index=Radix,
            pool=Pool(cells=cells, slots=slots),
            piece=lambda token: b"x",
            eog=frozenset(),
            cost=CostModel(true, sure=True, attention=attention),
        )
        self._true = CostModel(true, attention=attention)
        self._rng = random.Random(seed)
        self._noise = noise
        self._rids = count(1)
        self._coming: list[tuple[float, int, Generation]] = []
        self.now = 0.0
        self.steps: list[Step] = []
        self.arrived: dict[int, float] = {}
        self.choices: dict[int, Choice] = {}
        self.heard: dict[int, list[float]] = {}
        """When each token of an answer came."""

    def ask(self, at: float, prompt: int | Sequence[int], max_tokens: int = 1, **fields: Any) -> int:
        """`prompt`: its tokens, or how many nobody has in common with it."""
        rid = next(self._rids)
        tokens = [1000 + rid, *range(1, prompt)] if isinstance(prompt, int) else list(prompt)
        heapq.heappush(self._coming, (at, rid, Generation(rid, tokens, max_tokens, sampling=_GREEDY, **fields)))
        return rid

    def run(self, until: Callable[[Simulator], bool] = lambda _: False) -> None:
        """Until all are served, or `until` says so."""
        while not until(self):
            while self._coming and self._coming[0][0] <= self.now:
                at, rid, generation = heapq.heappop(self._coming)
                self.arrived[rid] = at
                self.scheduler.submit(generation, self.now)
                *_, self.choices[rid] = self.scheduler.waiting
            plan = self.scheduler.plan(self.now)
            if plan is None:
                if not self._coming:
                    return
                self.now = self._coming[0][0]
                continue
            self._step(plan)

    def _step(self, plan: Plan) -> None:
        scheduler = self.scheduler
        awake = sum(s.decoding and not s.paused for s in scheduler.running)
        scheduler.begin(plan, self.now)
        reading = tuple(share.sequence for share in plan.shares if share.sequence.decoding)
        prompts = tuple(
            Part(share.sequence, share.sequence.computed, share.count, share.sequence.pending)
            for share in plan.shares
            if not share.sequence.decoding
        )
        read = sum(s.computed for s in reading)
        back = read + sum(positions(p.start, p.count) for p in prompts)
        pad, split = (plan.work.pad, plan.work.split) if plan.work is not None else (0, False)
        work = Work(sum(part.count for part in prompts), len(reading), back, 0, read, pad, split)
        seconds = self._true.predict(work) * self._rng.uniform(1.0 - self._noise, 1.0 + self._noise)
        self.steps.append(Step(self.now, seconds, reading, awake, prompts))
        drawn = tuple(None if chunk.draw is None else Drawn((7,)) for chunk in scheduler.chunks(plan))
        began, self.now = self.now, self.now + seconds
        for event in scheduler.teller.tell(scheduler.apply(plan, StepResult(drawn, self.now), began, self.now)):
            if isinstance(event, Delta):
                self.heard.setdefault(event.rid, []).append(self.now)
        scheduler.take_ops()

    def waited(self, rid: int) -> float:
        """For its first token."""
        return self.heard[rid][0] - self.arrived[rid]

    def gaps(self, rid: int) -> list[float]:
        """Between two tokens."""
        return [b - a for a, b in pairwise(self.heard[rid])]
