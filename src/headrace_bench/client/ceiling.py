"""How much the client itself can do on this machine before its own lateness shows in what it measures.

Rules: by the run's own gate, nothing softer; against the scripted server, which answers at once, on the same machine:
what is found is a lower bound of what the client can do when the server is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace_bench.client import runqueue
from headrace_bench.client.run import Run, run
from headrace_bench.client.target import Target
from headrace_bench.load.schedule import Planned, Schedule

RATES = (50, 100, 200, 500, 1000)
STREAMS = (16, 64, 256)
GAP_MS = 10
LAG_S = 0.005
RATE_SHARE = 0.005


def measure(target: Target, seconds: float, say: Callable[[str], None]) -> str:
    """Runs both ladders, `seconds` a step, and says a line a step; what comes back sums it up."""
    say("The client's own ceiling, requests with one token each:")
    rate = best(_rates(target, seconds, say))
    say(f"Concurrent streams, a chunk each {GAP_MS} ms:")
    chunks = best(_streams(target, seconds, say))
    return (
        f"This client on this machine: {_or_none(rate, 'requests/s')} and {_or_none(chunks, 'chunks/s')} "
        f"with its lag p99 under {LAG_S * 1e3:g} ms."
    )


def requests(rate: float, seconds: float, model: str) -> Schedule:
    """Evenly `rate` a second."""
    planned = tuple(_planned(index, index / rate, model) for index in range(int(rate * seconds)))
    return Schedule(
        seed=0, kind=f"constant {rate:g}/s", users=None, duration=len(planned) / rate, warmup=0.0, requests=planned
    )


def _rates(target: Target, seconds: float, say: Callable[[str], None]) -> Iterable[tuple[float, bool]]:
    for rate in RATES:
        done, waited = _run(target, requests(rate, seconds, "even:0:0:1"), 5.0)
        passed = _passed(done)
        health = done.health
        say(
            f"  {rate:5} requests/s  sent {health.sent_rate or 0:7.1f}/s  lag p99 {_ms(health.lag_p99)}  "
            f"loop lag p99 {_ms(health.loop_lag_p99)}  CPU {health.cpu:4.0%}  {_verdict(passed, waited)}"
        )
        yield rate, passed


def _streams(target: Target, seconds: float, say: Callable[[str], None]) -> Iterable[tuple[float, bool]]:
    for streams in STREAMS:
        # Begun over one gap, so that chunks of different streams do not all come at one time.
        tokens = max(2, int(seconds * 1e3 / GAP_MS))
        schedule = requests(streams * 1e3 / GAP_MS, GAP_MS / 1e3, f"even:{GAP_MS}:{GAP_MS}:{tokens}")
        done, waited = _run(target, schedule, seconds * 3 + 5.0)
        chunks = sum(len(record.chunks) for record in done.records)
        first = min((record.chunks[0].at for record in done.records if record.chunks), default=0.0)
        last = max((record.chunks[-1].at for record in done.records if record.chunks), default=0.0)
        rate = chunks / (last - first) if last > first else 0.0
        whole = chunks == streams * tokens and rate >= 0.98 * streams * 1e3 / GAP_MS
        passed = whole and done.health.loop_lag_p99 <= LAG_S
        say(
            f"  {streams:5} streams     {rate:9.0f} chunks/s of {streams * 1e3 / GAP_MS:7.0f}  "
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
    health = done.health
    asked, sent = health.asked_rate, health.sent_rate
    on_time = health.lag_p99 is not None and health.lag_p99 <= LAG_S
    return (
        all(record.outcome == "ok" for record in done.records)
        and on_time
        and asked is not None
        and sent is not None
        and abs(sent - asked) <= RATE_SHARE * asked
    )


def best(steps: Iterable[tuple[float, bool]]) -> float | None:
    """The highest that passed. All are tried: on a busy machine a low one may fail by chance."""
    return max((value for value, passed in steps if passed), default=None)


def _planned(index: int, at: float, model: str) -> Planned:
    said = ({"role": "user", "content": "Say something."},)
    return Planned(index=index, at=at, messages=said, max_tokens=16, prompt_tokens=8, extra={"model": model})


def _ms(seconds: float | None) -> str:
    return "   none   " if seconds is None else f"{seconds * 1e3:7.2f} ms"


def _or_none(value: float | None, unit: str) -> str:
    return f"no {unit}" if value is None else f"{value:.0f} {unit}"
