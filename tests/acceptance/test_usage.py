"""OC-33 and OC-34: what is counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from acceptance.asking import Answer, on_loop
from acceptance.scene import scripted
from acceptance.tiny import Tiny

BURST = [[b"a", b"b", b"c"], [b""], [b"d"], [b"e"]]
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def total_is_sum(usage: dict[str, Any]) -> None:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


# OC-33 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_oc_33_streamed_or_not() -> None:
    async with scripted(BURST) as scene:
        usages = []
        for ask in (scene.chat, scene.comp):
            for n in (1, 3):
                pair = []
                for mode in ({}, USAGE):
                    produced = scene.scripted.produced
                    answer = await ask(n=n, max_tokens=5, **mode)
                    assert answer.status == 200
                    usage = answer.usage
                    total_is_sum(usage)
                    assert usage["completion_tokens"] == 5 * n == scene.scripted.produced - produced
                    assert usage["prompt_tokens"] == len(scene.scripted.prompts[-1])
                    for index in range(n):
                        assert answer.cat(index) == "abcd"
                        reasons = [c["finish_reason"] for c in answer.choices(index) if c.get("finish_reason")]
                        assert reasons == ["length"]
                    # The cache's share depends on what came before, not on the mode: it is not compared here.
                    pair.append({k: v for k, v in usage.items() if k != "prompt_tokens_details"})
                assert pair[0] == pair[1]
                usages.append(pair[0])
        one, three = usages[0], usages[1]
        assert one["prompt_tokens"] == three["prompt_tokens"]
        assert three["completion_tokens"] == 3 * one["completion_tokens"]
        await scene.alive()


@on_loop
async def test_oc_33_an_answer_that_ends_by_itself() -> None:
    """Not in the case: here the end token counts as well, in both modes."""
    async with scripted(BURST) as scene:
        for mode in ({}, USAGE):
            answer = await scene.chat(**mode)
            assert (answer.text, answer.finish) == ("abcde", ["stop"])
            assert answer.usage["completion_tokens"] == 7


@on_loop
async def test_oc_33_several_prompts_count_once_each() -> None:
    """Not in the case, but the same money: completions take several prompts."""
    async with scripted(BURST) as scene:
        for mode in ({}, USAGE):
            answer = await scene.comp(prompt=["hi", "there"], n=2, max_tokens=5, **mode)
            total_is_sum(answer.usage)
            assert answer.usage["prompt_tokens"] == 2 + 5
            assert answer.usage["completion_tokens"] == 4 * 5


# OC-34 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

PROMPT = 300
SHARED = 150
_salts = itertools.count()


class Counted:
    """Prompts of token ids, and what the engine computed of them."""

    def __init__(self, server: Tiny) -> None:
        self._server = server
        self._words = [server.vocabulary.encode(f" {word}", special=False)[0] for word in WORDS]

    def prompt(self, length: int = PROMPT) -> list[int]:
        """Tokens of which no other prompt begins with the first."""
        first, *words = self._words[next(_salts) :]
        return [first, *(words[(i * i + i // 5) % len(words)] for i in range(length - 1))]

    async def ask(self, prompt: list[int], *, stream: bool, **fields: Any) -> int:
        """How many tokens were cached, as usage says; checked against what the engine evaluated."""
        before = await self._evaluated()
        answer = await self._server.comp(
            prompt=prompt, max_tokens=1, temperature=0, **(USAGE if stream else {}), **fields
        )
        usage = self._usage(answer)
        assert usage["prompt_tokens"] == len(prompt)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert len(prompt) - cached == await self._evaluated() - before
        assert isinstance(cached, int)
        return cached

    def _usage(self, answer: Answer) -> dict[str, Any]:
        assert answer.status == 200
        total_is_sum(answer.usage)
        return answer.usage

    async def _evaluated(self) -> int:
        """Prompt tokens that the engine has computed since its start."""
        text = (await self._server.get("/metrics")).body.decode()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return int(next(s.value for s in samples if s.name == "headrace_prompt_tokens_total"))


WORDS = "one two three four five six seven eight nine ten red blue green black white day night sun moon star".split()


@pytest.mark.real
@on_loop
async def test_oc_34_cached_tokens(tiny: Callable[..., Tiny]) -> None:
    server = tiny()
    async with server.calls():
        counted = Counted(server)
        for stream in (False, True):
            prompt = counted.prompt()
            assert await counted.ask(prompt, stream=stream) == 0
            assert 0 < await counted.ask(prompt, stream=stream) <= PROMPT - 1
            assert 0 < await counted.ask(prompt, stream=not stream) <= PROMPT - 1
            other = [*prompt[:SHARED], *[prompt[0]] * (PROMPT - SHARED)]
            assert other[SHARED] != prompt[SHARED]
            assert 0 < await counted.ask(other, stream=stream) <= SHARED
            # Switched off for a request, it neither reads the cache nor leaves anything there.
            off = {"headrace": {"cache": False}}
            unseen = counted.prompt(40)
            assert await counted.ask(unseen, stream=stream, **off) == 0
            assert await counted.ask(unseen, stream=stream) == 0
            assert await counted.ask(unseen, stream=stream, **off) == 0
        await server.alive()


@pytest.mark.real
@on_loop
async def test_oc_34_cached_tokens_of_a_server_without_a_cache(tiny: Callable[..., Tiny]) -> None:
    server = tiny(engine_prefix_cache=False)
    async with server.calls():
        counted = Counted(server)
        prompt = counted.prompt()
        for stream in (False, True):
            assert await counted.ask(prompt, stream=stream) == 0
        await server.alive()
