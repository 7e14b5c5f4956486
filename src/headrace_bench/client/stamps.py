"""The answers of a stamped script: how long what was relayed took, and whether each token came once.

    asked ──── wrote 0 ── wrote 1 ── …          upstream, in the text itself
    └ sent ────────└ came 0 ──└ came 1 ── …     here, one stamp a socket read

    added to the first token   (came 0 - sent) - (wrote 0 - asked): there and back
    added to a gap             (came n - came n-1) - (wrote n - wrote n-1): 0 for a relay that is always as late

Rules: both ends read the machine's monotonic clock, so both must be on one machine; what the upstream did late is
not in any figure; a token came when the chunk that completes its text came.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace_bench.record import Record

_TOKEN = re.compile(r"(\d{5,}):(\d{10}\.\d{6})(?::(\d{10}\.\d{6}))? ")


@dataclass(frozen=True, slots=True)
class Token:
    """Seconds of the machine's monotonic clock."""

    number: int
    wrote: float
    came: float

    @property
    def delay(self) -> float:
        return self.came - self.wrote


@dataclass(frozen=True, slots=True)
class Heard:
    """One answer."""

    index: int
    phase: str
    ok: bool
    sent: float | None
    asked: float | None
    """The upstream had read the request; None where its first token did not come."""
    tokens: tuple[Token, ...]
    lost: int
    """Of those that were asked for. An answer that failed has its own count, and loses none."""
    doubled: int
    """Tokens that came before, or out of their order."""
    foreign: int
    """Characters that no token is made of."""

    @property
    def ttft_added(self) -> float | None:
        """Seconds; None without a first token."""
        if self.sent is None or self.asked is None or not self.tokens or self.tokens[0].number != 0:
            return None
        return (self.tokens[0].came - self.sent) - (self.tokens[0].wrote - self.asked)

    def gaps_added(self, begin: float = float("-inf"), end: float = float("inf")) -> list[float]:
        """Seconds, of tokens that were written from `begin` to before `end`."""
        return [b.delay - a.delay for a, b in pairwise(self.tokens) if begin <= b.wrote < end]


def heard(record: Record, began: float, wanted: int) -> Heard:
    """What `record`, with its text, says of an answer of `wanted` tokens. `began`: the zero of its stamps."""
    text = record.text or ""
    found = list(_TOKEN.finditer(text))
    ends, at = [], 0
    for chunk in record.chunks:
        at += chunk.size
        ends.append((at, chunk.at + began))
    tokens: list[Token] = []
    place = 0
    for match in found:
        while place + 1 < len(ends) and ends[place][0] < match.end():
            place += 1
        tokens.append(Token(int(match[1]), float(match[2]), ends[place][1]))
    numbers = [token.number for token in tokens]
    asked = next((float(match[3]) for match in found if match[3]), None)
    return Heard(
        index=record.index,
        phase=record.phase,
        ok=record.outcome == "ok",
        sent=None if record.sent is None else record.sent + began,
        asked=asked,
        tokens=tuple(tokens),
        lost=len(set(range(wanted)) - set(numbers)) if record.outcome == "ok" else 0,
        doubled=_not_rising(numbers),
        foreign=len(text) - sum(match.end() - match.start() for match in found),
    )


def _not_rising(numbers: Sequence[int]) -> int:
    """How many do not come after all before them."""
    count, top = 0, -1
    for number in numbers:
        count += number <= top
        top = max(top, number)
    return count
