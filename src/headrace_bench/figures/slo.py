"""A service level objective: what one answer has to keep, all of it at once.

    profile        ttft    tpot   stall    e2e      ms; `stall` is the longest gap of an answer
    voice           300      60     200      -
    chat-strict     500      40     250      -
    chat           1000     100     500      -
    reading        2000     155    1000      -
    code-complete     -       -       -   1000

Rules: an answer that did not end as it should is not good, nor is one without a token, whatever the limits; an answer
of one token has no time per token and no gap, so it keeps those two limits; one on the limit is good.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from headrace_bench.fault import Misuse
from headrace_bench.figures.definitions import RequestFigures


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds; None is no limit."""

    name: str
    ttft: float | None = None
    tpot: float | None = None
    stall: float | None = None
    e2e: float | None = None

    def limits(self) -> dict[str, float]:
        """Those that are set, by name, in seconds."""
        return {name: limit for name in LIMITS if (limit := getattr(self, name)) is not None}

    def kept(self, figures: RequestFigures) -> dict[str, bool]:
        """Limit by limit. Of an answer that failed or is empty none is kept."""
        measured = {
            "ttft": figures.ttft,
            "tpot": figures.tpot,
            "stall": figures.longest_gap,
            "e2e": figures.e2e,
        }
        answered = figures.whole and figures.ttft is not None
        return {name: answered and _within(measured[name], limit) for name, limit in self.limits().items()}

    def met(self, figures: RequestFigures) -> bool:
        """It is good: whole, not empty, and every limit is kept."""
        return figures.whole and figures.ttft is not None and all(self.kept(figures).values())

    def text(self) -> str:
        """`chat (ttft 1000, tpot 100, stall 500 ms)`."""
        limits = ", ".join(f"{name} {limit * 1000:g}" for name, limit in self.limits().items())
        return f"{self.name} ({limits} ms)"


LIMITS = tuple(field.name for field in fields(Slo) if field.name != "name")
PROFILES = {
    slo.name: slo
    for slo in (
        Slo("voice", ttft=0.3, tpot=0.06, stall=0.2),
        Slo("chat-strict", ttft=0.5, tpot=0.04, stall=0.25),
        Slo("chat", ttft=1.0, tpot=0.1, stall=0.5),
        Slo("reading", ttft=2.0, tpot=0.155, stall=1.0),
        Slo("code-complete", e2e=1.0),
    )
}


def parse(text: str) -> Slo:
    """`chat`, `ttft=500,tpot=50,stall=250,e2e=3000` in ms, or a profile with limits of one's own: `chat,ttft=800`."""
    base, given = Slo(text), dict[str, float]()
    for place, part in enumerate(text.split(",")):
        name, equals, value = part.strip().partition("=")
        if not equals and place == 0 and name in PROFILES:
            base = PROFILES[name]
        elif not equals or name not in LIMITS:
            raise Misuse(
                f"SLO {text!r}: {part.strip()!r} is neither a profile ({', '.join(PROFILES)}) "
                f"nor a limit in ms ({', '.join(f'{limit}=500' for limit in LIMITS)})"
            )
        elif name in given:
            raise Misuse(f"SLO {text!r}: {name} is given twice")
        else:
            given[name] = _seconds(text, name, value)
    return Slo(text, **(base.limits() | given))


def _seconds(text: str, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise Misuse(f"SLO {text!r}: {name} is {value!r}; give a number of milliseconds above 0")
    return number / 1000


def _within(measured: float | None, limit: float) -> bool:
    # A float's last digits decide nothing: 0.1 + 0.2 is within 0.3.
    return measured is None or measured <= limit + 1e-9


def apdex(seconds: Iterable[float | None], target: float) -> float | None:
    """(satisfied + tolerating / 2) / all: within `target`, within four times it; None is a failure. None of none."""
    scores = [0.0 if s is None or s > 4 * target + 1e-9 else 1.0 if s <= target + 1e-9 else 0.5 for s in seconds]
    return sum(scores) / len(scores) if scores else None
