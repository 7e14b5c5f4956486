"""OC-19 and OC-20: prompts of token ids, prompts that are too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from acceptance.asking import envelope, on_loop
from acceptance.scene import CONTROL_PROMPT, scripted
from acceptance.tiny import Tiny
from server.socket_client import until

ABC = [[b"a"], [b"b"], [b"c"]]

MODES: tuple[dict[str, Any], ...] = ({}, {"stream": True, "stream_options": {"include_usage": True}})
"""Whole and streamed, both with usage."""

# OC-19 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_oc_19_token_ids_out_of_range() -> None:
    async with scripted(ABC) as scene:
        n_vocab = scene.scripted.info.n_vocab
        for prompt in (
            [-1],
            [n_vocab],
            [4294967294],
            [9223372036854775808],
            [1.5],
            [[1, 2], [-1]],
            ["a", 1],
        ):
            for stream in (False, True):
                envelope(await scene.comp(prompt=prompt, stream=stream), 400, "prompt")
        assert scene.app.running == 0
        await scene.alive()
        # Commands reach the engine in order, so with the control request behind it nothing else can be on its way.
        assert scene.scripted.prompts == [list(CONTROL_PROMPT.encode())]
        assert scene.scripted.prefilled == 0

        answer = await scene.comp(prompt=[[1, 2], [0, n_vocab - 1]])
        assert answer.status == 200, "the edges themselves are valid"
        assert scene.scripted.prompts[1:] == [[1, 2], [0, n_vocab - 1]]


@pytest.mark.real
@on_loop
async def test_oc_19_prompts_of_special_tokens_only(tiny: Callable[..., Tiny]) -> None:
    server = tiny()
    async with server.calls():
        eos, bos = server.info.eos, server.info.bos
        assert eos is not None
        assert bos is not None
        prompts = ([eos], [bos], [bos, eos])
        secret = "XYLOPHONE"

        async def special() -> list[str]:
            texts = []
            for prompt in prompts:
                for mode in MODES:
                    answer = await server.comp(prompt=prompt, max_tokens=6, temperature=0, **mode)
                    assert answer.status == 200, answer
                    assert answer.usage["prompt_tokens"] == len(prompt)
                    assert answer.usage["completion_tokens"] >= 0
                    texts.append(answer.text)
            answer = await server.chat(
                messages=[{"role": "user", "content": "<|im_end|>"}], max_tokens=6, temperature=0
            )
            assert answer.status == 200, answer
            return [*texts, answer.text]

        await server.alive()
        before = await special()
        loud = await server.comp(prompt=f"{secret} {secret} {secret} {secret}", max_tokens=16, temperature=0)
        assert secret in loud.text.upper()
        assert await special() == before, "what others said must not be seen"
        assert not any(secret in text.upper() for text in before)
        await server.alive()


# OC-20 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

CONTEXT = 256


def message(tokens: int) -> list[dict[str, str]]:
    """Messages whose rendered prompt has that many tokens: a byte is one, and ChatML adds 19 around the text."""
    return [{"role": "user", "content": "x" * (tokens - 19)}]


@on_loop
async def test_oc_20_a_prompt_longer_than_the_context() -> None:
    async with scripted(ABC, n_ctx=CONTEXT, max_running=1, shut=True) as scene:
        # The gate is shut: whoever is answered was not computed. A request runs, and one waits behind it and later
        # behind the refused ones.
        running = await scene.connect()
        await running.chat(stream=True)
        await until(lambda: scene.gate.standing)
        waiting = asyncio.ensure_future(scene.chat())
        await until(lambda: scene.app.running == 2)

        loop = asyncio.get_running_loop()
        for tokens in (300, CONTEXT):
            for options in (*MODES, {"max_tokens": 1}):
                asked = loop.time()
                answer = await scene.chat(messages=message(tokens), **options)
                assert loop.time() - asked < 1
                error = envelope(answer, 400, "messages", code="context_length_exceeded")
                assert str(CONTEXT) in error["message"]
                assert str(tokens) in error["message"]
                assert b"usage" not in answer.body

        behind = asyncio.ensure_future(scene.chat(messages=message(CONTEXT - 1)))
        await until(lambda: scene.app.running == 3)
        scene.gate.open()
        assert (await waiting).text == "abc"
        longest = await behind
        assert longest.status == 200
        assert (longest.text, longest.finish) == ("a", ["length"]), "one token fits"
        assert longest.usage["prompt_tokens"] == CONTEXT - 1
        await running.head()
        assert (await running.rest())[-1] == "[DONE]"
        # Whatever came to the engine came whole.
        assert [len(prompt) for prompt in scene.scripted.prompts] == [21, 21, CONTEXT - 1]
        await scene.alive()
