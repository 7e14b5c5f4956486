from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.hand_pool import HandBackend, ask
from headrace import fleet
from headrace.core.errors import StartupError
from headrace.gateway.pool import Pool
from headrace.gateway.spec import AliasSpec, EngineSpec, parse_fleet
from headrace.gateway.states import State
from headrace.settings import Config, Model
from headrace.testing import ManualClock
from server.asgi_driver import on_loop, settle

LLAMA: dict[str, Any] = {"kind": "llama", "model": "m"}
OTHER: dict[str, Any] = {"kind": "openai", "model": "m", "url": "http://h"}


def declared(engines: dict[str, Any], aliases: dict[str, Any] | None = None) -> Config:
    tables = {name: {"engines": weights} for name, weights in (aliases or {}).items()}
    specs, routes = parse_fleet(engines, tables, secret=lambda _: None)
    return Config(engines=specs, aliases=routes)


class Built:
    """A pool of doubles. `broken`: those that do not start; `before`: called when one is made."""

    def __init__(self, config: Config, broken: str = "") -> None:
        self.broken = set(broken)
        self.made: dict[str, HandBackend] = {}
        self.before: Callable[[HandBackend], None] = lambda _: None
        self.pool = Pool(self.build, ManualClock())
        fleet.declare(self.pool, config)

    def build(self, spec: EngineSpec) -> HandBackend:
        error = StartupError("no such file") if spec.name in self.broken else None
        self.made[spec.name] = one = HandBackend(spec, start_error=error)
        self.before(one)
        return one

    def state(self, name: str) -> State:
        return self.pool.members[name].state


def test_without_tables_there_is_one_engine_of_the_name_that_clients_use() -> None:
    config = Config(model=Model(path="/x/m.gguf", alias="it's m"))
    assert fleet.engines_of(config) == (EngineSpec("it's m", "llama", "/x/m.gguf", "it's m"),)
    assert fleet.aliases_of(config) == (AliasSpec("it's m", {"it's m": 1.0}),)


@on_loop
async def test_what_is_declared_is_loaded_but_for_what_is_not_to_be() -> None:
    config = declared({"a": LLAMA, "b": OTHER, "c": {**LLAMA, "load": False}}, {"chat": {"a": 1, "b": 1, "c": 0}})
    built = Built(config)
    assert list(built.pool.routes) == ["chat"]
    await fleet.load(built.pool, config)
    assert (built.state("a"), built.state("b"), built.state("c")) == (State.READY, State.READY, State.GONE)
    await built.pool.close()


@on_loop
async def test_engines_of_ours_load_one_after_the_other_and_servers_at_once() -> None:
    config = declared({"a": LLAMA, "b": LLAMA, "x": OTHER, "y": OTHER})
    built = Built(config)
    built.before = lambda one: one.gate.clear()
    loading = asyncio.ensure_future(fleet.load(built.pool, config))
    await settle()
    assert set(built.made) == {"a", "x", "y"}
    built.made["x"].gate.set()
    await settle()
    assert built.pool.ready("x"), "it answers before the others are there"
    built.made["a"].gate.set()
    await settle()
    assert set(built.made) == {"a", "b", "x", "y"}
    built.made["b"].gate.set()
    built.made["y"].gate.set()
    await loading
    await built.pool.close()


@on_loop
async def test_one_of_ours_that_cannot_load_stops_the_start_if_it_is_the_only_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = declared({"a": LLAMA, "b": LLAMA}, {"both": {"a": 1, "b": 1}})
    built = Built(config, broken="a")
    await fleet.load(built.pool, config)
    assert (built.state("a"), built.state("b")) == (State.GONE, State.READY)
    assert "engines.a: no such file; its aliases do without it" in caplog.text
    assert built.pool.lease(ask(model="both")).engine == "b"

    config = declared({"a": LLAMA, "b": LLAMA, "c": LLAMA}, {"both": {"a": 1, "b": 1}, "one": {"a": 1}})
    built = Built(config, broken="a")
    with pytest.raises(StartupError) as caught:
        await fleet.load(built.pool, config)
    assert caught.value.message == "engines.a: no such file"
    assert "c" not in built.made, "nothing more is loaded"

    config = declared({"a": LLAMA, "b": LLAMA}, {"both": {"a": 1, "b": 1}})
    with pytest.raises(StartupError, match=r"engines\.b"):
        await fleet.load(Built(config, broken="ab").pool, config)


@on_loop
async def test_the_only_model_s_failure_is_told_as_it_is() -> None:
    config = Config(model=Model(path="/x/m.gguf", alias="m"))
    with pytest.raises(StartupError) as caught:
        await fleet.load(Built(config, broken="m").pool, config)
    assert caught.value.message == "no such file"


@on_loop
async def test_a_server_that_is_not_there_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    config = declared({"x": OTHER})
    built = Built(config, broken="x")
    await fleet.load(built.pool, config)
    assert "no such file; it is tried again" in caplog.text
    assert built.pool.members["x"].wanted
    assert not built.pool.ready("x")
    await built.pool.close()


@on_loop
async def test_a_start_that_is_given_up_leaves_nothing_behind() -> None:
    config = declared({"a": LLAMA, "x": OTHER})
    built = Built(config)
    built.before = lambda one: one.gate.clear()
    loading = asyncio.ensure_future(fleet.load(built.pool, config))
    await settle()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert (built.state("a"), built.state("x")) == (State.GONE, State.GONE)
    assert built.made["x"].did[-1] == "close"
    await built.pool.close()
