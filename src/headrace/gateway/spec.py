"""What is declared of engines and aliases: plain tables, from a file or a request, become types that cannot be wrong.

    [engines.NAME]  ─▶ EngineSpec       an engine: how to reach it or what to load, and how long to wait for it
    [aliases.NAME]  ─▶ AliasSpec        a name that clients use: which engines answer for it, by weight

Rules: whatever is wrong is a StartupError of one line that begins with the dotted field. Secrets are named, not
written: the variable is looked up by whoever may read the environment. The values of `engine` and `slo` are checked by
`config`, which knows their rows.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast, get_args
from urllib.parse import urlsplit

from headrace.core.errors import StartupError
from headrace.gateway.backend import Kind
from headrace.protocol.api_path import api_path
from headrace.protocol.continuation import Flavour as Known

Flavour = Literal["auto", Known]
Promote = Literal["off", "auto"]
Secret = Callable[[str], str | None]
"""The value of an environment variable; None if it is not set."""
T = TypeVar("T", bool, int, float, str)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
LONGEST_S = 3600.0
MOST_WEIGHT = 1e6
OURS = "HEADRACE_"
"""How variables begin that are settings of this server."""
OTHERS_KEYS = ("url", "key_env", "flavour", "max_concurrency")
"""Of engines of kind openai only."""
OVERRIDABLE = ("engine", "slo")
"""Sections of the settings of which an engine of ours may have its own values."""
ENGINE_KEYS = ("kind", "model", "family", "ttft_timeout_ms", "probe_s", "load", *OTHERS_KEYS, *OVERRIDABLE)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine. `url`, `key`, `flavour` and `max_concurrency` mean something for kind openai only, `settings` for
    kind llama only."""

    name: str
    kind: Kind
    model: str
    """llama: a name or path as in `model.path`; openai: the name that the other server knows."""
    family: str
    """Engines of one family may continue each other's answers."""
    url: str = ""
    """http://host:port/v1, without a slash at the end."""
    key_env: str = ""
    """The variable that `key` is from."""
    key: str = field(default="", repr=False)
    flavour: Flavour = "auto"
    ttft_timeout_s: float | None = None
    max_concurrency: int = 0
    """0: no limit."""
    probe_s: float = 10.0
    """0: no probes."""
    load: bool = True
    """At the start."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted name → value, not checked yet: what differs from the common settings."""


@dataclass(frozen=True, slots=True)
class MirrorSpec:
    """A copy of some requests goes to another engine, whose answers nobody gets."""

    to: str
    share: float = 0.01
    """Of the alias's requests, 0 to 1."""
    compare: bool = False
    """Compare the texts."""
    promote: Promote = "off"
    requests: int = 200
    """Mirrored requests before it is judged."""
    tolerance: float = 0.1
    """How much slower it may be, as a share."""


@dataclass(frozen=True, slots=True)
class AliasSpec:
    """`engines`: name → weight, >= 0, one of them above 0."""

    name: str
    engines: Mapping[str, float]
    mirror: MirrorSpec | None = None


def parse_fleet(
    engines: Mapping[str, Any], aliases: Mapping[str, Any], *, secret: Secret
) -> tuple[tuple[EngineSpec, ...], tuple[AliasSpec, ...]]:
    """Both tables of a file. Without any alias each engine that is loaded is one of its own. Raises StartupError."""
    for table, given in (("engines", engines), ("aliases", aliases)):
        if not isinstance(given, Mapping):
            raise StartupError(f"{table}: {given!r} is not a table; write [{table}.NAME]")
    specs = tuple(parse_engine(name, table, secret=secret) for name, table in engines.items())
    names = [spec.name for spec in specs]
    if not aliases:
        return specs, tuple(AliasSpec(spec.name, {spec.name: 1.0}) for spec in specs if spec.load)
    routes = tuple(parse_alias(name, table, declared=names) for name, table in aliases.items())
    return specs, routes


def parse_engine(name: str, table: Any, *, secret: Secret, named: Collection[str] | None = None) -> EngineSpec:
    """`engines.NAME`; `named`: the variables that `key_env` may name, None: any but those of our own settings. Raises
    StartupError."""
    rows = _Table(f"engines.{_name('engines', name)}", table, ENGINE_KEYS)
    kind = cast("Kind", rows.text("kind", choices=get_args(Kind)))
    model = rows.text("model")
    family = rows.text("family", model)
    timeout_ms = rows.number("ttft_timeout_ms", 0.0, 0.0, LONGEST_S * 1e3)
    probe_s = rows.number("probe_s", 10.0, 0.0, LONGEST_S)
    load = rows.flag("load", True)
    common: dict[str, Any] = {"ttft_timeout_s": timeout_ms / 1e3 or None, "probe_s": probe_s, "load": load}
    if kind == "llama":
        rows.only("openai", *OTHERS_KEYS)
        settings = {f"{part}.{key}": value for part in OVERRIDABLE for key, value in rows.table(part).items()}
        return EngineSpec(name, kind, model, family, settings=settings, **common)
    rows.only("llama", *OVERRIDABLE)
    spec = EngineSpec(
        name,
        kind,
        model,
        family,
        url=_url(rows.path("url"), rows.text("url")),
        key_env=rows.text("key_env", ""),
        key=_key(rows.path("key_env"), rows.text("key_env", ""), secret, named),
        flavour=cast("Flavour", rows.text("flavour", "auto", choices=get_args(Flavour))),
        max_concurrency=rows.whole("max_concurrency", 0, 0, 10**6),
        **common,
    )
    return spec


def parse_alias(name: str, table: Any, *, declared: Collection[str]) -> AliasSpec:
    """`aliases.NAME`; `declared`: the engines there are. Raises StartupError."""
    rows = _Table(f"aliases.{_name('aliases', name)}", table, ("engines", "mirror"))
    weights = parse_weights(rows.path("engines"), rows.table("engines"), declared=declared)
    mirror = parse_mirror(rows.path("mirror"), rows.table("mirror"), weights, declared) if "mirror" in rows else None
    return AliasSpec(name, weights, mirror)


def parse_weights(path: str, table: Mapping[str, Any], *, declared: Collection[str]) -> dict[str, float]:
    """Engine → weight. Raises StartupError."""
    rows = _Table(path, table)
    for engine in table:
        _declared(path, engine, declared)
    weights = {engine: rows.number(engine, 0.0, 0.0, MOST_WEIGHT) for engine in table}
    if not any(weights.values()):
        raise StartupError(f"{path}: name at least one engine with a weight above 0, for example {{ main = 1 }}")
    return weights


def parse_mirror(path: str, table: Any, weights: Mapping[str, float], declared: Collection[str]) -> MirrorSpec:
    """`aliases.NAME.mirror`. Raises StartupError."""
    rows = _Table(path, table, ("to", "share", "compare", "promote", "requests", "tolerance"))
    to = rows.text("to")
    _declared(rows.path("to"), to, declared)
    if weights.get(to):
        raise StartupError(f"{rows.path('to')}: {to} answers already; only one of weight 0 can be mirrored to")
    spec = MirrorSpec(
        to,
        share=rows.number("share", 0.01, 0.0, 1.0),
        compare=rows.flag("compare", False),
        promote=cast("Promote", rows.text("promote", "off", choices=get_args(Promote))),
        requests=rows.whole("requests", 200, 1, 10**6),
        tolerance=rows.number("tolerance", 0.1, 0.0, 10.0),
    )
    return spec


class _Table:
    """Reads a table key by key; one that holds other keys than `keys` is refused. None: any key may be there."""

    def __init__(self, path: str, table: Any, keys: tuple[str, ...] | None = None) -> None:
        if not isinstance(table, Mapping):
            raise StartupError(f"{path}: {table!r} is not a table")
        for key in table:
            if keys is not None and key not in keys:
                near = difflib.get_close_matches(str(key), keys, n=1, cutoff=0)
                raise StartupError(f"{path}.{key}: there is no such key; did you mean {near[0]}?")
        self._path = path
        self._table = table

    def __contains__(self, key: str) -> bool:
        return key in self._table

    def path(self, key: str) -> str:
        return f"{self._path}.{key}"

    def text(self, key: str, default: str | None = None, *, choices: tuple[str, ...] = ()) -> str:
        text = self._take(key, default, str, "text")
        if choices and text not in choices:
            raise StartupError(f"{self.path(key)}: {text!r} is not one of {', '.join(choices)}")
        if default is None and not text.strip():
            raise StartupError(f"{self.path(key)}: is empty")
        return text

    def flag(self, key: str, default: bool) -> bool:
        return self._take(key, default, bool, "true or false")

    def whole(self, key: str, default: int, low: int, high: int) -> int:
        return self._within(key, self._take(key, default, int, "a whole number"), low, high)

    def number(self, key: str, default: float, low: float, high: float) -> float:
        given = self._table.get(key, default)
        if type(given) is int and abs(given) < 2**53:
            given = float(given)
        if type(given) is not float or not math.isfinite(given):
            raise StartupError(f"{self.path(key)}: {given!r} is not a number")
        return self._within(key, given, low, high)

    def table(self, key: str) -> Mapping[str, Any]:
        given = self._table.get(key, {})
        if not isinstance(given, Mapping):
            raise StartupError(f"{self.path(key)}: {given!r} is not a table")
        return given

    def only(self, kind: str, *keys: str) -> None:
        """Refuse keys that only engines of `kind` have."""
        for key in keys:
            if key in self._table:
                raise StartupError(f"{self.path(key)}: only engines of kind {kind} have one")

    def _take(self, key: str, default: T | None, kind: type[T], word: str) -> T:
        given = self._table.get(key, default)
        if given is None:
            raise StartupError(f"{self.path(key)}: is missing")
        if type(given) is not kind:
            raise StartupError(f"{self.path(key)}: {given!r} is not {word}")
        return given

    def _within(self, key: str, number: T, low: float, high: float) -> T:
        if not low <= float(number) <= high:
            raise StartupError(f"{self.path(key)}: {number!r} is outside {low:.12g} to {high:.12g}")
        return number


def _name(table: str, name: str) -> str:
    if not NAME.fullmatch(name):
        raise StartupError(
            f"{table}.{name!r}: a name has up to 128 letters, digits and . _ : / -, and begins with a letter or digit"
        )
    return name


def _declared(path: str, engine: str, declared: Collection[str]) -> None:
    if engine not in declared:
        known = f"declared are {', '.join(declared)}" if declared else "none is declared"
        raise StartupError(f"{path}: no engine is named {engine}; {known}")


def _url(path: str, text: str) -> str:
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    # What is wrong is not shown: it may hold a password.
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise StartupError(f"{path}: should read http://HOST:PORT/v1 or https://…")
    if parts.username is not None or parts.password is not None:
        raise StartupError(f"{path}: holds a user or a password; give the key through key_env")
    if not (text.isascii() and text.isprintable() and " " not in text):
        raise StartupError(f"{path}: holds characters that a URL cannot have")
    return f"{parts.scheme}://{parts.netloc}{api_path(parts.path)}"


def _key(path: str, variable: str, secret: Secret, named: Collection[str] | None) -> str:
    if not variable:
        return ""
    if variable.startswith(OURS):
        # The keys of this server are among those, and whoever stands at that URL would get them.
        raise StartupError(f"{path}: {variable} is kept for settings of this server; name another variable")
    if named is not None and variable not in named:
        known = f"known are {', '.join(sorted(named))}" if named else "there is none"
        raise StartupError(f"{path}: only a variable that an engine of the config file names is read here; {known}")
    key = secret(variable)
    if not key:
        raise StartupError(f"{path}: the environment variable {variable} is not set")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise StartupError(f"{path}: the value of {variable} is no key: printable ASCII without spaces is")
    return key
