"""The guard of a server with many keys.

    identify:  header ─▶ look, once a second ─▶ Keyring ─▶ Caller          401
    admit:     Caller ─▶ Limiter ─▶ KeyPermit ── close ─▶ settled, booked  429

Rules: a store is looked at when a request comes and the last look is over `look_s` ago; who comes meanwhile waits for
the same look, so that a revoked key is not let in because the server had nothing to do for an hour. A store that does
not answer, or holds nonsense, leaves the keys as they were last. Without keys everybody is let in, until there is a
first one: from then on nobody without, not even if the last one is revoked. A server that cannot tell at its start
whether there are keys lets nobody in until it can. Of an answer that was worked on and told no figures, the estimate is
booked: else whoever hangs up in time would pay nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Hashable, Sequence

from headrace.core.clock import Clock
from headrace.core.errors import RateLimited, StartupError, Unauthorized
from headrace.core.request import Ask
from headrace.gateway.buckets import NO_LIMITS, Allowance
from headrace.gateway.guard import ANYBODY, NO_PERMIT, Caller, Permit, bearer
from headrace.gateway.key_store import ABSENT, KeyStore
from headrace.gateway.keys import SERVER_KEY, Key, Keyring
from headrace.gateway.limits import Limiter, Slot
from headrace.gateway.model import BYTES_PER_TOKEN
from headrace.gateway.usage import MOST_TOKENS, Usage
from headrace.observe.record import Outcome

LOOK_S = 1.0
ANSWER = 256
"""Tokens of an answer that are put by while it is written, at most; the rest is settled at its end."""
NOTHING_DONE: tuple[Outcome, ...] = ("rejected", "invalid")
"""Ends of requests for which nothing was computed, if nothing of an answer is there."""
CUT_SHORT: tuple[Outcome, ...] = ("error", "cancelled")

log = logging.getLogger(__name__)


class KeyringGuard:
    """On one event loop. `store` None: no keys but `server_key`. `wall`: Unix time in s.

    `defaults`: for keys that do not say otherwise.

    `isolate` False: all keys share cached prefixes. `usage` None: nothing is booked.
    """

    def __init__(
        self,
        store: KeyStore | None,
        limiter: Limiter,
        usage: Usage | None,
        clock: Clock,
        wall: Callable[[], float],
        *,
        server_key: str = "",
        defaults: Allowance = NO_LIMITS,
        isolate: bool = True,
        always: bool = False,
        look_s: float = LOOK_S,
    ) -> None:
        """`always`: nobody comes in without a key, even if there was never one."""
        self._store = store
        self._limiter = limiter
        self._usage = usage
        self._clock = clock
        self._wall = wall
        self._server_key = server_key
        self._defaults = defaults
        self._isolate = isolate
        self._look_s = look_s
        self._ring = Keyring({}, server_key)
        self._version: Hashable | None = None
        self._looked = False
        """What is kept was looked for once, found or not."""
        self._next_look = -math.inf
        self._looking: asyncio.Task[None] | None = None
        self.guarded = always or bool(server_key)
        """A key is asked for."""

    def __repr__(self) -> str:
        return f"KeyringGuard({self._ring!r})"

    async def start(self) -> None:
        """The first look. Raises StartupError if what is kept makes no sense."""
        await self._look()

    async def identify(self, authorization: Sequence[bytes]) -> Caller:
        """Raises Unauthorized."""
        if self._clock() >= self._next_look:
            await self._look_again()
        if not self.guarded:
            return ANYBODY
        key = self._ring.find(bearer(authorization))
        if key is None:
            raise Unauthorized("the API key is wrong: send one key as `Authorization: Bearer KEY`")
        if key.over(self._wall()):
            raise Unauthorized("the API key has expired: ask for a new one")
        models = key.record.models
        allowed = None if models is None else frozenset(models)
        return Caller(key.name, self._salt(key), key.priority, allowed, key.owner)

    async def admit(self, caller: Caller, ask: Ask) -> Permit:
        """Raises RateLimited; Unauthorized if the key was revoked in the last moment."""
        if caller is ANYBODY:
            return NO_PERMIT
        key = self._ring.named(caller.name)
        if key is None or key.owner != caller.owner:
            raise Unauthorized("the API key was revoked")
        try:
            slot = await self._limiter.take(key.name, self._allowance(key), estimate(ask))
        except RateLimited:
            if self._usage is not None:
                self._usage.book(key.name, ask.model, "limited")
            raise
        return KeyPermit(slot, self._usage, key.name, ask)

    def _salt(self, key: Key) -> str:
        # The empty salt is a tenant as any other, but for the prefixes that the operator pins or that are mined, which
        # are of no salt: so the key that is the operator's own profits from them as if there were no other.
        return key.salt if self._isolate and key.name != SERVER_KEY else ""

    def _allowance(self, key: Key) -> Allowance:
        record, usual = key.record, self._defaults
        return Allowance(
            usual.requests if record.rpm is None else record.rpm,
            usual.tokens if record.tpm is None else record.tpm,
            usual.streams if record.streams is None else record.streams,
        )

    async def _look_again(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look_calmly())
        await asyncio.shield(self._looking)

    async def _look_calmly(self) -> None:
        try:
            await self._look()
        except StartupError as error:
            log.warning("keys: %s; those that were known stay", error.message)
        finally:
            self._next_look = self._clock() + self._look_s

    async def _look(self) -> None:
        store = self._store
        version = None if store is None else await store.version()
        if store is None or (self._looked and version in (None, self._version)):
            return
        self._looked = True
        # Also if they cannot be read: whoever made keys does not want an open server.
        self.guarded = self.guarded or version != ABSENT
        try:
            keys = await store.read()
        except StartupError:
            self._version = version  # said once, not once a second
            raise
        if keys is None:
            return
        self._version = version
        self._ring = Keyring(keys, self._server_key)


class KeyPermit:
    """An admitted request of a key."""

    __slots__ = ("_answer", "_model", "_name", "_prompt", "_slot", "_usage")

    def __init__(self, slot: Slot, usage: Usage | None, name: str, ask: Ask) -> None:
        self._slot = slot
        self._usage = usage
        self._name = name
        self._model = ask.model
        self._prompt = prompt_estimate(ask)
        self._answer = 0 if ask.options.stream else answer_estimate(ask)
        """Of a stream every piece is counted as it comes."""

    def close(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int, outcome: Outcome) -> None:
        if self._slot.closed:
            return
        counts = (prompt_tokens, cached_tokens, completion_tokens)
        # Another server's figures may be anything.
        prompt_tokens, cached_tokens, completion_tokens = (min(max(0, count), MOST_TOKENS) for count in counts)
        if outcome in NOTHING_DONE and not completion_tokens:
            prompt_tokens = cached_tokens = 0
        elif not prompt_tokens:
            prompt_tokens = self._prompt
            if outcome in CUT_SHORT and not completion_tokens:
                completion_tokens = self._answer
        self._slot.close(prompt_tokens + completion_tokens)
        if self._usage is not None:
            self._usage.book(self._name, self._model, outcome, prompt_tokens, cached_tokens, completion_tokens)


def estimate(ask: Ask) -> int:
    """Tokens to put by for a request before it is known how many it takes."""
    return prompt_estimate(ask) + answer_estimate(ask)


def prompt_estimate(ask: Ask) -> int:
    return math.ceil(ask.size / BYTES_PER_TOKEN)


def answer_estimate(ask: Ask) -> int:
    options = ask.options
    return options.n * (ANSWER if options.max_tokens is None else min(options.max_tokens, ANSWER))
