"""API keys: what a server knows of them, and where that is kept.

    headrace keys add ─▶ `hr-…`, shown once ─▶ its digest and its rights ─▶ file or Redis ─▶ Keyring ─▶ who asks

Rules: a key itself is kept nowhere. It is drawn with 190 random bits, so nobody can try them all, and a fast hash
(SHA-256) is right: a slow one protects what people think up, and here it would only give strangers a way to keep the
server busy, since every request's key is hashed. For the same reason there is no salt: no two keys are alike, and no
table of hashes holds one. What a caller sends is hashed first and then compared, so that time says nothing of how much
of it was right. Names are for people, logs and books; they are not secret.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.core.errors import StartupError
from headrace.core.request import BATCH, INTERACTIVE
from headrace.gateway.buckets import MOST

SERVER_KEY = "server.key"
"""The name under which the key of that setting goes."""
MARK = "hr-"
LETTERS = 32
"""Of 62: 190 bits."""
_ALPHABET = string.ascii_letters + string.digits
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TENANT = re.compile(r"[ -~]{1,128}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
MOST_STREAMS = 100_000
HEAD = "# Written by `headrace keys`. A key's hash does not tell the key.\n"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key as it is kept."""

    hash: str
    """`sha256:` and hexadecimal digits."""
    created: int = 0
    """Unix time."""
    expires: int = 0
    """Unix time; 0: never."""
    models: tuple[str, ...] | None = None
    """Aliases; None: all."""
    rpm: int | None = None
    """Requests a minute; 0: no limit, None: the server's default. So are:"""
    tpm: int | None = None
    """Tokens a minute."""
    streams: int | None = None
    """Requests at the same time."""
    priority: str = "interactive"
    """The best class that it may ask for."""
    tenant: str = ""
    """Who shares cached prefixes and streams with it; empty: nobody."""


@dataclass(frozen=True, slots=True)
class Key:
    """A record, checked, with its name."""

    name: str
    record: Record

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.record.hash.removeprefix("sha256:"))

    @property
    def salt(self) -> str:
        """Whose prefixes it sees. No tenant can be called as a key is."""
        return f"tenant:{self.record.tenant}" if self.record.tenant else f"key:{self.owner}"

    @property
    def owner(self) -> str:
        """Differs from that of a key that was revoked and had the same name."""
        return f"{self.name}:{self.record.hash.removeprefix('sha256:')[:32]}"

    @property
    def priority(self) -> int:
        return BATCH if self.record.priority == "batch" else INTERACTIVE

    def over(self, now: float) -> bool:
        """Has it expired? `now`: Unix time."""
        return 0 < self.record.expires <= now


def new_secret() -> str:
    """A new key."""
    return MARK + "".join(secrets.choice(_ALPHABET) for _ in range(LETTERS))


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def hash_of(secret: str) -> str:
    """As it stands in a record."""
    return f"sha256:{digest_of(secret.encode()).hex()}"


def checked(name: str, record: Record) -> Key:
    """Raises StartupError that names the field."""

    def wrong(field: str, what: str) -> StartupError:
        return StartupError(f"keys.{name}.{field}: {what}")

    if not NAME.fullmatch(name):
        raise StartupError(f"keys.{name!r}: a name is 1 to 64 letters, digits, dots, dashes and underscores")
    if name == SERVER_KEY:
        raise StartupError(f"keys.{name}: is the name of the key in the setting server.key; choose another")
    if not _DIGEST.fullmatch(record.hash):
        raise wrong("hash", "should be sha256: and 64 hexadecimal digits; make keys with `headrace keys add`")
    for field, most in (("rpm", MOST), ("tpm", MOST), ("streams", MOST_STREAMS)):
        value = getattr(record, field)
        if value is not None and not 0 <= value <= most:
            raise wrong(field, f"is {value}; give 0 (no limit) to {most}")
    if record.priority not in ("interactive", "batch"):
        raise wrong("priority", f"{record.priority!r} is not one of interactive, batch")
    if record.tenant and not _TENANT.fullmatch(record.tenant):
        raise wrong("tenant", "is 1 to 128 printable ASCII characters")
    if record.models is not None and not all(record.models):
        raise wrong("models", "names a model without a name")
    return Key(name, record)


def read_records(text: str) -> dict[str, Key]:
    """The keys in a file's text, by name. Raises StartupError."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise StartupError(f"not valid TOML: {error}") from None
    tables = document.pop("keys", {})
    if document or not isinstance(tables, dict):
        raise StartupError("should hold tables [keys.NAME] and nothing else")
    return {name: checked(name, _record(name, table)) for name, table in tables.items()}


def _record(name: str, table: Any) -> Record:
    try:
        return msgspec.convert(table, Record)
    except msgspec.ValidationError as error:
        raise StartupError(f"keys.{name}: {error}") from None


def write_records(keys: Iterable[Key]) -> str:
    """The text of a file that holds them."""
    parts = [HEAD]
    for key in keys:
        name = key.name if "." not in key.name else f'"{key.name}"'
        rows = msgspec.to_builtins(key.record).items()
        parts.append(f"\n[keys.{name}]\n" + "".join(f"{field} = {_toml(value)}\n" for field, value in rows))
    return "".join(parts)


def _toml(value: Any) -> str:
    # Numbers, texts and lists of texts look the same in both, and of a text JSON escapes all that TOML wants escaped.
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


class Keyring:
    """Keys by their digest: never changed, a new one takes its place."""

    def __init__(self, keys: Mapping[str, Key], server_key: str = "") -> None:
        """`server_key`: one more, with every right; empty: none."""
        self._by_digest = {key.digest: key for key in keys.values()}
        self._by_name = dict(keys)
        if server_key:
            whole = Key(SERVER_KEY, Record(hash_of(server_key), rpm=0, tpm=0, streams=0))
            self._by_digest[whole.digest] = self._by_name[SERVER_KEY] = whole

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return f"<Keyring [{len(self)} keys]>"

    def find(self, secret: bytes) -> Key | None:
        """The key that this is."""
        digest = digest_of(secret)
        key = self._by_digest.get(digest)
        # The table compares digests, of which nothing can be learned about keys; this is so that nobody need prove it.
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    def named(self, name: str) -> Key | None:
        return self._by_name.get(name)
