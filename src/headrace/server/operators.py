"""Who may use the admin API: whoever has its key; without one, a person at this very machine.

    key set ────────────────────────────── that key, compared in constant time; a client's key is any other wrong one
    none, own loopback address ─────────── programs of this machine
    none, main loopback address, no keys ─ programs of this machine: nothing is guarded there anyway
    none, anywhere else ────────────────── nobody

Rules: where clients need a key, a proxy may stand in front, and what comes from it comes from loopback too: so the main
address is no proof then. A browser is no program of this machine: a page of any site can make it send requests here.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from urllib.parse import urlsplit

from headrace.core.errors import Forbidden, RouteNotFound, Unauthorized
from headrace.gateway.guard import bearer
from headrace.server.exchange import Exchange
from headrace.server.launch import is_loopback


class Operators:
    """The check of admin rows. `key`: "" for none; `local`: do programs of this machine need none, as of now?"""

    def __init__(self, key: str, *, local: Callable[[], bool]) -> None:
        self._key = key.encode()
        self._local = local

    def __repr__(self) -> str:
        return f"<Operators [{'key' if self._key else 'local' if self._local() else 'nobody'}]>"

    def __call__(self, exchange: Exchange) -> None:
        """Raises Unauthorized, Forbidden, RouteNotFound."""
        if self._key:
            self._check_key(exchange)
        elif self._local():
            _check_local(exchange)
        else:
            raise RouteNotFound("the admin API is off here: set server.admin_key, or a server.admin_port on loopback")

    def _check_key(self, exchange: Exchange) -> None:
        try:
            given = bearer(exchange.values(b"authorization"))
        except Unauthorized:
            given = b""
        if not hmac.compare_digest(given, self._key):
            raise Unauthorized("this needs the admin key, server.admin_key: send it as `Authorization: Bearer KEY`")


def _check_local(exchange: Exchange) -> None:
    """Raises Forbidden if a web page may have sent it, under whatever name it found us."""
    if exchange.values(b"origin") or not all(_names_loopback(host) for host in exchange.values(b"host")):
        raise Forbidden("without server.admin_key only programs of this machine may ask, by a loopback address")


def _names_loopback(host: bytes) -> bool:
    try:
        name = urlsplit(b"//" + host).hostname or b""
    except ValueError:
        return False
    return name == b"localhost" or is_loopback(name.decode("ascii", "replace"))
