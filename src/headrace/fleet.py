"""What a `Config` declares, put into a pool and loaded.

    engines of ours ── one after the other: they share the machine ─┐
    other servers ──── all at once ─────────────────────────────────┴▶ whoever is there answers already

Rules: an engine of ours that cannot be loaded stops the start if an alias has no other; another server that is not
there is a warning, and is looked for again. Without tables there is one engine, of the name that clients use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from headrace.core.errors import StartupError
from headrace.gateway.pool import Pool
from headrace.gateway.spec import AliasSpec, EngineSpec
from headrace.gateway.states import State
from headrace.settings import Config

log = logging.getLogger(__name__)


def engines_of(config: Config) -> tuple[EngineSpec, ...]:
    """Those that are declared, or the only one."""
    model = config.model
    return config.engines or (EngineSpec(model.alias, "llama", model.path, model.alias),)


def aliases_of(config: Config) -> tuple[AliasSpec, ...]:
    """The names that clients use."""
    return config.aliases if config.engines else (AliasSpec(config.model.alias, {config.model.alias: 1.0}),)


def declare(pool: Pool, config: Config) -> None:
    """All of it; nothing is loaded yet."""
    for spec in engines_of(config):
        pool.declare(spec)
    for alias in aliases_of(config):
        pool.lead(alias)


async def load(pool: Pool, config: Config) -> None:
    """Whatever is to be loaded at the start. Raises StartupError."""
    specs = [spec for spec in engines_of(config) if spec.load]
    ours = _load_ours(pool, [spec for spec in specs if spec.kind == "llama"], named=bool(config.engines))
    theirs = [_load_other(pool, spec) for spec in specs if spec.kind == "openai"]
    tasks = [asyncio.ensure_future(one) for one in (ours, *theirs)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _load_ours(pool: Pool, specs: Sequence[EngineSpec], *, named: bool) -> None:
    failed: set[str] = set()
    for spec in specs:
        try:
            await pool.load(spec.name)
        except StartupError as error:
            failed.add(spec.name)
            message = f"engines.{spec.name}: {error.message}" if named else error.message
            if _bereft(pool, failed):
                raise StartupError(message) from error
            log.warning("%s; its aliases do without it", message)


async def _load_other(pool: Pool, spec: EngineSpec) -> None:
    try:
        await pool.load(spec.name)
    except StartupError as error:
        log.warning("%s; it is tried again", error.message)
        pool.want(spec.name)


def _bereft(pool: Pool, failed: set[str]) -> bool:
    """Has an alias lost all engines that are, or were to be, loaded?"""
    for route in pool.routes.values():
        meant = {name for name in route.weights if pool.members[name].spec.load or _ready(pool, name)}
        if meant and meant <= failed:
            return True
    return False


def _ready(pool: Pool, name: str) -> bool:
    return pool.members[name].state is State.READY
