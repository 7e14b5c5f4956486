"""OC-43: whose cached prefixes a key may profit from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from acceptance.asking import Answer, on_loop
from acceptance.keyed import keyed, put_keys
from acceptance.test_warm_prefixes import SYSTEM, chat, until_pinned
from acceptance.tiered import Served, answering, cached
from headrace.assembly import make_encode, make_engine
from headrace.core.kv import Pin
from headrace.kv.templates import explain, parse
from headrace.settings import Config, Engine, Model, Optimizations, Tiers
from server.socket_client import until

pytestmark = pytest.mark.real

NAMES = ("one", "two", "three", "four", "five")
SALTS = ("key:one", "one", "", "secret-one")
PROMPT = " ".join(f"{number} green bottles are hanging on the wall." for number in range(1, 46))


async def ask(server: Served, name: str, **fields: Any) -> Answer:
    asked = {"temperature": 0, "max_tokens": 1, **fields}
    send = server.chat if "messages" in asked else server.comp
    answer = await send(headers={"authorization": f"Bearer secret-{name}"}, **asked)
    assert answer.status == 200, answer
    return answer


def config(path: Path, folder: Path) -> Config:
    return dataclasses.replace(
        Config(),
        model=Model(str(path), "tiny"),
        engine=Engine(in_process=True, threads=1, threads_batch=1, cells=4096, idle_cells=4096),
        optimizations=Optimizations(mined_templates=False),
        tiers=Tiers(ram_mib=64, ssd_mib=64, ssd_path=str(folder / "kv")),
    )


def kept(folder: Path) -> set[str]:
    """The names of what lies on the disk, which are made from the keys of blocks."""
    return {path.name for path in (folder / "kv").rglob("*.kv")}


def put(folder: Path) -> None:
    records: dict[str, dict[str, Any]] = {name: {"secret": f"secret-{name}"} for name in NAMES}
    put_keys(folder / "keys.toml", **records)


@on_loop
async def test_oc_43_tenants_do_not_see_each_other(demo_model: Path, tmp_path: Path) -> None:
    given = config(demo_model, tmp_path)
    engine = make_engine(given)
    put(tmp_path)
    async with keyed(tmp_path) as (guard, _), answering(given, engine, guard=guard) as server:
        first = await ask(server, "one", prompt=PROMPT)
        assert first.usage["prompt_tokens"] >= 400
        assert cached(first) == 0
        assert cached(await ask(server, "one", prompt=PROMPT)) > 0
        await until(lambda: len(kept(tmp_path)) >= 2)
        mine = kept(tmp_path)
        assert cached(await ask(server, "two", prompt=PROMPT)) == 0
        await until(lambda: len(kept(tmp_path)) >= 2 * len(mine))
        assert mine < kept(tmp_path), "the same prompt, and files of other names"
        for name, salt in zip(NAMES[2:], SALTS, strict=False):
            assert cached(await ask(server, name, prompt=PROMPT, cache_salt=salt)) == 0, salt
        assert cached(await ask(server, "two", prompt=PROMPT, cache_salt=SALTS[-1])) > 0, "it is ignored"


@on_loop
async def test_oc_43_what_the_operator_pins_is_for_all_and_what_follows_is_not(
    demo_model: Path, tmp_path: Path
) -> None:
    given = config(demo_model, tmp_path)
    (template,) = parse({"templates": {"desk": {"system": SYSTEM}}})
    prefix = explain(template, make_encode(given)).tokens
    engine = make_engine(given)
    put(tmp_path)
    async with keyed(tmp_path, server_key="secret-all") as (guard, _), answering(given, engine, guard=guard) as server:
        engine.pin([Pin("desk", prefix)])
        server.key = "secret-all"
        await until_pinned(server)
        own = chat(SYSTEM, "My name is Eleanor and I was born in the lighthouse. What may I call you?")
        for name in ("one", "two"):
            assert len(prefix) <= cached(await ask(server, name, **own)) <= len(prefix) + 1, name
        assert cached(await ask(server, "one", **own)) > len(prefix) + 5
        # The operator's own key is of no salt, as pins are; its text behind the pin is still its own.
        assert cached(await ask(server, "all", **own)) <= len(prefix) + 1
        assert cached(await ask(server, "three", **own)) <= len(prefix) + 1


@on_loop
async def test_oc_43_with_isolation_off_all_share(demo_model: Path, tmp_path: Path) -> None:
    given = config(demo_model, tmp_path)
    put(tmp_path)
    async with (
        keyed(tmp_path, isolate=False) as (guard, _),
        answering(given, make_engine(given), guard=guard) as server,
    ):
        assert cached(await ask(server, "one", prompt=PROMPT)) == 0
        assert cached(await ask(server, "two", prompt=PROMPT)) > 0
