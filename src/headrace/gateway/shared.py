"""The Redis or Valkey that servers behind one load balancer have in common: for limits, keys and streams.

Rules: nothing here raises because of the other server, and no request depends on it: one that does not answer, or has
no memory left, costs one timeout, then nobody asks it until the breaker lets a trial through. The log gets a line every
ten seconds at most, without the address, which may hold a password. Calls have PLACES, so that a burst does not open a
connection each; who finds none free within its timeout goes without an answer, which says nothing of the other server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from headrace.core.breaker import Breaker
from headrace.core.clock import Clock
from headrace.core.errors import StartupError

T = TypeVar("T")
LOG_EVERY_S = 10.0
PLACES = 32
"""Calls at the same time."""

log = logging.getLogger(__name__)


class SharedRedis:
    """On one event loop. Raises StartupError if `url` is none of a Redis; a server that is not there is no error.

    `timeout_s`: for connecting and for each call.
    """

    def __init__(self, url: str, clock: Clock, *, timeout_s: float) -> None:
        try:
            self.client: Redis = Redis.from_url(
                url,
                protocol=2,
                socket_timeout=None,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
                max_connections=2**31,  # PLACES are what limits them; calls that only wait have none
            )
        except ValueError:
            raise StartupError("shared.redis_url: should read redis://HOST:PORT/DB or rediss://…") from None
        self._clock = clock
        self.timeout_s = timeout_s
        self._breaker = Breaker()
        self._places = asyncio.Semaphore(PLACES)
        self._logged = -LOG_EVERY_S
        self.errors = 0
        """Calls that came to nothing."""

    def __repr__(self) -> str:
        return f"<SharedRedis [{'down' if self.down else 'up'}]>"

    @property
    def down(self) -> bool:
        """It did not answer last time."""
        return self._breaker.open

    async def call(
        self, make: Callable[[Redis], Awaitable[T]], *, timeout_s: float | None = None, listens: bool = False
    ) -> T | None:
        """What `make(client)` gives; None if there was no answer.

        `timeout_s` replaces the usual one. `listens`: it does nothing but wait in Redis, and needs no place for that.
        """
        if not self._breaker.ready(self._clock()):
            return None
        until = asyncio.get_running_loop().time() + (self.timeout_s if timeout_s is None else timeout_s)
        if listens:
            return await self._call(make, until, waited=False)
        waited = self._places.locked()
        try:
            async with asyncio.timeout_at(until):
                await self._places.acquire()
        except TimeoutError:
            self.errors += 1
            return None
        try:
            return await self._call(make, until, waited=waited)
        finally:
            self._places.release()

    async def _call(self, make: Callable[[Redis], Awaitable[T]], until: float, *, waited: bool) -> T | None:
        """`until`: of the loop's time. `waited`: part of the timeout was spent before."""
        if not self._breaker.allow(self._clock()):
            return None
        try:
            async with asyncio.timeout_at(until):
                value = await make(self.client)
        except TimeoutError as error:
            if waited and not self.down:
                # It had less than its timeout; whoever need not wait for a place will find out.
                self.errors += 1
            else:
                self._failed(error)
            return None
        except (RedisError, OSError) as error:
            self._failed(error)
            return None
        except BaseException:
            # Given up, or `make` failed by itself: not its fault, and no success either. The next call finds out; if
            # this one was the trial, and that was not taken back, there would never be another.
            self._breaker.forget()
            raise
        self._breaker.success()
        return value

    async def close(self) -> None:
        await self.client.aclose()

    def _failed(self, error: Exception) -> None:
        now = self._clock()
        self.errors += 1
        self._breaker.failure(now)
        if now - self._logged >= LOG_EVERY_S:
            self._logged = now
            log.warning("shared Redis: no answer (%s); going on without it", type(error).__name__)
