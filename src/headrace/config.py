"""From files, environment and flags to one frozen `Config`.

    defaults  <  tuned profile  <  TOML file  <  environment  <  flags          the later source wins

Next to the settings the file may declare engines and aliases; `gateway.spec` says how those tables read.

Rules: the rows are in `settings`. Only this module reads configuration files, environment variables and the XDG paths.
What cannot be used is refused here, in one line with the field, the value and the bounds; all others may trust a
`Config`.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from headrace.core.errors import StartupError
from headrace.gateway.spec import EngineSpec, parse_fleet
from headrace.settings import PREFIX, SECTIONS, SETTINGS, Config, Setting, Value


def engine_environment(spin: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of an engine's process: this one's, with `engine.spin` for its compute threads, and without the
    90 lines of backtrace by which its library ends: the one line before them says why."""
    environ = os.environ if environ is None else environ
    own = {} if spin == 0 or "OMP_WAIT_POLICY" in environ else {"GOMP_SPINCOUNT": str(spin)}
    return {"GGML_NO_BACKTRACE": "1", **own, **environ}


def load(
    *,
    file: Path | None = None,
    flags: Mapping[str, Value] | None = None,
    environ: Mapping[str, str] | None = None,
    tuned: Mapping[str, Value] | None = None,
) -> Config:
    """Read all sources. Raises StartupError.

    `file` None: the one under XDG_CONFIG_HOME, if it exists. `flags`: dotted name → value, or its text. `tuned`: the
    settings of a profile, see `headrace.tuned`.
    """
    values: dict[str, Value] = {}
    for name, value in (tuned or {}).items():
        values[name] = _checked(_find(name, "tuned profile"), value, "tuned profile", text=False)
    environ = os.environ if environ is None else environ
    file = _file(file, environ)
    values.update(_given(file, flags, environ))
    config = Config(**{section: kind(**_of(section, values)) for section, kind in SECTIONS.items()})
    _check_together(config)
    if file is None:
        return config
    tables = _read_tables(file)
    engines, aliases = parse_fleet(*(tables.get(name, {}) for name in TABLES), secret=environ.get)
    for spec in engines:
        for_engine(config, spec)
    return replace(config, engines=engines, aliases=aliases)


def for_engine(config: Config, spec: EngineSpec) -> Config:
    """The settings of one engine of ours: the common ones, with its own. Raises StartupError."""
    place = f"engines.{spec.name}"
    sections: dict[str, dict[str, Value]] = {}
    try:
        for name, value in spec.settings.items():
            checked = _checked(_find(name, place), value, place, text=False)
            section, _, key = name.partition(".")
            sections.setdefault(section, {})[key] = checked
        own = replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})
        _check_together(own)
    except StartupError as error:
        raise StartupError(f"{place}: {error.message.replace(f' ({place})', '', 1)}") from None
    return replace(own, model=replace(config.model, path=spec.model, alias=spec.name), engines=(), aliases=())


def secret(variable: str) -> str | None:
    """The value of an environment variable that a declaration names; None if it is not set."""
    return os.environ.get(variable)


def named(
    *, file: Path | None = None, flags: Mapping[str, Value] | None = None, environ: Mapping[str, str] | None = None
) -> frozenset[str]:
    """The settings that the user has set, also to their defaults. Arguments as for `load`. Raises StartupError."""
    environ = os.environ if environ is None else environ
    return frozenset(_given(_file(file, environ), flags, environ))


def _file(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The file that is read: the given one, or the usual one if it is there."""
    if file is not None:
        return file
    home = config_home(environ)
    usual = None if home is None else home / "config.toml"
    return usual if usual is not None and usual.is_file() else None


def _given(file: Path | None, flags: Mapping[str, Value] | None, environ: Mapping[str, str]) -> dict[str, Value]:
    """What file, environment and flags say, checked one by one."""
    values: dict[str, Value] = {}
    if file is not None:
        for name, value in _read_file(file):
            values[name] = _checked(_find(name, f"config file {file}"), value, f"config file {file}", text=False)
    for name, variable, value in _read_environ(environ):
        values[name] = _checked(SETTINGS[name], value, f"environment variable {variable}", text=True)
    for name, value in (flags or {}).items():
        values[name] = _checked(_find(name, "command line"), value, "command line", text=True)
    return values


def _of(section: str, values: Mapping[str, Value]) -> dict[str, Value]:
    return {name.partition(".")[2]: value for name, value in values.items() if name.startswith(section + ".")}


def cache_home(environ: Mapping[str, str] | None = None) -> Path:
    """Where models are kept: `$XDG_CACHE_HOME/headrace`. Raises StartupError when there is no home directory either."""
    home = _xdg_home(os.environ if environ is None else environ, "XDG_CACHE_HOME", ".cache")
    if home is None:
        raise StartupError("there is no home directory to keep models in: set XDG_CACHE_HOME to an absolute path")
    return home / "headrace"


def config_home(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where settings and templates are kept: `$XDG_CONFIG_HOME/headrace`; None when there is no home directory."""
    home = _xdg_home(os.environ if environ is None else environ, "XDG_CONFIG_HOME", ".config")
    return None if home is None else home / "headrace"


def state_home(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where a server keeps what it counted: `$XDG_STATE_HOME/headrace`; None when there is no home directory."""
    home = _xdg_home(os.environ if environ is None else environ, "XDG_STATE_HOME", ".local/state")
    return None if home is None else home / "headrace"


def _xdg_home(environ: Mapping[str, str], variable: str, usual: str) -> Path | None:
    """The XDG base directory; the standard says that a relative path in the variable counts as not set."""
    given = Path(environ.get(variable, ""))
    if given.is_absolute():
        return given
    try:
        return (Path(environ["HOME"]) if environ.get("HOME") else Path.home()) / usual
    except RuntimeError:  # a user id without a home, as containers have
        return None


TABLES = ("engines", "aliases")
"""What a file holds that is no setting."""


def _read_file(file: Path) -> Iterator[tuple[str, Any]]:
    tables = _read_tables(file)
    return _flatten({name: value for name, value in tables.items() if name not in TABLES}, "")


def _read_tables(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise StartupError(f"config file {file}: {(error.strerror or 'cannot be read').lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"config file {file}: not valid TOML: {error}") from None


def _flatten(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        # A table that should be a value is passed on whole, so that its type is refused by name.
        if isinstance(value, dict) and prefix + key not in SETTINGS:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


_INJECTED = re.compile(r".*_SERVICE_(HOST|PORT(_.*)?)|.*_PORT_\d+_(TCP|UDP|SCTP)(_.*)?")


def _read_environ(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(dotted name, variable, text) of every set variable that is ours."""
    names = {row.variable: row.name for row in SETTINGS.values()}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or not value:
            continue
        # Kubernetes and container links make such variables for a service called "headrace…": not meant for us.
        if _INJECTED.fullmatch(variable) or (variable.endswith("_PORT") and "://" in value):
            continue
        if variable not in names:
            near = difflib.get_close_matches(variable, names, n=1, cutoff=0)
            raise StartupError(f"unknown environment variable {variable}; the nearest known one is {near[0]}")
        yield names[variable], variable, value


def _find(name: str, source: str) -> Setting:
    if name in SETTINGS:
        return SETTINGS[name]
    raise StartupError(f"unknown setting {name} ({source}); the nearest known one is {nearest(name, SETTINGS)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant: a forgotten section counts less than a misspelling."""
    names = list(known)
    last = name.rpartition(".")[2]
    tails = [one for one in names if one.rpartition(".")[2] == last]
    return difflib.get_close_matches(name, tails or names, n=1, cutoff=0)[0]


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _checked(row: Setting, value: Any, source: str, *, text: bool) -> Value:
    """The value in the row's own type, within its bounds. `text`: strings are read as numbers and booleans too."""
    kind = type(row.default)
    shown = "the value" if row.secret else repr(value)
    got = value
    if text and isinstance(value, str) and kind is not str:
        got = _from_text(kind, value.strip())
    if kind is float and type(got) is int and abs(got) < 2**53:
        got = float(got)
    if type(got) is not kind or (isinstance(got, float) and not math.isfinite(got)):
        raise StartupError(f"{row.name}: {shown} is not {_WORDS[kind]} ({source})", param=row.name)
    if row.choices and got not in row.choices:
        raise StartupError(f"{row.name}: {shown} is not one of {row.bounds} ({source})", param=row.name)
    if isinstance(got, int | float) and not _within(row, got):
        raise StartupError(f"{row.name}: {shown} is outside {row.bounds} ({source})", param=row.name)
    return got


def _within(row: Setting, number: float) -> bool:
    return row.low is None or row.high is None or row.low <= number <= row.high


def _from_text(kind: type, text: str) -> Value | None:
    if kind is bool:
        return _BOOLS.get(text.lower())
    try:
        return cast("Value", kind(text))
    except ValueError:
        return None


def _check_together(config: Config) -> None:
    """What no single row can see."""
    engine, server = config.engine, config.server
    if engine.max_running > engine.slots:
        raise StartupError(
            f"engine.max_running: {engine.max_running} sequences need as many slots, but engine.slots is {engine.slots}"
        )
    if engine.context > engine.cells:
        raise StartupError(f"engine.context: {engine.context} tokens do not fit engine.cells, which is {engine.cells}")
    if engine.kv_type == "q8_0" and not engine.flash_attention:
        raise StartupError(f"engine.kv_type: {engine.kv_type} needs engine.flash_attention, which is off")
    if engine.kv_type == "bf16" and engine.flash_attention:
        raise StartupError(f"engine.kv_type: {engine.kv_type} needs engine.flash_attention off, which is on")
    for name, key in (("server.key", server.key), ("server.admin_key", server.admin_key)):
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise StartupError(f"{name}: a header can carry only printable ASCII without spaces")
    if server.admin_key and server.admin_key == server.key:
        raise StartupError("server.admin_key: is server.key; clients must not have the key of the admin API")
    if not config.model.path.strip():
        raise StartupError("model.path: is empty; give a name or the path of a GGUF file")
