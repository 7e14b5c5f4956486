"""Records, schedules and runs for the tests of reports: made by seed, no server."""

from __future__ import annotations

import random

from headrace_bench.load.schedule import Planned, Schedule
from headrace_bench.record import Chunk, Health, Outcome, Record

STAGES = ("receive", "route", "tokenize", "queue", "restore", "prefill", "sample", "deliver")


def schedule(count: int, *, rate: float = 10.0) -> Schedule:
    requests = tuple(
        Planned(
            index=i, at=i / rate, messages=({"role": "user", "content": f"Question {i}?"},), max_tokens=16,
            prompt_tokens=32 * (1 + i % 40),
        )
        for i in range(count)
    )  # fmt: skip
    return Schedule(
        seed=7, kind=f"constant {rate:g}/s", users=None, duration=count / rate, warmup=0.0, requests=requests
    )


def health(*invalid: str) -> Health:
    return Health(
        lag_p50=0.0002, lag_p99=0.0011, lag_max=0.002, loop_lag_p99=0.001, loop_lag_max=0.003, cpu=0.12, gc_pauses=2,
        gc_longest=0.004, load_average=0.7, steal=0.01, asked_rate=10.0, sent_rate=9.99, invalid=invalid,
    )  # fmt: skip


def answered(
    index: int, at: float, *, ttft: float = 0.2, gaps: tuple[float, ...] = (0.01,) * 9, told: bool = True,
    prompt: int = 64,
) -> Record:  # fmt: skip
    """A whole answer: dispatched 1 ms late, connected after 1 ms more, sent after 0.5 ms."""
    stamps = [at + ttft]
    for gap in gaps:
        stamps.append(stamps[-1] + gap)
    shares = (0.5, 0.2, 1.3, 20.0, 2.0, (ttft - 0.03) * 1e3, 0.4, 0.6)
    server: dict[str, float | None] = {name: max(0.01, ms) for name, ms in zip(STAGES, shares, strict=True)}
    server["ttft"] = sum(value for value in server.values() if value is not None)
    server["cached_tokens"] = 0
    return Record(
        index=index, scheduled=at, dispatched=at + 0.001, connected=at + 0.002, sent=at + 0.0025,
        headers=at + 0.003, first_byte=at + ttft, first_event=at + ttft, outcome="ok",
        chunks=tuple(Chunk(stamp, "text", 5) for stamp in stamps), done=stamps[-1], closed=stamps[-1] + 0.0001,
        status=200, finish="stop", prompt_tokens=prompt, completion_tokens=len(stamps), max_tokens=16,
        server=server if told else None, request_id=f"req-{index}",
    )  # fmt: skip


def failed(index: int, at: float, outcome: Outcome = "http", status: int | None = 503, error: str = "busy") -> Record:
    return Record(
        index=index, scheduled=at, dispatched=at + 0.001, outcome=outcome, status=status, error=error, closed=at + 0.01
    )


def records(count: int, *, seed: int = 1, rate: float = 10.0, told: bool = True, slow: float = 1.0) -> list[Record]:
    """Log-normal TTFTs that grow with the prompt, a stall now and then, some failures of three classes."""
    draw = random.Random(seed)
    out: list[Record] = []
    for i in range(count):
        at = i / rate
        prompt = 32 * (1 + i % 40)
        if draw.random() < 0.03:
            outcome: Outcome = draw.choice(("http", "stream_error", "timeout"))
            out.append(failed(i, at, outcome, 503 if outcome == "http" else 200, "<b>no room</b> for this"))
            continue
        gaps = tuple(
            0.5 * draw.random() + 0.2 if draw.random() < 0.004 else draw.lognormvariate(-4.6, 0.25)
            for _ in range(draw.randrange(4, 40))
        )
        ttft = slow * (0.04 + prompt / 4000 * draw.lognormvariate(0, 0.35))
        out.append(answered(i, at, ttft=ttft, gaps=gaps, told=told, prompt=prompt))
    return out
