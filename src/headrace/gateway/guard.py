"""Who may ask what: the port behind which keys and limits stand (`keyring_guard`), and the two simplest guards.

    header ── identify ──▶ Caller ── admit(request) ──▶ Permit ── close(usage) ──▶ booked
              401                    403, 429

Rules: whoever was admitted closes its permit, however it ends; usage is our own count, also of what was cut short.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.core.errors import Unauthorized
from headrace.core.request import INTERACTIVE, Ask
from headrace.observe.record import Outcome


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a key stands for."""

    name: str = ""
    """Of the key, for logs and books; never the key itself."""
    salt: str = ""
    """The tenant: callers of one salt share cached prefixes."""
    priority: int = INTERACTIVE
    """The best class that it may ask for."""
    models: frozenset[str] | None = None
    """Aliases that it may use; None: all."""
    owner: str = ""
    """Whom its streams and timelines belong to: tells a key from a former one of the same name."""


ANYBODY = Caller()


class Permit(Protocol):
    """An admitted request."""

    def close(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int, outcome: Outcome) -> None:
        """It is over, that way, and cost that much. Only the first call counts."""
        ...


class Guard(Protocol):
    """On the event loop. It never lets a slow store stand in the way of a request."""

    async def identify(self, authorization: Sequence[bytes]) -> Caller:
        """`authorization`: the values of all such headers. Raises Unauthorized."""
        ...

    async def admit(self, caller: Caller, ask: Ask) -> Permit:
        """Raises Forbidden, RateLimited."""
        ...


class NoPermit:
    """Nothing is booked."""

    def close(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int, outcome: Outcome) -> None:
        pass


NO_PERMIT = NoPermit()


class OpenGuard:
    """Lets everybody do everything."""

    async def identify(self, authorization: Sequence[bytes]) -> Caller:
        return ANYBODY

    async def admit(self, caller: Caller, ask: Ask) -> Permit:
        return NO_PERMIT


class KeyGuard(OpenGuard):
    """One key for all, compared in constant time. `secret` is not empty."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def __repr__(self) -> str:
        return "KeyGuard(…)"

    async def identify(self, authorization: Sequence[bytes]) -> Caller:
        if not hmac.compare_digest(bearer(authorization), self._secret):
            raise Unauthorized("the API key is wrong: send one key as `Authorization: Bearer KEY`")
        return ANYBODY


def bearer(authorization: Sequence[bytes]) -> bytes:
    """The key in the only header there may be. Raises Unauthorized."""
    if not authorization:
        raise Unauthorized("an API key is needed: send it as `Authorization: Bearer KEY`")
    scheme, _, given = authorization[0].partition(b" ")
    # Two headers: whoever stands in front of us may have checked the other one.
    if len(authorization) > 1 or scheme.lower() != b"bearer":
        raise Unauthorized("the API key is wrong: send one key as `Authorization: Bearer KEY`")
    return given
