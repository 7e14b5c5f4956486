"""Where a server listens, read from its URL once."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass

from headrace_bench.fault import Misuse


@dataclass(frozen=True, slots=True)
class Place:
    """`prefix` is the path before `/v1`, without a slash at its end."""

    host: str
    port: int
    tls: bool
    prefix: str = ""

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    @property
    def authority(self) -> str:
        """As the Host header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"


def parse(url: str) -> Place:
    """`http://host:port`, with or without `/v1` behind it. Raises Misuse."""
    example = "give it as http://127.0.0.1:8000"
    if not url.isascii() or any(mark.isspace() or not mark.isprintable() for mark in url):
        raise Misuse(f"the server's URL {url!r} has characters that no URL has: {example}")
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise Misuse(f"the server's URL {url!r} cannot be read ({error}): {example}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Misuse(f"the server's URL {url!r} is not of the form http://HOST:PORT: {example}")
    try:
        parts.hostname.encode("idna")  # as the system will, to look it up
    except UnicodeError as error:
        raise Misuse(f"the server's URL {url!r} has a host that no name can be ({error}): {example}") from None
    if parts.username is not None or parts.query or parts.fragment:
        raise Misuse(f"the server's URL {url!r} has more in it than a place: {example}, and a key by its own flag")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Place(parts.hostname, port or (443 if tls else 80), tls, prefix)
