"""The one API key. Bytes in, yes or no out; nothing here can fail on a strange header."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from headrace.core.errors import Unauthorized


class Key:
    """Compares in constant time. `secret` is not empty."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def __repr__(self) -> str:
        return "Key(…)"

    def check(self, authorization: Sequence[bytes]) -> None:
        """`authorization`: the values of all such headers. Raises Unauthorized unless it is one with the key."""
        if not authorization:
            raise Unauthorized("an API key is needed: send it as `Authorization: Bearer KEY`")
        scheme, _, given = authorization[0].partition(b" ")
        # Two headers: whoever stands in front of us may have checked the other one.
        if len(authorization) > 1 or scheme.lower() != b"bearer" or not hmac.compare_digest(given, self._secret):
            raise Unauthorized("the API key is wrong: send one key as `Authorization: Bearer KEY`")
