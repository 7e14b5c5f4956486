from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvloop

from acceptance.keyed import put_keys
from headrace.compose import make_pool, serve
from headrace.core.errors import StartupError
from headrace.gateway.model import ServedModel
from headrace.gateway.own import OwnEngine
from headrace.gateway.spec import AliasSpec, EngineSpec
from headrace.settings import Config, Engine, Keys, Model, Server

SCRIPTED = Model(path="scripted:1000", alias="scripted")


def config(**engine: Any) -> Config:
    return Config(server=Server(port=0), model=SCRIPTED, engine=Engine(**engine))


@pytest.mark.parametrize("in_process", [True, False])
def test_a_scripted_model_is_served_from_start_to_signal(in_process: bool) -> None:
    seen: list[str] = []

    def ready(url: str) -> None:
        asyncio.get_running_loop().create_task(ask(url))

    async def ask(url: str) -> None:
        try:
            async with httpx.AsyncClient(base_url=url) as client:
                body = {"model": "scripted", "messages": [{"role": "user", "content": "count"}], "max_tokens": 4}
                answer = await client.post("/v1/chat/completions", json=body)
                seen.append(answer.json()["choices"][0]["message"]["content"])
                seen.append(str((await client.get("/readyz")).status_code))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    assert uvloop.run(serve(config(in_process=in_process), ready)) == 0
    assert seen == ["1 2 3 4 ", "200"]


def test_keys_are_asked_for_and_what_they_used_is_kept(tmp_path: Path) -> None:
    put_keys(tmp_path / "keys.toml", ann={"secret": "ann's", "rpm": 1})
    keys = Keys(file=str(tmp_path / "keys.toml"), usage_path=str(tmp_path / "usage"))
    seen: list[int] = []

    def ready(url: str) -> None:
        asyncio.get_running_loop().create_task(ask(url))

    async def ask(url: str) -> None:
        try:
            async with httpx.AsyncClient(base_url=url) as client:
                body = {"model": "scripted", "messages": [{"role": "user", "content": "count"}], "max_tokens": 4}
                for key in ("nobody's", "ann's", "ann's"):
                    headers = {"authorization": f"Bearer {key}"}
                    answer = await client.post("/v1/chat/completions", json=body, headers=headers)
                    seen.append(answer.status_code)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    assert uvloop.run(serve(dataclasses.replace(config(in_process=True), keys=keys), ready)) == 0
    assert seen == [401, 200, 429]
    (file,) = (tmp_path / "usage").glob("*.json")
    ((key, model, figures),) = msgspec.json.decode(file.read_bytes())
    assert (key, model) == ("ann", "scripted")
    assert (figures["requests"], figures["ok"], figures["limited"], figures["completion_tokens"]) == (1, 1, 1, 4)


def test_an_open_address_wants_keys(tmp_path: Path) -> None:
    everywhere = Server(host="0.0.0.0", port=0)
    given = dataclasses.replace(config(), server=everywhere, keys=Keys(usage_path=str(tmp_path)))
    with pytest.raises(StartupError, match=r"server\.key"):
        uvloop.run(serve(given, lambda url: None))


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = dataclasses.replace(config(), server=Server(port=port))
        with pytest.raises(StartupError, match=f"{port} on 127.0.0.1 is in use"):
            asyncio.run(serve(given, lambda url: None))


def test_a_model_file_that_is_none_ends_the_start(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF and nothing else")
    given = dataclasses.replace(config(), model=Model(path=str(model), alias="m"))
    with pytest.raises(StartupError, match=r"m\.gguf is a GGUF file of version"):
        uvloop.run(serve(given, lambda url: None))


def declared(*specs: EngineSpec) -> Config:
    aliases = (AliasSpec("chat", {spec.name: 1.0 for spec in specs}),)
    return dataclasses.replace(config(in_process=True), engines=specs, aliases=aliases)


TWO = (
    EngineSpec("a", "llama", "scripted:1000", "f", settings={"engine.cells": 1024}),
    EngineSpec("b", "llama", "scripted:1000", "f"),
)


def test_engines_of_ours_have_their_own_settings() -> None:
    async def main() -> None:
        pool = make_pool(declared(*TWO))
        assert list(pool.routes) == ["chat"]
        await pool.load("a")
        await pool.load("b")
        a, b = pool.backends["a"], pool.backends["b"]
        assert isinstance(a, ServedModel), "requests go to it without a detour"
        assert isinstance(pool.members["a"].backend, OwnEngine)
        assert (a.stats.cells_total, b.stats.cells_total) == (1024, 16384)
        assert a.stats.completion_tokens == b.stats.completion_tokens == 1, "both are exercised before they are used"
        await pool.close()

    uvloop.run(main())


def test_the_settings_of_an_engine_are_prepared_where_that_is_asked_for(tmp_path: Path) -> None:
    asked: list[str] = []

    def prepare(spec: EngineSpec) -> Config:
        asked.append(spec.name)
        raise StartupError("cannot be fetched")

    async def main() -> None:
        pool = make_pool(declared(*TWO), prepare)
        assert asked == [], "not before it is loaded"
        with pytest.raises(StartupError, match="cannot be fetched"):
            await pool.load("a")
        missing = EngineSpec("c", "llama", str(tmp_path / "none.gguf"), "f")
        plain = make_pool(declared(missing))
        with pytest.raises(StartupError, match=r"none\.gguf"):
            await plain.load("c")

    uvloop.run(main())
    assert asked == ["a"]


def test_declared_engines_are_served_from_start_to_signal() -> None:
    seen: list[str] = []

    def ready(url: str) -> None:
        asyncio.get_running_loop().create_task(ask(url))

    async def ask(url: str) -> None:
        try:
            async with httpx.AsyncClient(base_url=url) as client:
                body = {"model": "chat", "prompt": "count", "max_tokens": 3}
                for _ in range(2):
                    answer = await client.post("/v1/completions", json=body)
                    seen.append(answer.json()["choices"][0]["text"])
                figures = (await client.get("/metrics")).text.splitlines()
                told = await client.post("/tokenize", json={"model": "chat", "prompt": "hi"})
                seen.append(str(told.json()["tokens"]))
                seen.extend(line for line in figures if line.startswith('headrace_attempts_total{end="ok"'))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    assert uvloop.run(serve(declared(*TWO), ready)) == 0
    assert seen == [
        "1 2 3 ",
        "1 2 3 ",
        "[104, 105]",
        'headrace_attempts_total{end="ok",engine="a"} 1.0',
        'headrace_attempts_total{end="ok",engine="b"} 1.0',
    ]
