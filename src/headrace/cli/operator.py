"""A client of a running server's admin API, for the verbs that need one.

It finds the server where the settings would start it, and takes its key from there too. A failure is one line.
"""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import quote, urlsplit

from headrace.cli.serve import EVERY_ADDRESS
from headrace.core.errors import StartupError
from headrace.settings import Config

TIMEOUT_S = 30.0
PREFIX = "/admin/v1/"


class Operator:
    """Asks one server. `url`: of its admin API; empty: as `config` says. Raises StartupError if that is none."""

    def __init__(self, config: Config, url: str = "") -> None:
        self._key = config.server.admin_key
        self.url = url.rstrip("/") or address_of(config)
        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
            raise StartupError(f"--at {url}: should read http://HOST:PORT")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, port
        self._base = parts.path

    def __repr__(self) -> str:
        return f"<Operator [{self.url}]>"

    def get(self, *path: str) -> Any:
        return self.ask("GET", *path)

    def ask(self, method: str, *path: str, body: Any = None) -> Any:
        """The JSON of the answer. `path`: below /admin/v1. Raises StartupError with what the server says."""
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "connection": "close"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        target = self._base + PREFIX + "/".join(quote(part, safe=":/") for part in path)
        connection = self._kind(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request(method, target, data, headers)
            response = connection.getresponse()
            status, said = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise StartupError(f"{self.url}: no answer from a server there ({_why(error)})") from None
        finally:
            connection.close()
        try:
            answer = json.loads(said) if said else None
        except ValueError:
            raise StartupError(f"{self.url}: what answers there is no Headrace (status {status})") from None
        if status >= 400:
            raise StartupError(self._refused(status, answer))
        return answer

    def _refused(self, status: int, answer: Any) -> str:
        error = answer.get("error") if isinstance(answer, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        if status == 401 and not self._key:
            return f"{self.url}: the admin API needs its key: set HEADRACE_SERVER_ADMIN_KEY"
        if status == 401:
            return f"{self.url}: the admin API takes another key than HEADRACE_SERVER_ADMIN_KEY"
        return f"{self.url}: {message or f'refused with status {status}'}"


def address_of(config: Config) -> str:
    """Where a server of these settings has its admin API, as this machine can reach it."""
    server = config.server
    host = (server.admin_host if server.admin_port else "") or server.host
    host = EVERY_ADDRESS.get(host, host)
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{server.admin_port or server.port}"


def _why(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return text.lower()
