"""Draws a schedule: arrivals give slots, a workload fills them, one seed decides all of it.

    seed ─┬─ times of the window        arrivals ─▶ slots (when, phase) ─┐
          ├─ times of the warm-up                                        ├─▶ Schedule
          ├─ lengths, texts             workload ─▶ asks (what, how long)┘
          └─ thinking, hanging up

Rules: each thing has its own generator, and the window is drawn before its warm-up, so that another warm-up or a share
that hangs up leaves the rest as it is; what was scaled, cut or spread is in the notes; files are read here, not later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace_bench.fault import Misuse
from headrace_bench.load import arrivals as arriving
from headrace_bench.load import traces
from headrace_bench.load.arrivals import Arrivals, Closed, Curve, Trace
from headrace_bench.load.asks import Ask, Asker
from headrace_bench.load.schedule import Phase, Planned, Schedule
from headrace_bench.load.workload import Sessions, Traced, Workload, Written

DURATION = 60.0
_QUICK = 0.1
"""Seconds: a user of a closed loop is thought to need this at least for a request, when counting how many to draw."""
_MOST = 20_000
MOST = 1_000_000
"""Requests of one schedule: it is drawn whole before the start, and has to fit into memory."""
_LEAVES_AFTER = 1.0
"""Seconds, on average, after which those leave who hang up."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the schedule for a request, or for the first turn of a session."""

    at: float | None
    phase: Phase
    think: float = 0.0
    row: traces.Row | None = None


@dataclass(slots=True)
class _Streams:
    """Generators that do not disturb each other."""

    times: np.random.Generator
    warming: np.random.Generator
    asks: np.random.Generator
    thinks: dict[Phase, np.random.Generator]
    leaves: dict[Phase, np.random.Generator]

    @classmethod
    def of(cls, seed: int) -> _Streams:
        parts = [np.random.default_rng(part) for part in np.random.SeedSequence(seed).spawn(7)]
        times, warming, asks, *rest = parts
        thinks: dict[Phase, np.random.Generator] = {"measure": rest[0], "warmup": rest[1]}
        return cls(times, warming, asks, thinks, {"measure": rest[2], "warmup": rest[3]})


@dataclass(frozen=True, slots=True)
class _Plan:
    slots: Sequence[Slot]
    duration: float
    users: int | None = None
    notes: tuple[str, ...] = ()


def draw(
    arrivals: Arrivals,
    workload: Workload,
    *,
    seed: int,
    duration: float | None = None,
    warmup: float = 0.0,
    hang_ups: float = 0.0,
    ignore_eos: bool = False,
    requests: int | None = None,
) -> Schedule:
    """A load of `duration` seconds after `warmup` seconds; the same arguments give the same schedule, byte for byte.

    `duration` is 60 s, and of a trace or a curve all of it, where it is None. `hang_ups`: the share of requests that
    leave early. `requests`: how many a closed loop may use. Misuse for a file that cannot be read, or no request.
    """
    if isinstance(workload, Traced) and not isinstance(arrivals, Trace):
        raise Misuse("--workload trace: lengths of a trace need its times too: --arrivals trace:FILE")
    if requests is not None and not isinstance(arrivals, Closed):
        raise Misuse(f"--requests {requests}: an open loop has as many as arrive; it is for --arrivals closed:N")
    streams = _Streams.of(seed)
    plan = _plan(arrivals, workload, streams, duration, warmup, requests)
    # The window's first: a longer warm-up then leaves them as they are.
    measure = [slot for slot in plan.slots if slot.phase == "measure"]
    warm = [slot for slot in plan.slots if slot.phase == "warmup"]
    if isinstance(workload, Sessions) and workload.count is not None:
        measure = measure[: workload.count]
    if not measure:
        raise Misuse(f"--arrivals {arriving.text(arrivals)}: no request falls into the {plan.duration:g} s of the load")
    asker = Asker(workload, streams.asks, seed)
    counted = list(zip(measure, asker.asks([slot.row for slot in measure]), strict=True))
    filled = [*zip(warm, asker.asks([slot.row for slot in warm]), strict=True), *counted]
    found: list[Planned] = []
    for number, (slot, turns) in enumerate(filled):
        thinks = _thinks(workload, streams.thinks[slot.phase], len(turns))
        for turn, (ask, think) in enumerate(zip(turns, thinks, strict=True)):
            found.append(
                _planned(
                    ask,
                    slot if turn == 0 else Slot(None, slot.phase, think),
                    index=len(found),
                    session=number if len(turns) > 1 else None,
                    turn=turn,
                    hang_up=_leaves(streams.leaves[slot.phase], hang_ups),
                    ignore_eos=ignore_eos,
                )
            )
    return Schedule(
        seed=seed,
        kind=arriving.text(arrivals),
        users=plan.users,
        duration=plan.duration,
        warmup=warmup,
        requests=tuple(found),
        notes=(*plan.notes, *asker.notes(), *_notes(hang_ups, ignore_eos)),
    )


def _plan(
    arrivals: Arrivals,
    workload: Workload,
    streams: _Streams,
    duration: float | None,
    warmup: float,
    requests: int | None,
) -> _Plan:
    if isinstance(arrivals, Trace):
        return _of_trace(arrivals, streams.times, duration, warmup)
    if isinstance(arrivals, Curve):
        return _of_curve(arrivals, streams.times, duration, warmup)
    length = DURATION if duration is None else duration
    if isinstance(arrivals, Closed):
        most = workload.count if isinstance(workload, Sessions) and workload.count else requests
        _bounded(arrivals, max(arrivals.users, most or 0))
        return _of_users(arrivals, streams.thinks, length, warmup, most)
    warming = arriving.warming(arrivals)
    _bounded(arrivals, arriving.expected(warming, warmup) + arriving.expected(arrivals, length))
    before = arriving.times(warming, streams.warming, warmup) if warmup > 0 else np.empty(0)
    window = warmup + arriving.times(arrivals, streams.times, length)
    return _Plan([*_timed(before, warmup), *_timed(window, warmup)], length)


def _bounded(arrivals: Arrivals, count: float) -> None:
    """Misuse: more than can be drawn. Said before anything is drawn."""
    if count > MOST:
        raise Misuse(
            f"--arrivals {arriving.text(arrivals)}: about {count:.3g} requests, and {MOST:,} are the most that are "
            "drawn; ask for fewer, or for a shorter --duration"
        )


def _timed(times: arriving.Times, warmup: float, rows: Sequence[traces.Row] | None = None) -> list[Slot]:
    return [
        Slot(at, "warmup" if at < warmup else "measure", row=None if rows is None else rows[place])
        for place, at in enumerate(times.tolist())
    ]


def _of_users(
    arrivals: Closed, thinks: dict[Phase, np.random.Generator], duration: float, warmup: float, most: int | None
) -> _Plan:
    """Requests enough for fast answers, of each phase; the first of each user has the ramp-in as its think time."""
    users = arrivals.users
    ramp = 0.8 * warmup if warmup > 0 else min(5.0, 0.1 * duration)

    def enough(seconds: float) -> int:
        return min(_MOST, users + int(users * seconds / max(_QUICK, arrivals.think / 2))) if seconds > 0 else 0

    pools: list[tuple[Phase, int]] = [("warmup", enough(warmup)), ("measure", most or enough(duration))]
    slots = [
        Slot(None, phase, think)
        for phase, count in pools
        for think in thinks[phase].exponential(arrivals.think, count).tolist()
    ]
    for user in range(min(users, len(slots))):
        slots[user] = replace(slots[user], think=user * ramp / users)
    notes = [f"closed loop: {users} users, each waits for its answer, so this is not a rate that the server holds"]
    if users > 1:
        notes.append(f"users begin one after another within {ramp:.1f} s, that no burst stands at the start")
    if arrivals.think:
        notes.append(f"thinking is drawn, exponential, {arrivals.think:g} s on average")
    return _Plan(slots, duration, users, tuple(notes))


def _of_trace(arrivals: Trace, rng: np.random.Generator, duration: float | None, warmup: float) -> _Plan:
    rows = traces.requests(arrivals.path)
    recorded = np.array([row.at for row in rows])
    tick = _tick(recorded) if arrivals.jitter is None else arrivals.jitter
    notes = []
    if tick:
        recorded = recorded + rng.uniform(0.0, tick, recorded.size)
        notes.append(f"times of the trace are spread over {tick:g} s each, as recorded")
    order = np.argsort(recorded, kind="stable")
    recorded = recorded[order] - recorded.min()
    span = float(recorded[-1]) * (1 + 1 / max(1, recorded.size - 1)) or 1.0
    by = arrivals.time_scale
    if arrivals.rate is not None:
        by = _speed(recorded, span, arrivals.rate, None if duration is None else warmup + duration)
    if by != 1:
        notes.append(f"times of the trace are multiplied by {by:.4g}")
    length = _window(arrivals, duration, warmup, span * by, notes)
    keep = recorded * by < warmup + length
    slots = _timed((recorded * by)[keep], warmup, [rows[place] for place in order[keep].tolist()])
    if warmup > 0:
        notes.append(f"the first {warmup:g} s of the trace are the warm-up")
    return _Plan(slots, length, notes=tuple(notes))


def _speed(recorded: arriving.Times, span: float, rate: float, seconds: float | None) -> float:
    """What makes the part that is replayed as quick as asked: the trace's beginning may be slower than its whole."""
    count = recorded.size if seconds is None else round(rate * seconds)
    if seconds is None or not 0 < count < recorded.size or recorded[count] == 0:
        return recorded.size / span / rate
    return seconds / float(recorded[count])


def _tick(recorded: arriving.Times) -> float:
    """Of times that were recorded in steps: the step. 0 where most of them differ from their neighbours."""
    gaps = np.diff(recorded)
    if not gaps.size or np.mean(gaps == 0) < 0.5 or not gaps.any():
        return 0.0
    return float(np.median(gaps[gaps > 0]))


def _of_curve(arrivals: Curve, rng: np.random.Generator, duration: float | None, warmup: float) -> _Plan:
    curve = traces.rates(arrivals.path)
    begins = [begin - curve[0][0] for begin, _ in curve]
    edges = np.array([*begins, 2 * begins[-1] - begins[-2]]) * arrivals.time_scale
    notes = [
        f"rates of {arrivals.path} times {arrivals.scale:g}, its seconds times {arrivals.time_scale:g}",
    ]
    length = _window(arrivals, duration, warmup, float(edges[-1]), notes)
    end = warmup + length
    within = edges[:-1] < end
    bounds = np.append(edges[:-1][within], min(end, float(edges[-1])))
    rates = [rate * arrivals.scale for (_, rate), inside in zip(curve, within.tolist(), strict=True) if inside]
    _bounded(arrivals, float(np.diff(bounds) @ np.array(rates)))
    return _Plan(_timed(arriving.following(rng, bounds.tolist(), rates), warmup), length, notes=tuple(notes))


def _window(arrivals: Curve | Trace, duration: float | None, warmup: float, span: float, notes: list[str]) -> float:
    """Seconds that count: as asked for, or what the file has."""
    left = span - warmup
    if left <= 0:
        raise Misuse(f"--warmup {warmup:g}: {arrivals.path} lasts {span:.1f} s, nothing would be measured")
    if duration is not None and duration > left + 1e-9:
        notes.append(f"{arrivals.path} ends after {span:.1f} s: the window is {left:.1f} s, not {duration:g}")
    return left if duration is None else min(duration, left)


def _thinks(workload: Workload, rng: np.random.Generator, turns: int) -> list[float]:
    """Before each turn; the first waits for its slot instead."""
    mean = workload.think if isinstance(workload, Sessions) else 1.0 if isinstance(workload, Written) else 0.0
    if turns == 1 or mean == 0:
        return [0.0] * turns
    return [0.0, *rng.exponential(mean, turns - 1).tolist()]


def _leaves(rng: np.random.Generator, share: float) -> float | None:
    return float(rng.exponential(_LEAVES_AFTER)) if share > 0 and rng.random() < share else None


def _planned(
    ask: Ask, slot: Slot, *, index: int, session: int | None, turn: int, hang_up: float | None, ignore_eos: bool
) -> Planned:
    return Planned(
        index=index,
        at=slot.at,
        messages=ask.messages,
        max_tokens=ask.max_tokens,
        prompt_tokens=ask.prompt_tokens,
        phase=slot.phase,
        tag=ask.tag,
        session=session,
        turn=turn,
        think=slot.think,
        hang_up=hang_up,
        extra={"ignore_eos": True, "min_tokens": ask.max_tokens} if ignore_eos else {},
    )


def _notes(hang_ups: float, ignore_eos: bool) -> list[str]:
    found = []
    if hang_ups > 0:
        found.append(
            f"{hang_ups:.0%} of the requests hang up, {_LEAVES_AFTER:g} s after sending on average (exponential)"
        )
    if ignore_eos:
        found.append("answers are asked for at full length (ignore_eos, min_tokens), where the server does that")
    return found
