"""When requests come: `--arrivals` read into a type, and the times drawn from it. Nothing here acts.

    constant:4       one every 250 ms                       burst:20,every=10  twenty at once, every ten seconds
    poisson:4        gaps drawn, memoryless                 ramp:1-10          Poisson whose rate grows in the window
    gamma:4,cv=3     gaps drawn, more bunched than Poisson  step:1,4,2         Poisson, equal parts of the window
    soak:2           Poisson, by default for ten minutes    rate:FILE          Poisson that follows a curve of rates
    trace:FILE       the times somebody recorded            closed:8,think=2   eight users who wait for their answers

Rules: times are seconds from the start of what they were drawn for, sorted, all before its end; a Poisson count is not
bent to rate x duration, for its spread is part of what queues; the same generator state gives the same times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_bench.fault import Misuse
from headrace_bench.load.term import Term, shown

Times = NDArray[np.float64]
FLAG = "--arrivals"
MOST_CV = 20.0
"""Beyond it most gaps that a gamma draws are 0 as floats are, and the others so long that a window has one burst."""
KINDS = ("constant", "poisson", "gamma", "burst", "ramp", "step", "soak", "rate", "trace", "closed")
_PIECES = 1000
"""A ramp is this many steps."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Requests per second, evenly."""

    rate: float


@dataclass(frozen=True, slots=True)
class Poisson:
    """Requests per second on average, gaps exponential."""

    rate: float


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps from a gamma distribution; `cv` is their standard deviation over their mean, 1 is Poisson."""

    rate: float
    cv: float


@dataclass(frozen=True, slots=True)
class Burst:
    """`count` requests at the same moment, every `every` seconds."""

    count: int
    every: float


@dataclass(frozen=True, slots=True)
class Ramp:
    """Poisson, from the first rate to the last."""

    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Step:
    """Poisson, each rate for an equal part of the window."""

    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """Poisson by a file of rates: those times `scale`, its seconds times `time_scale`."""

    path: str
    scale: float = 1.0
    time_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Trace:
    """A file of recorded requests. Times are multiplied by `time_scale`, or so that the mean rate is `rate`."""

    path: str
    time_scale: float = 1.0
    rate: float | None = None
    jitter: float | None = None
    """Seconds of the recording over which a time is spread; None: over the recording's own tick, if it has one."""


@dataclass(frozen=True, slots=True)
class Closed:
    """`users` people who ask again when they were answered and thought, `think` seconds on average."""

    users: int
    think: float = 0.0


Drawn = Constant | Poisson | Gamma | Burst | Ramp | Step
"""What `times` can draw without a file."""
Arrivals = Drawn | Curve | Trace | Closed


def parse(text: str) -> Arrivals:
    """What `--arrivals` says. Misuse for what says nothing."""
    term = Term.read(FLAG, text)
    if term.kind not in KINDS:
        raise term.unknown(KINDS)
    if term.kind in ("rate", "trace"):
        return _of_file(term)
    if term.kind == "gamma":
        term.only("cv")
        cv = term.positive(term.options.get("cv", "2"), "cv")
        if cv > MOST_CV:
            raise term.wrong(f"cv has to be at most {MOST_CV:g}, not {term.options['cv']}")
        return Gamma(_rate(term, term.value), cv)
    if term.kind == "burst":
        term.only("every")
        every = term.positive(term.options.get("every", "10"), "every, seconds between two bursts,")
        return Burst(term.count(term.value, "the number of requests in a burst"), every)
    if term.kind == "closed":
        term.only("think")
        think = term.number(term.options.get("think", "0"), "think, seconds,")
        return Closed(term.count(term.value, "the number of users"), think)
    term.only()
    if term.kind == "ramp":
        first, dash, last = term.value.partition("-")
        if not dash:
            raise term.wrong("a ramp goes from a rate to a rate: ramp:1-10")
        return Ramp(_rate(term, first), _rate(term, last))
    if term.kind == "step":
        return Step(tuple(_rate(term, part) for part in term.value.split(",")))
    rate = _rate(term, term.value)
    return Constant(rate) if term.kind == "constant" else Poisson(rate)


def _of_file(term: Term) -> Curve | Trace:
    if not term.value:
        raise term.wrong(f"which file? {term.kind}:FILE")
    time_scale = term.positive(term.options.get("time_scale", "1"), "time_scale")
    if term.kind == "rate":
        term.only("scale", "time_scale")
        return Curve(term.value, term.positive(term.options.get("scale", "1"), "scale"), time_scale)
    term.only("time_scale", "rate", "jitter")
    rate = term.options.get("rate")
    if rate is not None and "time_scale" in term.options:
        raise term.wrong("rate and time_scale both set the speed; give one of them")
    jitter = term.options.get("jitter")
    return Trace(
        term.value,
        time_scale,
        None if rate is None else _rate(term, rate),
        None if jitter is None else term.number(jitter, "jitter, seconds,"),
    )


def _rate(term: Term, text: str) -> float:
    return term.positive(text, "a rate, requests per second,")


def text(arrivals: Arrivals) -> str:
    """The words that make it again: `parse` of them is `arrivals`."""
    match arrivals:
        case Constant(rate):
            return f"constant:{shown(rate)}"
        case Poisson(rate):
            return f"poisson:{shown(rate)}"
        case Gamma(rate, cv):
            return f"gamma:{shown(rate)},cv={shown(cv)}"
        case Burst(count, every):
            return f"burst:{count},every={shown(every)}"
        case Ramp(first, last):
            return f"ramp:{shown(first)}-{shown(last)}"
        case Step(rates):
            return f"step:{','.join(map(shown, rates))}"
        case Curve(path, scale, time_scale):
            return f"rate:{path},scale={shown(scale)},time_scale={shown(time_scale)}"
        case Trace(path, time_scale, wanted, jitter):
            speed = f"time_scale={shown(time_scale)}" if wanted is None else f"rate={shown(wanted)}"
            return f"trace:{path},{speed}" + ("" if jitter is None else f",jitter={shown(jitter)}")
        case Closed(users, think):
            return f"closed:{users},think={shown(think)}"


def at_rate(arrivals: Arrivals, rate: float) -> Arrivals:
    """The same shape at another rate, requests per second on average: what a search goes through.

    A closed loop has users, not a rate, and a curve's mean is in its file: Misuse.
    """
    match arrivals:
        case Constant():
            return Constant(rate)
        case Poisson():
            return Poisson(rate)
        case Gamma(_, cv):
            return Gamma(rate, cv)
        case Burst(count, _):
            return Burst(count, count / rate)
        case Ramp(first, last):
            by = rate / ((first + last) / 2)
            return Ramp(first * by, last * by)
        case Step(rates):
            by = rate / (sum(rates) / len(rates))
            return Step(tuple(one * by for one in rates))
        case Trace(path, _, _, jitter):
            return Trace(path, 1.0, rate, jitter)
        case Curve() | Closed():
            raise Misuse(f"{FLAG} {text(arrivals)}: this kind cannot be set to a rate; take poisson, gamma or a trace")


def warming(arrivals: Drawn) -> Drawn:
    """What comes before the window: the same, and what it begins with where it changes."""
    match arrivals:
        case Ramp(first, _):
            return Poisson(first)
        case Step(rates):
            return Poisson(rates[0])
        case _:
            return arrivals


def times(arrivals: Drawn, rng: np.random.Generator, duration: float) -> Times:
    """The times of `duration` seconds, from 0."""
    match arrivals:
        case Constant(rate):
            return np.arange(_whole(duration * rate), dtype=np.float64) / rate
        case Burst(count, every):
            return np.repeat(np.arange(_whole(duration / every), dtype=np.float64) * every, count)
        case Gamma(rate, cv):
            return _renewals(rng, rate, cv, duration)
        case Poisson(rate):
            return following(rng, (0.0, duration), (rate,))
        case Ramp(first, last):
            middles = (np.arange(_PIECES) + 0.5) / _PIECES
            rates = first + (last - first) * middles
            return following(rng, np.linspace(0.0, duration, _PIECES + 1).tolist(), rates.tolist())
        case Step(rates):
            return following(rng, np.linspace(0.0, duration, len(rates) + 1).tolist(), rates)


def expected(arrivals: Drawn, duration: float) -> float:
    """How many `times` would give, on average."""
    match arrivals:
        case Constant(rate) | Poisson(rate) | Gamma(rate, _):
            return rate * duration
        case Burst(count, every):
            return count * max(1.0, duration / every)
        case Ramp(first, last):
            return (first + last) / 2 * duration
        case Step(rates):
            return sum(rates) / len(rates) * duration


def following(rng: np.random.Generator, edges: Sequence[float], rates: Sequence[float]) -> Times:
    """Poisson with rate `rates[i]` between `edges[i]` and `edges[i + 1]`.

    Points of a Poisson process of rate 1 on the integral of the rate, taken back to time by its inverse.
    """
    bounds = np.asarray(edges, dtype=np.float64)
    total = np.concatenate(([0.0], np.cumsum(np.diff(bounds) * np.asarray(rates, dtype=np.float64))))
    points = np.sort(rng.uniform(0.0, total[-1], rng.poisson(total[-1])))
    # Where the rate is 0 the integral stands still, and its inverse is not one: the last edge of the pause is meant.
    place = np.clip(np.searchsorted(total, points, side="right") - 1, 0, len(rates) - 1)
    rate = np.asarray(rates, dtype=np.float64)[place]
    found: Times = bounds[place] + (points - total[place]) / np.where(rate > 0, rate, 1.0)
    return np.asarray(found[found < bounds[-1]])


def _renewals(rng: np.random.Generator, rate: float, cv: float, duration: float) -> Times:
    """Gaps of mean 1/rate and deviation cv/rate: gamma of shape 1/cv² and scale cv²/rate."""
    found = np.empty(0)
    while not found.size or found[-1] < duration:
        gaps = rng.gamma(1 / cv**2, cv**2 / rate, size=max(64, int(duration * rate)))
        found = np.concatenate((found, np.cumsum(gaps) + (found[-1] if found.size else 0.0)))
    return found[found < duration]


def _whole(count: float) -> int:
    """How many fit: 0.1 * 30 is three, whatever its last bit says."""
    return int(np.ceil(count - 1e-9))
