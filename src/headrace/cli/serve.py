"""`headrace serve`: settings → model file → server, and what to do next once it is ready."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import uvloop
from rich.text import Text

from headrace import __version__
from headrace.cli.output import console
from headrace.cli.pull import fetch
from headrace.config import cache_home, for_engine, load, named
from headrace.core.errors import StartupError
from headrace.gateway.spec import EngineSpec
from headrace.models import alias_of, script_rate
from headrace.settings import Config, Value

if TYPE_CHECKING:
    from headrace.tuned import Applied

Load = Callable[[Mapping[str, Value]], Config]
"""Makes the settings anew, with those of a profile below the user's own."""
First = Callable[[Config, Path, Load], "Applied | None"]
"""Measures a model file that is new here; None: there is nothing to measure, or no need to."""

KEY = "KEY"
"""The variable in what is shown for a key that only its owner knows. None of ours, which we would not know."""
EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def assigned(assignments: Sequence[str]) -> dict[str, Value]:
    """`name=value` texts → flags for `config.load`. Raises StartupError."""
    flags: dict[str, Value] = {}
    for text in assignments:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise StartupError(f"--set {text}: should read NAME=VALUE, for example --set engine.threads=2")
        flags[name.strip()] = value
    return flags


def run(file: Path | None, flags: Mapping[str, Value], *, allow_loss: bool = False) -> int:
    """The verb; gives the exit status. `allow_loss`: of a file that is measured. Raises StartupError."""
    config = load(file=file, flags=flags)
    if "model.path" in flags:  # a model that is named here is the only one
        config = dataclasses.replace(config, engines=(), aliases=())

    def again(settings: Mapping[str, Value]) -> Config:
        return load(file=file, flags=flags, tuned=settings)

    def measured(own: Config, model: Path, load: Load, more: Iterable[str] = ()) -> Applied | None:
        from headrace.cli.measure import run as measure

        return measure(own, named(file=file, flags=flags) | set(more), model, load, allow_loss=allow_loss)

    def prepare(spec: EngineSpec, first: First | None = None) -> Config:
        """An engine's settings, its model fetched, and its tuned profile applied."""
        own, note = _applied(for_engine(config, spec), lambda settings: for_engine(again(settings), spec), first)
        if note:
            err.print(f"Headrace: {spec.name}: {note}")
        return own

    prepared: dict[str, tuple[EngineSpec, Config]] = {}

    def known(spec: EngineSpec) -> Config:
        before = prepared.pop(spec.name, None)
        return before[1] if before is not None and before[0] == spec else prepare(spec)

    err = console(sys.stderr)
    if config.engines:
        names = [spec.name for spec in config.engines if spec.load]
        err.print(f"Headrace {__version__}: loading {', '.join(names) or 'no engine'} …")
        # Before the server runs: who waits for a download can stop it with Ctrl-C.
        ours = [spec for spec in config.engines if spec.load and spec.kind == "llama"]
        for spec in ours:
            prepared[spec.name] = spec, prepare(spec, partial(measured, more=spec.settings))
    else:
        alias = config.model.alias or alias_of(config.model.path)
        config, note = _applied(config, again, measured)
        model = dataclasses.replace(config.model, alias=alias)
        config = dataclasses.replace(config, model=model, engines=(), aliases=())
        err.print(f"Headrace {__version__}: loading {alias} …")
        if note:
            err.print(f"Headrace: {note}")

    from headrace.compose import serve
    from headrace.entrance import asks_for_keys

    def ready(url: str) -> None:
        console(sys.stdout).print(welcome(config, url, guarded=asks_for_keys(config)))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config, ready, prepare=known))


def _applied(config: Config, again: Load, first: First | None) -> tuple[Config, str]:
    """`config`, its model a file that is there, and tuned for it if it was, and what is to be said of that; `again`
    makes it anew with a profile's settings. `first` measures what is new here; None: the server runs, and somebody
    reads. Raises StartupError."""
    if script_rate(config.model.path):
        return config, ""
    from headrace.tuned import apply_profile, is_known

    path = fetch(config.model.path)
    tuned = None if first is None else first(config, path, again)
    if tuned is None:
        tuned = apply_profile(config, cache_home(), path, again)
        if first is None and config.model.tuned and config.model.measure and not is_known(cache_home(), path):
            note = f"is new here, and nothing is measured while the server runs: `headrace tune {config.model.path}`"
            tuned = dataclasses.replace(tuned, note=note)
    return dataclasses.replace(
        tuned.config, model=dataclasses.replace(tuned.config.model, path=str(tuned.path))
    ), tuned.note


def welcome(config: Config, url: str, *, guarded: bool = False) -> Text:
    """What to do next; `guarded`: clients need a key. The key itself is never shown."""
    base = _reachable(url)
    aliases = [spec.name for spec in config.aliases] if config.engines else [config.model.alias]
    alias = aliases[0] if aliases else "NAME"
    # A key of `headrace keys` is in no variable that we know: the reader puts it into one.
    variable = "HEADRACE_SERVER_KEY" if config.server.key else KEY if guarded else ""
    body = {
        "model": alias,
        "stream": True,
        "messages": [{"role": "user", "content": "Write one sentence about the sea."}],
    }
    key = f'-H "Authorization: Bearer ${variable}" ' if variable else ""
    curl = (
        f"curl -N {base}/v1/chat/completions {key}-H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body, ensure_ascii=False, separators=(',', ':')))}"
    )
    secret = f'os.environ["{variable}"]' if variable else '"none"'
    sdk = f'OpenAI(base_url="{base}/v1", api_key={secret})'
    text = Text()
    text.append("Ready: ", "bold green").append(", ".join(aliases) or "no alias yet", "bold").append("\n\n")
    for label, value, style in (("Chat page", base + "/", "cyan"), ("curl", curl, ""), ("OpenAI SDK", sdk, "")):
        text.append(f"  {label:<12}", "dim").append(value, style).append("\n")
    return text.append("\nCtrl-C stops it; running answers are finished first.", "dim")


def _reachable(url: str) -> str:
    """The URL as this machine can open it: an address that means "every address" is none to visit."""
    parts = urlsplit(url)
    host = EVERY_ADDRESS.get(parts.hostname or "", parts.hostname or "")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{parts.port}" if parts.port else f"{parts.scheme}://{shown}"
