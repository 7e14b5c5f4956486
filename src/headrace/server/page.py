"""The chat page: one static file, read once, served with a policy that allows exactly what is in it."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("web") / "index.html"
_INLINE = re.compile(rb"<(script|style)\b[^>]*>(.*?)</\1\s*>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Page:
    """The file and its headers."""

    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]


def load_page(path: Path = PAGE) -> Page | None:
    """The page at `path`; None if there is no such file."""
    try:
        body = path.read_bytes()
    except OSError:
        return None
    return Page(
        body,
        (
            (b"content-security-policy", _policy(body)),
            (b"cache-control", b"no-cache"),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
        ),
    )


def _policy(body: bytes) -> bytes:
    """Allows the page's own inline scripts and styles by their hashes, requests to this server, and nothing else."""
    hashes: dict[bytes, list[bytes]] = {b"script": [], b"style": []}
    for kind, text in _INLINE.findall(body):
        digest = base64.b64encode(hashlib.sha256(text).digest())
        hashes[kind.lower()].append(b"'sha256-" + digest + b"'")
    scripts, styles = (b" ".join(found) or b"'none'" for found in hashes.values())
    return (
        b"default-src 'none'; script-src " + scripts + b"; style-src " + styles + b"; connect-src 'self'; "
        b"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
