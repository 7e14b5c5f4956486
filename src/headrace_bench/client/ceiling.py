"""How much the client itself can do on this machine before its own lateness shows in what it measures.

    requests/s     one token each, evenly: the window is all of it
    chunks/s       streams are begun one after another in the warm-up, and all of them run through the window

Rules: by the run's own gate, all of it and nothing softer; against the scripted server, which answers at once, on the
same machine: what is found is a lower bound of what the client can do when the server is elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from headrace_bench.client import runqueue
from headrace_bench.client.health import LAG_S
from headrace_bench.client.run import Run, run
from headrace_bench.client.target import Target
from headrace_bench.load.schedule import Phase, Planned, Schedule

RATES = (50, 100, 200, 500, 1000)
STREAMS = (16, 64, 256)
GAP_MS = 10
BEGUN_S = 0.5
"""In which the streams of a step are begun: how quickly connections can be opened is another question."""
WHOLE = 0.98
"""Of the chunks that were due in the window, so many have come in it."""


def measure(target: Target, seconds: float, say: Callable[[str], None]) -> str:
    """Runs both ladders, `seconds` a step, and says a line a step; what comes back sums it up."""
    say("The client's own ceiling, requests with one token each:")
    rate = best(_rates(target, seconds, say))
    say(f"Concurrent streams, a chunk each {GAP_MS} ms:")
    chunks = best(_streams(target, seconds, say))
    return (
        f"This client on this machine: {_or_none(rate, 'requests/s')} and {_or_none(chunks, 'chunks/s')} "
        "within the gate of a run."
    )


def requests(rate: float, seconds: float, model: str) -> Schedule:
    """Evenly `rate` a second."""
    planned = tuple(_planned(index, index / rate, model) for index in range(int(rate * seconds)))
    return Schedule(
        seed=0, kind=f"constant {rate:g}/s", users=None, duration=len(planned) / rate, warmup=0.0, requests=planned
    )


def streaming(streams: int, seconds: float) -> Schedule:
    """All of them running through a window of `seconds`, begun before it, their chunks spread over a gap."""
    tokens = math.ceil((BEGUN_S + seconds) * 1e3 / GAP_MS) + 1
    model = f"even:{GAP_MS}:{GAP_MS}:{tokens}"
    planned = tuple(_planned(index, index * BEGUN_S / streams, model, "warmup") for index in range(streams))
    return Schedule(seed=0, kind=f"{streams} streams", users=None, duration=seconds, warmup=BEGUN_S, requests=planned)


def _rates(target: Target, seconds: float, say: Callable[[str], None]) -> Iterable[tuple[float, bool]]:
    for rate in RATES:
        done, waited = _run(target, requests(rate, seconds, "even:0:0:1"), 5.0)
        passed, health = _passed(done), done.health
        say(
            f"  {rate:5} requests/s  sent {health.sent_rate or 0:7.1f}/s  lag p99 {_ms(health.lag_p99)}  "
            f"loop lag p99 {_ms(health.loop_lag_p99)}  CPU {health.cpu:4.0%}  {_verdict(passed, waited)}"
        )
        yield rate, passed


def _streams(target: Target, seconds: float, say: Callable[[str], None]) -> Iterable[tuple[float, bool]]:
    for streams in STREAMS:
        done, waited = _run(target, streaming(streams, seconds), seconds * 3 + 5.0)
        came = [BEGUN_S <= chunk.at < BEGUN_S + seconds for record in done.records for chunk in record.chunks]
        rate, wanted = sum(came) / seconds, streams * 1e3 / GAP_MS
        passed = _passed(done) and rate >= WHOLE * wanted
        say(
            f"  {streams:5} streams     {rate:9.0f} chunks/s of {wanted:7.0f}  "
            f"loop lag p99 {_ms(done.health.loop_lag_p99)}  CPU {done.health.cpu:4.0%}  {_verdict(passed, waited)}"
        )
        yield rate, passed


def _run(target: Target, schedule: Schedule, drain_s: float) -> tuple[Run, float | None]:
    """And the seconds for which the client had no processor. Raises KeyboardInterrupt: the load ends without."""
    before = runqueue.waited()
    done = run(target, schedule, drain_s=drain_s)
    if done.interrupted:
        raise KeyboardInterrupt
    return done, runqueue.between(before, runqueue.waited())


def _verdict(passed: bool, waited: float | None) -> str:
    if passed:
        return "ok"
    others = "" if waited is None or waited < LAG_S else f"; others had the processor for {waited * 1e3:.0f} ms of it"
    return f"past the gate{others}"


def _passed(done: Run) -> bool:
    """Something was asked, everything came to a good end, and the run counts."""
    return bool(done.records) and not done.health.invalid and all(record.outcome == "ok" for record in done.records)


def best(steps: Iterable[tuple[float, bool]]) -> float | None:
    """The highest that passed. All are tried: on a busy machine a low one may fail by chance."""
    return max((value for value, passed in steps if passed), default=None)


def _planned(index: int, at: float, model: str, phase: Phase = "measure") -> Planned:
    said = ({"role": "user", "content": "Say something."},)
    return Planned(
        index=index, at=at, messages=said, max_tokens=16, prompt_tokens=8, phase=phase, extra={"model": model}
    )  # fmt: skip


def _ms(seconds: float | None) -> str:
    return "   none   " if seconds is None else f"{seconds * 1e3:7.2f} ms"


def _or_none(value: float | None, unit: str) -> str:
    return f"no {unit}" if value is None else f"{value:.0f} {unit}"
