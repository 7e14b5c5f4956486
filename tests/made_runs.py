"""Runs that nobody had to wait for: schedules, records with known times, and a server that is a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from headrace_bench.client.run import Run
from headrace_bench.client.target import Target
from headrace_bench.load.schedule import Planned, Schedule
from headrace_bench.record import Chunk, Health, Outcome, Record

A = Target("http://127.0.0.1:1", "m")
B = Target("http://127.0.0.1:2", "m")


def schedule(seed: int = 1, n: int = 40, duration: float = 10.0) -> Schedule:
    """`n` requests, evenly, with prompts of this seed."""
    requests = tuple(
        Planned(
            index=i,
            at=i * duration / n,
            messages=({"role": "user", "content": f"{seed} {i}"},),
            max_tokens=8,
            prompt_tokens=4,
        )
        for i in range(n)
    )
    return Schedule(seed=seed, kind="constant", users=None, duration=duration, warmup=0.0, requests=requests)


def health(*invalid: str) -> Health:
    return Health(
        lag_p50=0.0,
        lag_p99=0.0,
        lag_max=0.0,
        loop_lag_p99=0.0,
        loop_lag_max=0.0,
        cpu=0.1,
        gc_pauses=0,
        gc_longest=0.0,
        load_average=0.1,
        steal=None,
        asked_rate=None,
        sent_rate=None,
        invalid=invalid,
    )


def record(
    index: int, at: float, ttft: float, gap: float = 0.02, tokens: int = 5, outcome: Outcome = "ok", error: str = ""
) -> Record:
    """An answer of `tokens` chunks, the first `ttft` after `at`, the others `gap` apart; nothing of a failed one."""
    stamps = [at + ttft + gap * i for i in range(tokens)] if outcome == "ok" else []
    return Record(
        index=index,
        scheduled=at,
        dispatched=at,
        outcome=outcome,
        sent=at,
        chunks=tuple(Chunk(stamp, "text", 3) for stamp in stamps),
        closed=stamps[-1] if stamps else at + ttft,
        completion_tokens=tokens if stamps else None,
        error=error or None,
    )


@dataclass
class Servers:
    """Answers by URL: the median TTFT of each. Its `run` is a runner, and it remembers what it was asked."""

    ttft: dict[str, float]
    noise: float = 0.05
    invalid: Callable[[int, Target], tuple[str, ...]] = lambda n, target: ()
    outcome: Callable[[int, Target], Outcome] = lambda n, target: "ok"
    asked: list[tuple[Target, Schedule]] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def run(self, target: Target, schedule: Schedule, *, drain_s: float) -> Run:
        n, asked = len(self.asked), schedule
        self.asked.append((target, asked))
        level = self.ttft[target.url] * float(np.exp(self.rng.normal(0, self.noise)))
        times = level * np.exp(self.rng.normal(0, 0.3, len(asked.requests)))
        outcome = self.outcome(n, target)
        records = tuple(
            record(one.index, one.at or 0.0, float(ttft), outcome=outcome, error="" if outcome == "ok" else "refused")
            for one, ttft in zip(asked.requests, times, strict=True)
        )
        return Run(asked, records, health(*self.invalid(n, target)), target, "2026-01-01T00:00:00.000+00:00")
