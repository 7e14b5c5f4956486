"""Acceptance, section 5: what is asked for is looked at before anything is done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from acceptance.asking import CHAT, COMP, Answer, chat_fields, comp_fields, dumps, envelope, on_loop
from acceptance.scene import CONTROL_TEXT, Scene, scripted
from acceptance.tiny import Tiny
from server.socket_client import until

TinyStart = Callable[..., Tiny]

CONTENTS: list[Any] = ["", " ", "\n", []]
NO_PROMPTS: list[Any] = [[], [[]]]
EMPTY_PROMPTS: list[Any] = ["", [""]]

# OC-18 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


async def with_one_behind(scene: Scene, request: Awaitable[Answer]) -> Answer:
    """The request's answer; a second one, queued behind it for the only place, is answered too. ALIVE afterwards."""
    scene.gate.shut()
    task = asyncio.ensure_future(request)
    await until(lambda: task.done() or scene.gate.standing)
    behind = asyncio.create_task(scene.control())
    await until(lambda: scene.app.running == (1 if task.done() else 2))
    assert not behind.done()
    scene.gate.open()
    assert await behind == CONTROL_TEXT
    answer = await task
    await scene.idle()
    await scene.alive()
    return answer


@on_loop
async def test_oc_18_empty_chats() -> None:
    async with scripted([[b"fine"]], max_running=1) as scene:
        envelope(await with_one_behind(scene, scene.chat(messages=[])), 400, "messages")
        for content in CONTENTS:
            answer = await with_one_behind(scene, scene.chat(messages=user(content)))
            assert (answer.status, answer.text) == (200, "fine"), content
            assert answer.usage["prompt_tokens"] == len(scene.scripted.asked[-1]) > 0


@pytest.mark.parametrize("add_bos", [True, False])
@on_loop
async def test_oc_18_empty_prompts(add_bos: bool) -> None:
    bos = 258
    async with scripted([[b"fine"]], max_running=1, info={"bos": bos, "add_bos": add_bos}) as scene:
        for prompt in NO_PROMPTS:
            envelope(await with_one_behind(scene, scene.comp(prompt=prompt)), 400, "prompt")
        for text in EMPTY_PROMPTS:
            answer = await with_one_behind(scene, scene.comp(prompt=text))
            if add_bos:
                assert (answer.status, answer.text) == (200, "fine")
                assert scene.scripted.asked[-1] == [bos]
            else:
                envelope(answer, 400, "prompt")
        assert len(scene.scripted.asked) == (2 if add_bos else 0)


@pytest.mark.parametrize("path", [CHAT, COMP])
@on_loop
async def test_oc_18_empty_bodies(path: str) -> None:
    async with scripted([[b"fine"]], max_running=1) as scene:
        for body in (b"", b"[]", b"null", b" ", b"{}"):
            envelope(await with_one_behind(scene, scene.post(path, body)), 400)
        assert not scene.scripted.asked
        valid = dumps((chat_fields if path == CHAT else comp_fields)(scene.model, {}))
        for headers in ({}, {"content-type": ""}, {"content-type": "text/plain"}):
            answer = await with_one_behind(scene, scene.send("POST", path, content=valid, headers=headers))
            assert (answer.status, answer.text) == (200, "fine")


@on_loop
async def test_oc_18_empty_inputs_on_a_model(tiny: TinyStart) -> None:
    server = tiny(engine_max_running=1, engine_prefix_cache=False)
    async with server.calls():
        await server.alive()
        for content in CONTENTS:
            answer, _ = await asyncio.gather(server.chat(messages=user(content), max_tokens=4), server.alive())
            assert answer.status == 200
            assert answer.usage["prompt_tokens"] > 0
        envelope(await server.chat(messages=[]), 400, "messages")
        for nothing in NO_PROMPTS:
            envelope(await server.comp(prompt=nothing), 400, "prompt")
        for text in EMPTY_PROMPTS:
            answer = await server.comp(prompt=text, max_tokens=4)
            if server.info.add_bos:
                assert answer.status == 200
            else:
                envelope(answer, 400, "prompt")
        await server.alive()
