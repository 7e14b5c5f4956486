"""OC-91: a model's own sampling defaults, where a request says nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from acceptance.asking import on_loop
from acceptance.scene import scripted
from acceptance.tiny import Tiny, tinies
from model_files import with_metadata

TinyStart = Callable[..., Tiny]
OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
FIELDS = tuple(OPENAI)
ALONE: dict[str, Any] = {"engine_max_running": 1, "engine_prefix_cache": False, "model_measure": False}


@pytest.fixture(scope="module")
def made(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Tiny]]:
    """`made(temp=0.3)`: a server of a file that says so of its sampling, of a model that nobody knows."""
    with ExitStack() as stack:

        def start(**said: float | str) -> Tiny:
            folder = tmp_path_factory.mktemp("made")
            metadata = {"general.name": "Nobody", **{f"general.sampling.{key}": value for key, value in said.items()}}
            file = with_metadata(demo_model, folder / "made.gguf", metadata)
            return stack.enter_context(tinies(file, folder))(**ALONE)

        yield start


async def says(server: Tiny) -> Any:
    """What `GET /v1/models` says of the sampling; both forms say the same."""
    listed = (await server.get("/v1/models")).json["data"]
    assert listed == [(await server.get(f"/v1/models/{server.model}")).json]
    return listed[0]["headrace"]["sampling"]


async def same_draws(server: Tiny, expected: dict[str, Any], **fields: Any) -> None:
    """A request with these fields draws what one draws that says all of `expected`, in both APIs, choice by choice."""
    for ask in (server.chat, server.comp):
        common: dict[str, Any] = {"seed": 7, "max_tokens": 24, "n": 2}
        silent = await ask(**common, **fields)
        spoken = await ask(**common, **expected)
        assert silent.status == spoken.status == 200, (silent, spoken)
        assert [silent.cat(i) for i in range(2)] == [spoken.cat(i) for i in range(2)]


@on_loop
async def test_oc_91_the_demo_model_is_sampled_as_its_makers_say(tiny: TinyStart) -> None:
    server = tiny(**ALONE)
    own: dict[str, Any] = {**OPENAI, "temperature": 0.2, "top_p": 0.9}
    async with server.calls():
        assert await says(server) == own
        await same_draws(server, own)
        await same_draws(server, own, **dict.fromkeys(FIELDS))
        await same_draws(server, {**own, "temperature": 1.5}, temperature=1.5)
        asks: dict[str, Any] = {"seed": 7, "max_tokens": 24}
        greedy = [(await server.chat(**asks, temperature=0, top_p=top_p)).text for top_p in (None, 1)]
        assert greedy[0] == greedy[1] == (await server.chat(**{**asks, "seed": 8}, temperature=0)).text
        assert (await server.chat(**asks)).text != (await server.chat(**asks, temperature=1, top_p=1)).text
        prompt = {"model": server.model, "prompt": "hi", **asks}
        plain = await server.send("POST", "/chat/v1/stream", json=prompt)
        pieces = [piece for chunk in plain.body.split(b"\n\n") for piece in tokens_of(chunk)]
        assert "".join(pieces) == (await server.chat(**asks, **own)).text, "the simple stream is a chat too"


def tokens_of(event: bytes) -> list[str]:
    data = event.partition(b"data: ")[2]
    tokens: list[str] = json.loads(data).get("tokens", []) if data else []
    return tokens


@on_loop
async def test_oc_91_a_setting_brings_openais_back(tiny: TinyStart) -> None:
    server = tiny(**ALONE, model_own_sampling=False)
    async with server.calls():
        assert await says(server) == OPENAI
        await same_draws(server, OPENAI)


@on_loop
async def test_oc_91_a_file_says_how_it_is_sampled(made: Callable[..., Tiny]) -> None:
    server = made(temp=0.5, top_p=0.75, top_k=30.0, min_p=0.0625, penalty_repeat=1.25, mirostat=2.0)
    own = {"temperature": 0.5, "top_p": 0.75, "top_k": 30, "min_p": 0.0625, "repetition_penalty": 1.25}
    async with server.calls():
        assert await says(server) == own
        await same_draws(server, own)
        await same_draws(server, {**own, "top_k": 0, "repetition_penalty": 1}, top_k=-1, repetition_penalty=1)
    assert "which is ignored" not in server.log


@on_loop
async def test_oc_91_what_a_file_says_and_cannot_be_is_ignored_in_one_line(made: Callable[..., Tiny]) -> None:
    server = made(temp=-1.0, top_p=7.0, top_k="many", min_p=math.nan, penalty_repeat=math.inf)
    async with server.calls():
        assert await says(server) == OPENAI
        await same_draws(server, OPENAI)
    lines = [line for line in server.log.splitlines() if "which is ignored" in line]
    assert len(lines) == 1, server.log
    for key in ("temp", "top_p", "top_k", "min_p", "penalty_repeat"):
        assert f"general.sampling.{key} must be" in lines[0]


@on_loop
async def test_oc_91_a_model_that_says_nothing_is_sampled_as_openai_says() -> None:
    async with scripted([[b"a"], [b"b"]]) as scene:
        for ask in (scene.chat, scene.comp):
            assert (await ask()).text == "ab"
            sampling = scene.scripted.draws[-1].sampling
            assert {name: getattr(sampling, name) for name in FIELDS} == OPENAI
