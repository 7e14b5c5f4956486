"""The admin API of a server with these settings: where it is, who may use it, what it can do.

    server.admin_port 0 ─▶ rows of the main address          else ─▶ a socket of its own, with health and metrics

Rule: see `server.operators` for who may use it; that depends on the socket on which it is.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headrace.config import for_engine, secret
from headrace.core.errors import StartupError
from headrace.gateway.pool import Pool
from headrace.gateway.spec import EngineSpec, parse_engine
from headrace.gateway.switch import Switcher
from headrace.server.admin import admin_routes
from headrace.server.app import App
from headrace.server.launch import ADMIN, is_loopback, listen
from headrace.server.operators import Operators
from headrace.server.route import Route, Routes
from headrace.settings import Config


class Admin:
    """Of the server that listens on `main`. `guarded`: do clients need a key, as of now? `more`: further rows.
    Raises StartupError if its own address cannot be."""

    def __init__(
        self,
        config: Config,
        pool: Pool,
        main: socket.socket,
        *,
        guarded: Callable[[], bool],
        more: Iterable[Route] = (),
    ) -> None:
        server = config.server
        self._config = config
        self._own: socket.socket | None = None
        if server.admin_host and not server.admin_port:
            raise StartupError(f"server.admin_host: {server.admin_host} needs a port of its own; set server.admin_port")
        if server.admin_port:
            host = server.admin_host or server.host
            self._own = listen(host, server.admin_port, guarded=bool(server.admin_key), side=ADMIN)
        self.switcher = Switcher(pool, time.monotonic, drain_s=server.drain_s)
        self.check = operators(
            server.admin_key, self._own or main, guarded=guarded if self._own is None else lambda: False
        )
        rows = admin_routes(pool, self.switcher, time.monotonic, check=self.check, parse=self._parse, more=more)
        self._rows = rows
        self.rows = rows if self._own is None else ()
        """Those of the main address."""

    def beside(self, app: App) -> dict[socket.socket, Routes]:
        """Its own socket and what that has, if there is one."""
        if self._own is None:
            return {}
        return {self._own: Routes(*self._rows, *app.operating, check=self.check)}

    async def close(self) -> None:
        """Give up what runs."""
        await self.switcher.close()

    def _parse(self, name: str, table: Mapping[str, Any]) -> EngineSpec:
        # A declaration may send a key anywhere: only those that the file gives to engines can be had.
        named = {spec.key_env for spec in self._config.engines if spec.key_env}
        spec = parse_engine(name, table, secret=secret, named=named)
        for_engine(self._config, spec)  # its settings are checked now, not when it is loaded
        return spec


def operators(key: str, sock: socket.socket, *, guarded: Callable[[], bool]) -> Operators:
    """Who may use the admin API on that socket; `guarded`: others come there too, and need a key."""
    loopback = is_loopback(sock.getsockname()[0])
    return Operators(key, local=lambda: loopback and not guarded())
