"""Logs in Redis or Valkey: the keys of a stream, and every call that is made for them.

    headrace:stream:{ID}:log      a Redis stream; the entry POSITION-0 is the event that ends there
                       :origin    what the answer is made from, so that another server can go on with it
                       :lease     who writes it; gone soon after that server is
                       :writer    who wrote or took it last; stays, so that one who was taken for gone cannot come back
                       :stop      somebody wants it stopped
    headrace:stream-key:HASH      idempotency key → stream

Rules: no key without a time to live; a write goes through one script, which lets nobody write but who took the stream
last, and nothing behind its end, and in which repeating a write changes nothing. Every write says everything that keeps
a stream findable, so that a Redis that lost it all has it again. A call that brings no answer gives None.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from headrace.core.request import Ask, Sampling, Told
from headrace.core.timeline import Timeline
from headrace.gateway.shared import SharedRedis
from headrace.observe.record import Record
from headrace.protocol.openai import common_options
from headrace.server.streamlog import Ended

LEASE_S = 3.0
PREFIX = "headrace:stream"
PAGE = 1000
"""Entries a read."""

_ID = re.compile(r"[A-Za-z0-9_]{1,64}")

# 1: done; 2: done, and the last entry was there before; 0: another server has it, or it has ended; below 0: there is
# less than we wrote, namely up to -1 - x.
# KEYS log lease origin writer [key]; ARGV token, lease ms, ttl ms, origin or "", written so far, first position or "0",
# what becomes of the lease, id, then (position, block, state) of each entry.
_PUT = """
local holder = redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[1] then return 0 end
local writer = redis.call('GET', KEYS[4])
if writer and writer ~= ARGV[1] then return 0 end
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
local top, ended = 0, false
if newest[1] then
  top = tonumber(string.match(newest[1][1], '^%d+'))
  ended = newest[1][2][2] == ''
end
local last = #ARGV > 8 and tonumber(ARGV[#ARGV - 2]) or 0
if ended and last > top then return 0 end
if top < tonumber(ARGV[5]) then return -1 - top end
if ARGV[4] ~= '' then redis.call('SET', KEYS[3], ARGV[4], 'PX', ARGV[3]) end
for i = 9, #ARGV, 3 do
  if tonumber(ARGV[i]) > top then
    redis.call('XADD', KEYS[1], ARGV[i] .. '-0', 'b', ARGV[i + 1], 's', ARGV[i + 2])
  end
end
if ARGV[6] ~= '0' then redis.call('XTRIM', KEYS[1], 'MINID', ARGV[6] .. '-0') end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
redis.call('SET', KEYS[4], ARGV[1], 'PX', ARGV[3])
if KEYS[5] then
  local id = redis.call('GET', KEYS[5])
  if not id or id == ARGV[8] then redis.call('SET', KEYS[5], ARGV[8], 'PX', ARGV[3]) end
end
if ARGV[7] == 'hold' then redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2]) else redis.call('DEL', KEYS[2]) end
if last > 0 and last <= top then return 2 end
return 1
"""

# KEYS lease writer log; ARGV token, lease ms.
_TAKE = """
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
redis.call('SET', KEYS[2], ARGV[1], 'PX', math.max(tonumber(ARGV[2]), redis.call('PTTL', KEYS[3])))
return 1
"""

# KEYS key; ARGV id.
_FREE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

_PUT_SHA = hashlib.sha1(_PUT.encode(), usedforsecurity=False).hexdigest()


class State(msgspec.Struct, array_like=True, gc=False):
    """With the last event of a write: how far the answer was then."""

    ids: tuple[int, ...] = ()
    """Tokens behind the first `start`."""
    exact: bool = False
    """All its tokens are in the states."""
    whole: bool = False
    """Its text is all that it is."""
    tokens: int = 0
    length: int = 0
    """Characters of it; a paced answer's reader has fewer."""
    end: Ended | None = None
    start: int = 0
    """Not where the state before ended: that one may say some of these too, if nobody knew that it was written."""


class Origin(msgspec.Struct, array_like=True):
    """What another server must know to go on with an answer."""

    owner: str
    digest: bytes
    key: str
    """The hash that the idempotency key is kept under, "" without one."""
    chat: bool
    model: str
    fields: bytes | None
    """JSON, which holds any number; None: too large to be kept, the answer can be read but not gone on with."""
    size: int
    seed: int
    priority: int
    identity: tuple[str, int]
    family: str
    request_id: str
    method: str
    route: str
    caller: str
    """The name of its key, for the books."""
    plain: bool = False
    """It is answered by the simple event stream."""
    sampling: Sampling | None = None
    """See `Ask`."""

    def ask(self, salt: str, told: Told | None) -> Ask:
        """The request, gone on with from what was told."""
        fields: dict[str, Any] = msgspec.json.decode(self.fields or b"{}")
        options = replace(common_options(fields), priority=self.priority)
        sampling = None if told is None else self.sampling
        return Ask(self.chat, self.model, fields, self.size, options, self.seed, salt, told, sampling)

    def record(self, now: float) -> tuple[Record, Timeline]:
        """A new account of it."""
        timeline = Timeline(now)
        record = Record(self.request_id, self.method, self.route, timeline, status=200, model=self.model, stream=True)
        record.key = self.caller or None
        return record, timeline


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a log."""

    position: int
    block: bytes
    """b"" for the entry that is only the end."""
    state: State | None


@dataclass(frozen=True, slots=True)
class Put:
    """One write."""

    id: str
    key: str
    origin: bytes
    written: int
    first: int
    hold: bool
    """Keep the lease."""
    ttl_s: float
    entries: Sequence[Entry]


def key_hash(owner: str, key: str) -> str:
    return hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()[:32] if key else ""


class LogStore:
    """`token` names this process as a holder of leases."""

    def __init__(self, shared: SharedRedis, token: str, *, lease_s: float) -> None:
        self.lease_s = lease_s
        self._shared = shared
        self._token = token.encode()
        self._lease_ms = max(1, int(lease_s * 1000))

    @property
    def down(self) -> bool:
        """It did not answer last time."""
        return self._shared.down

    # Writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def put(self, puts: Sequence[Put]) -> list[int] | None:
        """All of them in one turn; for each what the script above gives."""

        async def make(client: Redis) -> list[int]:
            try:
                return await run(client)
            except NoScriptError:
                await client.script_load(_PUT)
                return await run(client)

        async def run(client: Redis) -> list[int]:
            pipeline = client.pipeline(transaction=False)
            for put in puts:
                keys, arguments = self._script(put)
                pipeline.evalsha(_PUT_SHA, len(keys), *keys, *arguments)
            return [int(answer) for answer in await pipeline.execute()]

        return await self._shared.call(make)

    async def claim(self, hash: str, id: str, ttl_s: float) -> str | None:
        """The stream that has the key: `id` if nobody had it."""

        async def make(client: Redis) -> str:
            name = f"{PREFIX}-key:{hash}"
            if await client.set(name, id, px=int(ttl_s * 1000), nx=True):
                return id
            return _text(await client.get(name)) or id

        return await self._shared.call(make)

    async def free(self, hash: str, id: str) -> None:
        """The key leads nowhere, if it led to that stream."""
        await self._shared.call(lambda client: client.eval(_FREE, 1, f"{PREFIX}-key:{hash}", id))

    async def drop(self, id: str, hash: str) -> None:
        """There is no such stream."""
        names = [_name(id, part) for part in ("log", "origin", "lease", "writer", "stop")]
        await self._shared.call(lambda client: client.delete(*names))
        if hash:
            await self.free(hash, id)

    async def take(self, id: str) -> bool | None:
        """Become the one who writes it; whoever did so before no longer can. False: somebody else is."""
        names = [_name(id, part) for part in ("lease", "writer", "log")]

        async def make(client: Redis) -> bool:
            return bool(await client.eval(_TAKE, len(names), *names, self._token, self._lease_ms))

        return await self._shared.call(make)

    async def ask_stop(self, id: str, ttl_s: float) -> bool:
        """Let whoever writes it stop it."""
        return bool(await self._shared.call(lambda client: client.set(_name(id, "stop"), 1, px=int(ttl_s * 1000))))

    # Reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def origin(self, id: str) -> Origin | bool | None:
        """False: there is no such stream."""
        if not _ID.fullmatch(id):
            return False

        async def make(client: Redis) -> Origin | bool:
            data: Any = await client.get(_name(id, "origin"))
            return False if data is None else msgspec.msgpack.decode(data, type=Origin)

        return await self._shared.call(make)

    async def held(self, id: str) -> bool | None:
        """Somebody writes it."""

        async def make(client: Redis) -> bool:
            return bool(await client.exists(_name(id, "lease")))

        return await self._shared.call(make)

    async def stops(self, ids: Sequence[str]) -> list[str] | None:
        """Those that somebody wants stopped."""

        async def make(client: Redis) -> list[str]:
            found = await client.mget([_name(id, "stop") for id in ids])
            return [id for id, value in zip(ids, found, strict=True) if value is not None]

        return await self._shared.call(make)

    async def entries(self, id: str, after: int) -> list[Entry] | None:
        """Those behind that position, a page of them."""

        async def make(client: Redis) -> list[Entry]:
            rows: Any = await client.xrange(_name(id, "log"), min=f"({after}-0", count=PAGE)
            return [_entry(row) for row in rows]

        return await self._shared.call(make)

    async def newest(self, id: str) -> Entry | bool | None:
        """The last entry; False if there is none."""

        async def make(client: Redis) -> Entry | bool:
            rows = await client.xrevrange(_name(id, "log"), count=1)
            return _entry(rows[0]) if rows else False

        return await self._shared.call(make)

    async def wait(self, id: str, after: int, seconds: float) -> list[Entry] | None:
        """As `entries`, but waits so long for the first one, on a connection of its own."""

        async def make(client: Redis) -> list[Entry]:
            answer: Any = await client.xread({_name(id, "log"): f"{after}-0"}, count=PAGE, block=int(seconds * 1000))
            return [_entry(row) for row in answer[0][1]] if answer else []

        return await self._shared.call(make, timeout_s=seconds + self._shared.timeout_s, listens=True)

    def _script(self, put: Put) -> tuple[list[str], list[bytes | str | int]]:
        keys = [_name(put.id, part) for part in ("log", "lease", "origin", "writer")]
        if put.key:
            keys.append(f"{PREFIX}-key:{put.key}")
        arguments: list[bytes | str | int] = [
            self._token, self._lease_ms, int(put.ttl_s * 1000), put.origin, put.written,
            put.first + 1 if put.first else 0, "hold" if put.hold else "free", put.id,
        ]  # fmt: skip
        for entry in put.entries:
            state = b"" if entry.state is None else msgspec.msgpack.encode(entry.state)
            arguments += (entry.position, entry.block, state)
        return keys, arguments


def _name(id: str, part: str) -> str:
    return f"{PREFIX}:{{{id}}}:{part}"


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else ""


def _entry(row: Any) -> Entry:
    id, fields = row
    state = fields[b"s"]
    return Entry(int(id.partition(b"-")[0]), fields[b"b"], msgspec.msgpack.decode(state, type=State) if state else None)
