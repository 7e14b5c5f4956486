"""What keys may ask for, counted here or, for servers behind one load balancer, in the Redis that they share.

    take ─▶ Redis: one script, all limits at once ── no answer ──▶ the buckets of this process
     │                                                                  ▲ charged too, so that they know our own share
     └─▶ Slot ── close(cost) ─▶ settled here at once, in Redis a moment later

Rules: a request waits for Redis at most one timeout, and goes on without it. Redis's own clock counts, so that servers
whose clocks differ agree; here it is the monotonic one. Should Redis's clock go back, it counts on from there, and what
was to come later is no obstacle. Of a server that dies nothing stays: a place is a lease, which is renewed while the
request runs. What Redis was not told while it was away is told by the renewals (places) or forgotten (tokens, of which
a minute's worth comes back in a minute anyway). A key without limits costs nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from headrace.core.clock import Clock
from headrace.core.errors import Limit, RateLimited
from headrace.gateway.buckets import BUSY_S, UNIT, Allowance, Buckets, Refusal
from headrace.gateway.shared import SharedRedis

PREFIX = "headrace:limit:"
LEASE_S = 30.0
"""How long a place is held for a server that gives no sign."""
FEW = 4096
"""Settlements that may wait for a Redis that does not take them."""

# Levels as in `buckets`. KEYS: the key's hash (r, t: levels; at: when), its places.
_LEVELS = f"""
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local state = redis.call('HMGET', KEYS[1], 'r', 't', 'at')
local back = state[3] and now < tonumber(state[3])
local function level(at, limit)
  local old = tonumber(state[at])
  local full = limit * {UNIT}
  if not old then return full end
  return math.min(full, old + math.max(0, now - tonumber(state[3])) * limit)
end
local function write(r, t, requests, tokens)
  local rest = 0
  if requests == 0 then r = 0 end
  if tokens == 0 then t = 0 end
  if requests > 0 then rest = math.max(rest, (requests * {UNIT} - r) / requests) end
  if tokens > 0 then rest = math.max(rest, (tokens * {UNIT} - t) / tokens) end
  redis.call('HSET', KEYS[1], 'r', string.format('%.0f', r), 't', string.format('%.0f', t),
    'at', string.format('%.0f', now))
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.ceil(rest / 1000) + 1000))
end
"""

# ARGV: requests, tokens, streams (0: no limit), tokens to charge, place, lease in us, until when somebody waits for the
# answer (0: not known). Gives the clock and the three waits in us; without the waits: nobody waits any more.
TAKE = (
    _LEVELS
    + f"""
local requests, tokens, streams = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local cost, lease = tonumber(ARGV[4]), tonumber(ARGV[6])
local r, t = level(1, requests), level(2, tokens)
local waits = {{0, 0, 0}}
if tonumber(ARGV[7]) > 0 and now > tonumber(ARGV[7]) then return {{now}} end
if requests > 0 and r < {UNIT} then waits[1] = math.ceil(({UNIT} - r) / requests) end
local need = math.min(cost, tokens) * {UNIT}
if tokens > 0 and t < need then waits[2] = math.ceil((need - t) / tokens) end
local clocked = string.format('%.0f', now)
-- After a clock that was ahead: no lease is that long. Only if there are such places, since a Redis that has no memory
-- left lets a script that wrote once write on.
if streams > 0 then
  local longest = string.format('%.0f', now + math.max(lease, {int(LEASE_S * 1e6)}))
  if redis.call('ZCOUNT', KEYS[2], '(' .. longest, '+inf') > 0 then
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '(' .. longest, '+inf')
  end
end
if streams > 0 and redis.call('ZCOUNT', KEYS[2], '(' .. clocked, '+inf') >= streams then
  waits[3] = {int(BUSY_S * 1e6)}
end
if waits[1] == 0 and waits[2] == 0 and waits[3] == 0 then
  write(r - {UNIT}, t - cost * {UNIT}, requests, tokens)
  if streams > 0 then
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', clocked)
    redis.call('ZADD', KEYS[2], string.format('%.0f', now + lease), ARGV[5])
    redis.call('PEXPIRE', KEYS[2], string.format('%.0f', lease / 1000))
  end
elseif back then
  write(r, t, requests, tokens)
end
return {{now, waits[1], waits[2], waits[3]}}
"""
)

# ARGV: requests, tokens, tokens to take beyond what was charged, place.
SETTLE = (
    _LEVELS
    + f"""
redis.call('ZREM', KEYS[2], ARGV[4])
local requests, tokens, more = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
if tokens > 0 and more ~= 0 then
  write(level(1, requests), math.min(tokens * {UNIT}, level(2, tokens) - more * {UNIT}), requests, tokens)
end
return 0
"""
)

# ARGV: lease in us, places.
RENEW = """
local clock = redis.call('TIME')
local lease = tonumber(ARGV[1])
local until_ = string.format('%.0f', clock[1] * 1000000 + clock[2] + lease)
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], until_, ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', lease / 1000))
return 0
"""

_WAYS: dict[Limit, tuple[str, str]] = {
    "requests": ("requests a minute", "they come too fast"),
    "tokens": ("tokens a minute, prompts and answers together", "they are used up"),
    "streams": ("requests at the same time", "they are running"),
}


class Script:
    """A script that Redis keeps by its digest; sent whole to one that does not know it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, client: Redis, keys: tuple[str, ...], *args: str | int) -> Any:
        try:
            return await client.evalsha(self._digest, len(keys), *keys, *map(str, args))
        except NoScriptError:
            return await client.eval(self._text, len(keys), *keys, *map(str, args))


_TAKE, _SETTLE, _RENEW = Script(TAKE), Script(SETTLE), Script(RENEW)


class Slot:
    """A request that was let in."""

    __slots__ = ("_limiter", "allowance", "charged", "closed", "name", "place", "shared")

    def __init__(
        self, limiter: Limiter | None, name: str, allowance: Allowance, charged: int, place: str, shared: bool
    ) -> None:
        self._limiter = limiter
        self.name = name
        self.allowance = allowance
        self.charged = charged
        self.place = place
        self.shared = shared
        """Redis let it in."""
        self.closed = False

    def close(self, cost: int) -> None:
        """It is over and took `cost` tokens. Only the first call counts."""
        if not self.closed:
            self.closed = True
            if self._limiter is not None:
                self._limiter._settle(self, cost)


class Limiter:
    """On one event loop. `new_id` names places; without `shared` everything is counted here."""

    def __init__(
        self, clock: Clock, new_id: Callable[[], str], *, shared: SharedRedis | None = None, lease_s: float = LEASE_S
    ) -> None:
        self._clock = clock
        self._new_id = new_id
        self._shared = shared
        self._lease_s = lease_s
        self._buckets = Buckets()
        self._leased: dict[str, dict[str, None]] = {}
        """Key → places of its requests that run, where they are limited."""
        self._offset: float | None = None
        """What to add to our clock to read Redis's, or a little more."""
        self._due: deque[Callable[[Redis], Awaitable[Any]]] = deque(maxlen=FEW)
        self._telling: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    def running(self, name: str) -> int:
        """Requests of that key that this server answers, if anything of it is limited."""
        return self._buckets.running(name)

    async def take(self, name: str, allowance: Allowance, tokens: int) -> Slot:
        """Let in a request of about `tokens` tokens. Raises RateLimited."""
        if not allowance.any:
            return Slot(None, name, allowance, 0, "", False)
        place = self._new_id()
        refusal, shared = await self._decide(name, allowance, tokens, place)
        if refusal is not None:
            raise _refused(refusal, allowance)
        if self._shared is not None and allowance.streams:
            self._leased.setdefault(name, {})[place] = None
            if self._renewing is None:
                self._renewing = asyncio.get_running_loop().create_task(self._renew())
        return Slot(self, name, allowance, tokens, place, shared)

    async def close(self) -> None:
        """Tell Redis what it does not know yet, if it answers."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait((self._renewing,))
        if self._telling is not None:
            await asyncio.wait((self._telling,))

    async def _decide(self, name: str, allowance: Allowance, tokens: int, place: str) -> tuple[Refusal | None, bool]:
        """(why not, did Redis say so)."""
        waits = await self._ask(self._shared, name, allowance, tokens, place) if self._shared is not None else None
        now = self._clock()
        if waits is None:
            refusal = self._buckets.take(name, allowance, tokens, now)
            if refusal is not None and self._shared is not None:
                self._tell(name, allowance, 0, place)
            return refusal, False
        if any(waits):
            limit, wait = max(zip(_WAYS, waits, strict=True), key=lambda pair: pair[1])
            return Refusal(limit, wait / 1e6), True
        self._buckets.charge(name, allowance, tokens, now)
        return None, True

    async def _ask(
        self, shared: SharedRedis, name: str, allowance: Allowance, tokens: int, place: str
    ) -> list[int] | None:
        """The waits in µs, as Redis says; None: it says nothing."""
        now, offset = self._clock(), self._offset
        # A server that was frozen does then what it was asked before, and nobody wants that any more.
        until = 0 if offset is None else round((now + offset + shared.timeout_s) * 1e6)
        arguments = (allowance.requests, allowance.tokens, allowance.streams, tokens, place, self._lease_us, until)
        try:
            answer = await shared.call(lambda client: _TAKE(client, _keys(name), *arguments))
        except asyncio.CancelledError:
            self._tell(name, allowance, 0, place)  # it may have been let in: its place is to be free
            raise
        if answer is None:
            return None
        at, *waits = answer
        self._offset = at / 1e6 - now if waits else None
        return waits or None

    def _settle(self, slot: Slot, cost: int) -> None:
        name, allowance = slot.name, slot.allowance
        self._buckets.settle(name, allowance, slot.charged, cost, self._clock())
        if self._shared is None:
            return
        places = self._leased.get(name)
        if places is not None:
            places.pop(slot.place, None)
            if not places:
                del self._leased[name]
        # One that Redis has not heard of costs there all that it cost.
        self._tell(name, allowance, cost - slot.charged if slot.shared else cost, slot.place)

    def _tell(self, name: str, allowance: Allowance, more: int, place: str) -> None:
        """Have Redis told, off the request's path."""
        arguments = (allowance.requests, allowance.tokens, more, place)
        self._due.append(lambda client: _SETTLE(client, _keys(name), *arguments))
        if self._telling is None or self._telling.done():
            self._telling = asyncio.get_running_loop().create_task(self._tell_all())

    async def _tell_all(self) -> None:
        assert self._shared is not None
        while self._due:
            # One that is not taken is not said again: it may have been heard, and places end by themselves.
            await self._shared.call(self._due.popleft())

    async def _renew(self) -> None:
        assert self._shared is not None
        while True:
            await asyncio.sleep(self._lease_s / 3)
            for name, places in tuple(self._leased.items()):
                keys, arguments = (_keys(name)[1],), (self._lease_us, *places)
                await self._shared.call(lambda client, k=keys, a=arguments: _RENEW(client, k, *a))  # type: ignore[misc]

    @property
    def _lease_us(self) -> int:
        return round(self._lease_s * 1e6)


def _keys(name: str) -> tuple[str, str]:
    """Its hash and its places; the braces keep both on one node of a cluster."""
    return f"{PREFIX}{{{name}}}", f"{PREFIX}{{{name}}}:places"


def _refused(refusal: Refusal, allowance: Allowance) -> RateLimited:
    what, why = _WAYS[refusal.limit]
    seconds = max(1, math.ceil(refusal.wait_s - 1e-9))
    return RateLimited(
        f"this key may have {getattr(allowance, refusal.limit)} {what}, and {why}; try again in {seconds} s",
        retry_after=seconds,
        limit=refusal.limit,
    )
