"""Every setting, once: rows → one frozen `Config`.

    defaults  <  TOML file  <  environment  <  flags          the later source wins

Rules: a setting is one `_row` below and nothing else; its dotted name is `section.field`, its environment variable
`HEADRACE_SECTION_FIELD`. Only this module reads configuration files, environment variables and the XDG paths. What
cannot be used is refused here, in one line with the field, the value and the bounds; all others may trust a `Config`.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from headrace.core.errors import StartupError

Value = bool | int | float | str
T = TypeVar("T", bound=Value)

PREFIX = "HEADRACE_"
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Setting:
    """A row. The default's type is the setting's type."""

    name: str
    """Dotted: `server.port`."""
    default: Value
    unit: str
    """"" where there is none."""
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    secret: bool = False
    """Its value appears in no message."""

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.name.replace(".", "_").upper()

    @property
    def bounds(self) -> str:
        """What it may be, in words; "" where anything of its type will do."""
        if self.choices:
            return ", ".join(self.choices)
        if isinstance(self.default, bool):
            return "true, false"
        return "" if self.low is None or self.high is None else f"{self.low:.12g} to {self.high:.12g}"


def _row(
    default: T,
    unit: str,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    secret: bool = False,
) -> T:
    """A dataclass field that carries its row. Typed as its value, so that sections are checked like any dataclass."""
    row = Setting("", default, unit, help, low, high, choices, secret)
    return field(default=default, repr=not secret, metadata={"row": row})


# fmt: off
@dataclass(frozen=True, slots=True)
class Server:
    """The HTTP side."""

    host: str = _row("127.0.0.1", "", help=
        "Address to listen on. One that other machines can reach needs `server.key`, or `server.insecure`.")
    port: int = _row(8000, "", low=0, high=65535, help="Port to listen on; 0 takes a free one.")
    key: str = _row("", "", secret=True, help=
        "API key that clients must send as a bearer token; empty asks for none. "
        "Rather set its environment variable than a flag: other users can read a command line.")
    insecure: bool = _row(False, "", help="Allow a non-loopback address without a key.")
    body_limit_bytes: int = _row(10 * MIB, "bytes", low=1024, high=1024 * MIB, help=
        "Largest request body; a larger one is answered with 413.")
    header_hold_s: float = _row(1.0, "s", low=0, high=60, help=
        "How long a stream's headers wait for the first text, so that they carry its timing and an honest status.")
    heartbeat_s: float = _row(15.0, "s", low=0.1, high=3600, help=
        "A stream that is silent for this long gets a comment line, so that proxies keep it open.")
    write_timeout_s: float = _row(60.0, "s", low=0.1, high=3600, help=
        "A reader that takes nothing for this long is disconnected.")
    drain_s: float = _row(30.0, "s", low=0, high=3600, help=
        "How long running answers may take to finish after SIGTERM or Ctrl-C.")
    slice_us: int = _row(500, "µs", low=0, high=100_000, help=
        "Time slice to ask the kernel for (Linux 6.12 or later): the shorter, the sooner the server runs when a token "
        "is there, at the same share of the CPU. 0 asks for none; from 100 up it is granted.")
    max_pending_events: int = _row(256, "events", low=2, high=65536, help=
        "Events kept for one slow reader before its sequence is paused.")


@dataclass(frozen=True, slots=True)
class Model:
    """What is served."""

    path: str = _row("smollm2-135m", "", help=
        "A name that `headrace pull` knows, `hf:ORG/REPO/FILE.gguf`, or the path of a GGUF file. `scripted:RATE` "
        "computes nothing and writes numbers at so many tokens per second: for testing what stands before the server.")
    alias: str = _row("", "", help="The name clients use; empty derives it from `model.path`.")


@dataclass(frozen=True, slots=True)
class Engine:
    """The embedded engine: memory and scheduling."""

    in_process: bool = _row(False, "", help=
        "Run the engine inside the server process instead of a child, for tests and embedding: "
        "if the engine crashes, the server goes with it.")
    threads: int = _row(0, "threads", low=0, high=1024, help="Threads for a step of one token; 0 takes all cores.")
    threads_batch: int = _row(0, "threads", low=0, high=1024, help="Threads for larger steps; 0 takes all cores.")
    spin: int = _row(20000, "turns", low=0, high=10**9, help=
        "How long a compute thread waits busily for the others before it sleeps (GOMP_SPINCOUNT of the engine, "
        "unless the environment sets that). The library's own 300000 lets a step that shares its cores with anything "
        "else take many times as long. 0 leaves it to the library.")
    cells: int = _row(16384, "tokens", low=256, high=2**24, help=
        "KV cells in the pool that all sequences share, one a token.")
    context: int = _row(0, "tokens", low=0, high=2**24, help=
        "Most tokens of one sequence, prompt and answer together; 0 takes the model's limit, or all cells if fewer.")
    max_running: int = _row(16, "sequences", low=1, high=256, help=
        "Sequences that are computed at the same time; more wait in the queue.")
    slots: int = _row(64, "sequences", low=1, high=256, help=
        "KV sequence ids, for running sequences and for finished ones kept for reuse.")
    prefill_chunk: int = _row(256, "tokens", low=1, high=8192, help=
        "Prompt tokens a step while nobody is being answered.")
    prefill_chunk_busy: int = _row(128, "tokens", low=1, high=8192, help=
        "Prompt tokens a step while somebody is being answered: smaller is smoother for readers, slower for newcomers.")
    idle_cells: int = _row(1536, "tokens", low=0, high=2**24, help=
        "KV cells that finished sequences may keep for reuse; they give way when a running one needs them. Every step "
        "pays for the width of the pool: 4096 made short prompts 20 % slower on two cores.")
    kv_type: str = _row("f16", "", choices=("f16", "q8_0"), help=
        "Type of the KV cache. `q8_0` takes half the memory and is slower on a CPU.")
    flash_attention: bool = _row(True, "", help=
        "Flash attention. Without it a step costs more the more cells other sequences hold.")
    prefix_cache: bool = _row(True, "", help="Reuse the KV of prompts with the same beginning.")
    max_waiting: int = _row(256, "requests", low=0, high=65536, help=
        "Requests that may wait for a place; one more is answered with 503.")
    queue_timeout_s: float = _row(30.0, "s", low=0.1, high=3600, help=
        "A request that waited this long for a place is answered with 503.")


@dataclass(frozen=True, slots=True)
class Log:
    """What is written to stderr."""

    level: str = _row("info", "", choices=("debug", "info", "warning", "error"), help=
        "Least serious level to write. Requests are logged at `info`, never with their content.")
# fmt: on


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, checked. `Config()` is the defaults."""

    server: Server = field(default_factory=Server)
    model: Model = field(default_factory=Model)
    engine: Engine = field(default_factory=Engine)
    log: Log = field(default_factory=Log)


SECTIONS: Mapping[str, type[Any]] = {"server": Server, "model": Model, "engine": Engine, "log": Log}


def _rows() -> Iterator[Setting]:
    for section, kind in SECTIONS.items():
        for part in fields(kind):
            row: Setting = part.metadata["row"]
            yield Setting(
                f"{section}.{part.name}", row.default, row.unit, row.help, row.low, row.high, row.choices, row.secret
            )


SETTINGS: Mapping[str, Setting] = {row.name: row for row in _rows()}
"""Dotted name → row, in the order of the reference page."""


def engine_environment(spin: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of an engine's process: this one's, with `engine.spin` for its compute threads."""
    environ = os.environ if environ is None else environ
    own = {} if spin == 0 or "OMP_WAIT_POLICY" in environ else {"GOMP_SPINCOUNT": str(spin)}
    return {**own, **environ}


def load(
    *,
    file: Path | None = None,
    flags: Mapping[str, Value] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Read all sources. Raises StartupError.

    `file` None: the one under XDG_CONFIG_HOME, if it exists. `flags`: dotted name → value, or its text.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Value] = {}
    if file is None:
        home = _xdg_home(environ, "XDG_CONFIG_HOME", ".config")
        usual = None if home is None else home / "headrace" / "config.toml"
        file = usual if usual is not None and usual.is_file() else None
    if file is not None:
        for name, value in _read_file(file):
            values[name] = _checked(_find(name, f"config file {file}"), value, f"config file {file}", text=False)
    for name, variable, value in _read_environ(environ):
        values[name] = _checked(SETTINGS[name], value, f"environment variable {variable}", text=True)
    for name, value in (flags or {}).items():
        values[name] = _checked(_find(name, "command line"), value, "command line", text=True)
    config = Config(**{section: kind(**_of(section, values)) for section, kind in SECTIONS.items()})
    _check_together(config)
    return config


def _of(section: str, values: Mapping[str, Value]) -> dict[str, Value]:
    return {name.partition(".")[2]: value for name, value in values.items() if name.startswith(section + ".")}


def cache_home(environ: Mapping[str, str] | None = None) -> Path:
    """Where models are kept: `$XDG_CACHE_HOME/headrace`. Raises StartupError when there is no home directory either."""
    home = _xdg_home(os.environ if environ is None else environ, "XDG_CACHE_HOME", ".cache")
    if home is None:
        raise StartupError("there is no home directory to keep models in: set XDG_CACHE_HOME to an absolute path")
    return home / "headrace"


def _xdg_home(environ: Mapping[str, str], variable: str, usual: str) -> Path | None:
    """The XDG base directory; the standard says that a relative path in the variable counts as not set."""
    given = Path(environ.get(variable, ""))
    if given.is_absolute():
        return given
    try:
        return (Path(environ["HOME"]) if environ.get("HOME") else Path.home()) / usual
    except RuntimeError:  # a user id without a home, as containers have
        return None


def _read_file(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with file.open("rb") as stream:
            tables = tomllib.load(stream)
    except OSError as error:
        raise StartupError(f"config file {file}: {(error.strerror or 'cannot be read').lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"config file {file}: not valid TOML: {error}") from None
    return _flatten(tables, "")


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
    engine, key = config.engine, config.server.key
    if engine.max_running > engine.slots:
        raise StartupError(
            f"engine.max_running: {engine.max_running} sequences need as many slots, but engine.slots is {engine.slots}"
        )
    if engine.context > engine.cells:
        raise StartupError(f"engine.context: {engine.context} tokens do not fit engine.cells, which is {engine.cells}")
    if engine.kv_type != "f16" and not engine.flash_attention:
        raise StartupError(f"engine.kv_type: {engine.kv_type} needs engine.flash_attention, which is off")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise StartupError("server.key: a header can carry only printable ASCII without spaces")
    if not config.model.path.strip():
        raise StartupError("model.path: is empty; give a name or the path of a GGUF file")
