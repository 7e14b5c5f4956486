"""Which web pages may read our answers: cross-origin resource sharing.

    preflight (OPTIONS, before the key) ──▶ 204: what the path's row in the table answers, and which headers may be sent
    any request with an `Origin`        ──▶ its answer, errors too, says whether that origin may read it

Rules: without a list of origins there is none of this. An origin is allowed when it is in the list, letter for letter,
or the list is `*`; credentials (cookies) are never allowed, keys travel in `Authorization`. What goes out was made at
the start from the settings and the path table: nothing of it is the client's text. Which origins are in the list is
checked by the browser alone: this protects nobody from anything but a foreign page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Self
from urllib.parse import urlsplit

from headrace.core.errors import StartupError
from headrace.server.exchange import Exchange
from headrace.server.route import Route

Pairs = tuple[tuple[bytes, bytes], ...]

ANY = "*"
ALLOW_HEADERS = ("authorization", "content-type", "last-event-id", "x-request-id", "idempotency-key")
"""What a page may send beyond what every page may."""
EXPOSE_HEADERS = ("x-request-id", "retry-after", "server-timing", "x-headrace-stream")
"""What a page may read beyond what every page may."""
MAX_AGE_S = 7200
"""How long a browser may keep a preflight's answer; Chromium takes no more. Each one is a round trip before TTFT."""

_VARY = (b"vary", b"Origin")
_EXPOSE = (b"access-control-expose-headers", ", ".join(EXPOSE_HEADERS).encode())
_PREFLIGHT: Pairs = (
    (b"access-control-allow-headers", ", ".join(ALLOW_HEADERS).encode()),
    (b"access-control-max-age", b"%d" % MAX_AGE_S),
)
_HOST = re.compile(r"[a-z0-9.-]+|\[[0-9a-f:.]+\]")
_PORTS = {"http": 80, "https": 443}


class Cors:
    """The answer to every `Origin`. `origins` as browsers write them, or `*` alone."""

    def __init__(self, origins: Iterable[str]) -> None:
        given = tuple(origins)
        self._allowed = {origin.encode(): _readable(origin) for origin in given if origin != ANY}
        self._else: Pairs = _readable(ANY) if ANY in given else (_VARY,)

    @classmethod
    def of(cls, setting: str) -> Self | None:
        """From a comma-separated list; None for an empty one. Raises StartupError."""
        origins = [origin for part in setting.split(",") if (origin := part.strip())]
        if not origins:
            return None
        if ANY in origins and len(origins) > 1:
            raise StartupError("server.cors_origins: `*` allows every page, so it stands alone")
        return cls(origin if origin == ANY else _origin(origin) for origin in origins)

    def headers(self, origins: Sequence[bytes]) -> Pairs:
        """What each answer carries to a request with these `Origin` headers."""
        if len(origins) != 1:
            return (_VARY,)
        return self._allowed.get(origins[0], self._else)

    def preflight(self, exchange: Exchange, route: Route | None) -> Pairs | None:
        """What the answer to a browser's question consists of, besides `headers`; None if this is not one, or is one
        for a path that there is not."""
        if exchange.method != "OPTIONS" or route is None:
            return None
        if not exchange.values(b"origin") or not exchange.values(b"access-control-request-method"):
            return None
        if len(self.headers(exchange.values(b"origin"))) == 1:
            return ()  # it may not read anything, so there is nothing to say
        return ((b"access-control-allow-methods", ", ".join(route.allow).encode()), *_PREFLIGHT)


def _readable(origin: str) -> Pairs:
    return ((b"access-control-allow-origin", origin.encode()), _VARY, _EXPOSE)


def _origin(text: str) -> str:
    """An origin as browsers write it: `scheme://host`, and the port unless it is the scheme's own. Raises
    StartupError."""
    try:
        parts = urlsplit(text.lower())
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    host = parts.netloc.removesuffix(f":{port}")
    if parts.scheme not in _PORTS or not _HOST.fullmatch(host) or parts.path or parts.query or parts.fragment:
        raise StartupError(
            f"server.cors_origins: {text!r} is no origin; write `https://HOST` or `https://HOST:PORT`, without a path"
        )
    return f"{parts.scheme}://{host}" + ("" if port is None or port == _PORTS[parts.scheme] else f":{port}")
