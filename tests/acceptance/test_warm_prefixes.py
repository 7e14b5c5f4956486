"""Prefixes that are kept warm: those of a file of templates, across restarts too, and those found in the traffic."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from acceptance.asking import Asking, on_loop
from acceptance.test_kv_tiers import OTHERS
from acceptance.tiered import Served, answering, cached
from acceptance.tiny import tinies
from headrace.assembly import make_blueprint, make_bounds, make_encode, make_limits
from headrace.engines.local import LocalEngine
from headrace.engines.worker import build, make_stepper
from headrace.kv.templates import explain, parse
from headrace.settings import Config, Engine, Model, Optimizations, Tiers
from server.socket_client import until

pytestmark = pytest.mark.real

RULES = " ".join(f"Rule {i}: answer politely, shortly and in plain words." for i in range(1, 11))
SYSTEM = f"You are the support desk of a lighthouse. {RULES}"


def chat(system: str, user: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"messages": messages, "temperature": 0, "max_tokens": 2}


async def figure(server: Asking, name: str) -> float:
    """A sum over the rows of one family in /metrics."""
    rows = (await server.get("/metrics")).body.decode().splitlines()
    return sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith(f"{name}{{"))


async def until_pinned(server: Asking) -> None:
    async with asyncio.timeout(60):
        while await figure(server, "headrace_prefixes_pinned") < 1:
            pass


# --- given


def test_a_template_is_warm_before_its_first_request_and_after_a_restart(demo_model: Path, tmp_path: Path) -> None:
    system = f"{SYSTEM} Today is {{date}}."
    file = tmp_path / "templates.toml"
    file.write_text(f'[templates.desk]\nsystem = "{system}"\n')
    config = dataclasses.replace(Config(), model=Model(str(demo_model), "tiny"))
    (template,) = parse({"templates": {"desk": {"system": system}}})
    prefix = len(explain(template, make_encode(config)).tokens)
    assert prefix > 100
    settings = {"templates_file": file, "tiers_ssd_path": tmp_path / "kv", "tiers_ram_mib": 64}
    settings |= {"engine_cells": 1024, "optimizations_mined_templates": "false"}

    @on_loop
    async def first() -> None:
        async with server.calls():
            await until_pinned(server)
            assert await figure(server, "headrace_prompt_tokens_total") >= prefix, "computed with nobody waiting"
            answer = await server.chat(**chat(system.format(date="Monday"), "Is it open?"))
            assert cached(answer) >= prefix

    @on_loop
    async def second() -> None:
        async with server.calls():
            await until_pinned(server)
            assert await figure(server, "headrace_prompt_tokens_total") == 0, "it came from the disk"
            answer = await server.chat(**chat(system.format(date="Tuesday"), "Where is it?"))
            assert cached(answer) >= prefix

    @on_loop
    async def third() -> None:
        async with server.calls():
            answer = await server.chat(**chat(system.format(date="Sunday"), "Who are you?"))
            assert cached(answer) >= prefix, "also where nobody asks for it to be pinned"

    for number, check in enumerate((first, second, third)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with tinies(demo_model, folder) as start:
            server = start(**settings)
            check()
        if check is second:
            del settings["templates_file"]


# --- mined


@contextlib.asynccontextmanager
async def mining(path: Path, *, on: bool) -> AsyncIterator[Served]:
    """A server with room for little more than one prompt beside what is pinned, which looks for prefixes whenever it
    rests."""
    config = dataclasses.replace(
        Config(),
        model=Model(str(path), "tiny"),
        engine=Engine(in_process=True, threads=1, threads_batch=1, cells=1024, idle_cells=256),
        optimizations=Optimizations(adaptive_chunks=False, mined_templates=on),
        tiers=Tiers(ram_mib=8, ssd_mib=0),
    )
    blueprint = make_blueprint(config)
    assert blueprint.tiers is not None
    blueprint = msgspec.structs.replace(blueprint, tiers=msgspec.structs.replace(blueprint.tiers, look_s=0.0))
    engine = LocalEngine(
        lambda: build(blueprint),
        make_limits(config),
        time.monotonic,
        bounds=make_bounds(config),
        begin=lambda loaded, deliver: make_stepper(blueprint, loaded, deliver),
    )
    async with answering(config, engine) as server:
        yield server


@pytest.mark.parametrize("on", [True, False], ids=["mined", "not mined"])
def test_what_chats_have_in_common_is_pinned_and_outlasts_other_traffic(demo_model: Path, on: bool) -> None:
    @on_loop
    async def check() -> None:
        async with mining(demo_model, on=on) as server:
            # A use counts a little less with every second: three of them are less than three.
            for user in ("Is it open?", "Where is it?", "Who are you?", "When was it built?"):
                assert (await server.chat(**chat(SYSTEM, user))).status == 200
            if on:
                await until_pinned(server)
            for text in OTHERS:
                await server.ask(f"{text} " * 8)
            await until(lambda: server.engine.stats.running == 0)
            assert await figure(server, "headrace_prefixes_pinned") == on
            late = await server.chat(**chat(SYSTEM, "Can I see it at night?"))
            assert (cached(late) > 100) == on

    check()
