"""The Redis or Valkey tier: full blocks, shared by all servers with the same model and settings.

    headrace:kv:<fingerprint>:<key>  →  the blob, with a time to live

Rules: from the store's threads only, and never raises; a server that does not answer costs one timeout, then nobody
asks it until the breaker lets a trial through; the log gets a line every ten seconds at most, without the address,
which may hold a password.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

import redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError
from redis.retry import Retry

from headrace.core.breaker import Breaker
from headrace.core.clock import Clock
from headrace.core.errors import StartupError
from headrace.kv.blob import Block, Damaged, encode, parse

log = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0
_FULL_PAUSE_S = 10.0
"""How long nothing is written to a server that has no memory left."""


class Shared:
    """See the module. Raises StartupError if `url` is none of a Redis; a server that is not there is no error.

    `timeout`: s for connecting and for each answer. `ttl`: s, give or take a tenth by `random` in [0, 1), so that what
    was written together does not go together.
    """

    def __init__(
        self, url: str, engine: bytes, clock: Clock, *, timeout: float, ttl: float, random: Callable[[], float]
    ) -> None:
        self._prefix = f"headrace:kv:{engine.hex()}:"
        self._clock = clock
        self._ttl = ttl
        self._random = random
        self._lock = threading.Lock()
        self._breaker = Breaker()
        self._full_until = 0.0
        self._log_after = 0.0
        self.errors = 0
        self.damaged = 0
        try:
            self._redis = redis.Redis.from_url(
                url,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                retry=Retry(NoBackoff(), 0),  # the client's own would multiply the timeout
                health_check_interval=0,
                protocol=2,
            )
        except ValueError as error:
            raise StartupError(
                "tiers.redis_url is not the address of a Redis: it begins with redis:// or rediss://"
            ) from error

    @property
    def down(self) -> bool:
        """It did not answer lately."""
        with self._lock:
            return self._breaker.open

    @property
    def willing(self) -> bool:
        """A call now would go out, be it a trial."""
        with self._lock:
            return self._breaker.ready(self._clock())

    def get(self, key: bytes) -> tuple[Block, bytes] | None:
        """The block and its KV; None if it is not there, is damaged (then it is removed), or nobody answers."""
        data = self._call(lambda: self._redis.get(self._prefix + key.hex()))
        if not isinstance(data, bytes):
            return None
        try:
            return parse(data, key)
        except Damaged:
            with self._lock:
                self.damaged += 1
            self._call(lambda: self._redis.delete(self._prefix + key.hex()))
            return None

    def put(self, block: Block, payload: bytes) -> int:
        """Bytes written; 0 if it could not be."""
        if self._clock() < self._full_until:
            return 0
        data = b"".join(encode(block, payload))
        ttl = int(1000 * self._ttl * (0.9 + 0.2 * self._random()))
        done = self._call(lambda: self._redis.set(self._prefix + block.key.hex(), data, px=ttl))
        return len(data) if done else 0

    def close(self) -> None:
        with suppress(RedisError, OSError):
            self._redis.close()

    def _call(self, command: Callable[[], object]) -> object:
        """What it answers, or None."""
        with self._lock:
            if not self._breaker.allow(self._clock()):
                return None
        try:
            answer = command()
        except OutOfMemoryError as error:
            self._full_until = self._clock() + _FULL_PAUSE_S
            self._tell(error)
            with self._lock:
                self._breaker.success()  # it answers, and what it has can be read
            return None
        except (RedisError, OSError) as error:
            with self._lock:
                self._breaker.failure(self._clock())
            self._tell(error)
            return None
        with self._lock:
            self._breaker.success()
        return answer

    def _tell(self, error: Exception) -> None:
        with self._lock:
            self.errors += 1
            now = self._clock()
            if now < self._log_after:
                return
            self._log_after = now + _LOG_EVERY_S
        log.warning("Redis is of no use at the moment (%s); going on without it", type(error).__name__)
