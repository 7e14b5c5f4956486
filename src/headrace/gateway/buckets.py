"""How much a key may ask for: token buckets, and places for requests that run at the same time.

      limit a minute          a request is let in when there is enough for it; what it takes is known only at its end:
    ┌──────▼──────┐
    │  trickles   │               take(estimate)  ─▶  …  ─▶  settle(charged, cost)
    │░░░░░░░░░░░░░│ level                                    may leave the level below nothing: then the next one waits
    └──────┬──────┘
        requests

Rules: nothing is taken unless every bucket has it. A bucket holds a minute's worth, so after a quiet minute that much
may come at once. What is larger than the whole bucket waits for a full one. Levels are whole numbers of 1/60,000,000
of a unit and times whole microseconds: a limit of N a minute then trickles exactly N a microsecond, nothing is rounded,
and the same sums come out in Redis, whose numbers are doubles: up to MOST they are whole. Pure: `now` is in s.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import Limit

UNIT = 60_000_000
"""Parts of a unit: microseconds of a minute."""
MOST = 100_000_000
"""The largest limit: MOST * UNIT is below 2**53."""

BUSY_S = 1.0
"""When to try again if too many run: nobody knows when one of them ends."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a key may have; 0: as much as it likes."""

    requests: int = 0
    """A minute, at most MOST."""
    tokens: int = 0
    """A minute, of prompts and answers together, at most MOST."""
    streams: int = 0
    """Requests being answered at the same time, streamed or not."""

    @property
    def any(self) -> bool:
        """Is anything limited?"""
        return bool(self.requests or self.tokens or self.streams)


NO_LIMITS = Allowance()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not let in, and after how many seconds it would be, if nothing else comes."""

    limit: Limit
    wait_s: float


class Bucket:
    """One bucket, full at first. The limit may change from call to call: what was taken stays taken."""

    __slots__ = ("_at", "_level")

    def __init__(self) -> None:
        self._level: int | None = None
        self._at = 0

    def __repr__(self) -> str:
        return f"<Bucket [{'full' if self._level is None else self._level / UNIT}]>"

    def wait(self, limit: int, cost: int, now: float) -> float:
        """Seconds until `cost` could be taken; 0: now."""
        lacking = min(cost, limit) * UNIT - self._refill(limit, now)
        return 0.0 if lacking <= 0 else -(-lacking // limit) / 1e6

    def take(self, limit: int, cost: int, now: float) -> None:
        """`cost` is gone, whether it was there or not; below 0: it comes back, up to a full bucket."""
        self._level = min(limit * UNIT, self._refill(limit, now) - cost * UNIT)

    def _refill(self, limit: int, now: float) -> int:
        """The level at `now`."""
        at = round(now * 1e6)
        if self._level is None:
            self._level = limit * UNIT
        else:
            self._level = min(limit * UNIT, self._level + max(0, at - self._at) * limit)
        self._at = at
        return self._level


@dataclass(slots=True)
class _Account:
    """Of one key."""

    requests: Bucket
    tokens: Bucket
    running: int = 0


class Buckets:
    """Every key's, by its name."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def take(self, name: str, allowance: Allowance, tokens: int, now: float) -> Refusal | None:
        """Let in a request of about `tokens` tokens; None if it is. Of several limits the one with the longest wait is
        told. Whoever is let in comes back with `settle`."""
        account = self._account(name)
        waits: dict[Limit, float] = {}
        if allowance.requests:
            waits["requests"] = account.requests.wait(allowance.requests, 1, now)
        if allowance.tokens:
            waits["tokens"] = account.tokens.wait(allowance.tokens, tokens, now)
        if allowance.streams and account.running >= allowance.streams:
            waits["streams"] = BUSY_S
        limit = max(waits, key=lambda one: waits[one], default=None)
        if limit is not None and waits[limit] > 0:
            return Refusal(limit, waits[limit])
        self.charge(name, allowance, tokens, now)
        return None

    def charge(self, name: str, allowance: Allowance, tokens: int, now: float) -> None:
        """Book a request that was let in elsewhere, as `take` would."""
        account = self._account(name)
        if allowance.requests:
            account.requests.take(allowance.requests, 1, now)
        if allowance.tokens:
            account.tokens.take(allowance.tokens, tokens, now)
        account.running += 1

    def settle(self, name: str, allowance: Allowance, charged: int, cost: int, now: float) -> None:
        """A request that was let in for `charged` tokens is over, and took `cost`."""
        account = self._account(name)
        account.running -= 1
        if allowance.tokens:
            account.tokens.take(allowance.tokens, cost - charged, now)

    def running(self, name: str) -> int:
        """Requests of that key that are being answered."""
        account = self._accounts.get(name)
        return 0 if account is None else account.running

    def _account(self, name: str) -> _Account:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(Bucket(), Bucket())
        return account
