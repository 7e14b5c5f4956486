"""Acceptance, section 3: stop strings, and what ends an answer inside a burst."""

from __future__ import annotations

from typing import Any

import pytest

from acceptance.asking import Answer, envelope, on_loop
from acceptance.scene import Scene, scripted
from headrace.testing import END

USAGE = {"include_usage": True}


async def both(scene: Scene, **fields: Any) -> tuple[Answer, Answer]:
    """CHAT, streamed and not."""
    return await scene.chat(stream=True, stream_options=USAGE, **fields), await scene.chat(**fields)


@on_loop
async def test_oc_08_stop_string_across_tokens() -> None:
    async with scripted([[b"x "], [b"EN"], [b"D O"], [b"F"], [b" y"]]) as scene:
        for stream in (True, False):
            before = scene.scripted.produced
            answer = await scene.chat(stream=stream, stop=["END OF"])
            assert answer.status == 200
            assert answer.texts() == ["x "], "no other chunk has text"
            assert answer.finish == ["stop"]
            await scene.idle()
            assert scene.scripted.produced - before <= 5
        await scene.alive()


@on_loop
async def test_oc_08_the_engine_is_stopped_at_the_match() -> None:
    """The script would go on for long."""
    async with scripted([[b"x "], [b"EN"], [b"D O"], [b"F"], *([b" y"] for _ in range(1000))]) as scene:
        for answer in await both(scene, stop=["END OF"]):
            assert answer.text == "x "
            assert answer.usage["completion_tokens"] <= 5
        await scene.idle()
        assert scene.scripted.produced <= 2 * 5


@on_loop
async def test_oc_09_held_text_at_the_natural_end() -> None:
    tokens = [[b"UNO "], [b"DUE "], [b"TR"], [b"E"]]
    stop = ["TRE\nAAAA"]
    async with scripted([*tokens, [END]]) as scene:
        for answer in await both(scene, stop=stop):
            assert answer.text == "UNO DUE TRE"
            assert answer.finish == ["stop"]
        await scene.alive()
    async with scripted([*tokens, *([b"!"] for _ in range(10))]) as scene:
        for answer in await both(scene, stop=stop, max_tokens=4):
            assert answer.text == "UNO DUE TRE"
            assert answer.finish == ["length"]
        await scene.alive()


@on_loop
async def test_oc_10_degenerate_stop_values() -> None:
    async with scripted([[b"a"], [b"b"], [b"c"], [END]]) as scene:
        usages = []
        accepted: list[dict[str, Any]] = [{}, {"stop": None}, {"stop": []}, {"stop": "zz"}, {"stop": ["zz"]}]
        for fields in accepted:
            for answer in await both(scene, headrace={"cache": False}, **fields):
                assert answer.status == 200, fields
                assert answer.text == "abc"
                assert answer.finish == ["stop"]
                usages.append(answer.usage)
        assert all(usage == usages[0] for usage in usages)
        produced = scene.scripted.produced
        for stop in ("", ["zz", ""], ["a", "b", "c", "d", "e"], [1], {"a": 1}):
            for ask in (scene.chat, scene.comp):
                for stream in (True, False):
                    envelope(await ask(stream=stream, stop=stop), 400, "stop")
        assert scene.scripted.produced == produced
        assert (await scene.chat(stop=["v", "x", "y", "z"])).text == "abc", "four are allowed"
        await scene.alive()


# OC-11: bursts ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def after(scene: Scene, answer: Answer, end: list[bytes], beyond: list[bytes]) -> None:
    """Of what the engine drew after the end nothing is left: not in its slots, not in what the next turn reuses."""
    await scene.idle()
    word = scene.scripted.tokenizer.word
    unseen = {word(piece) for piece in beyond}
    assert not any(unseen & set(held) for held in scene.scripted.slots.values())
    prompt = scene.scripted.prompts[-1]
    most = len(prompt) + answer.usage["completion_tokens"]
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": "".join(piece.decode() for piece in beyond)},
    ]
    chat = await scene.chat(messages=turns, max_tokens=1)
    assert len(prompt) <= chat.usage["prompt_tokens_details"]["cached_tokens"] <= most
    # The most favourable next turn for a cache that kept too much: exactly what was drawn, the unseen tokens too.
    drawn = [word(piece) for piece in (*(character.encode() for character in answer.text), *end, *beyond, b"?")]
    comp = await scene.comp(prompt=prompt + drawn, max_tokens=1)
    assert len(prompt) <= comp.usage["prompt_tokens_details"]["cached_tokens"] <= most


CASES = [
    pytest.param([[b"A", b"B", END, b"C", b"D"]], {}, "AB", "stop", [END], [b"C", b"D"], id="end token"),
    pytest.param([[b"A", b"B", b"STOP", b"C"]], {"stop": ["STOP"]}, "AB", "stop", [b"STOP"], [b"C"], id="stop string"),
    pytest.param(
        [[b"A", b"B", b"C", b"D"], [b"E", b"F", b"G", b"H"]],
        {"max_tokens": 6}, "ABCDEF", "length", [], [b"G", b"H"], id="max_tokens",
    ),
]  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("script", "fields", "text", "reason", "end", "beyond"), CASES)
@on_loop
async def test_oc_11_an_end_inside_a_burst(
    script: list[list[bytes]],
    fields: dict[str, Any],
    text: str,
    reason: str,
    end: list[bytes],
    beyond: list[bytes],
    stream: bool,
) -> None:
    async with scripted(script) as scene:
        options: dict[str, Any] = {"stream_options": USAGE} if stream else {}
        answer = await scene.chat(stream=stream, logprobs=True, **options, **fields)
        assert answer.status == 200
        assert answer.text == text
        assert answer.finish == [reason]
        assert answer.usage["completion_tokens"] == len(text) + len(end)
        said = [bytes(entry["bytes"]) for entry in answer.logprobs]
        assert said[: len(text)] == [character.encode() for character in text]
        assert not set(beyond) & set(said)
        if reason == "length":
            assert len(said) == answer.usage["completion_tokens"] == 6
        else:
            assert answer.usage["completion_tokens"] == 3
        await after(scene, answer, end, beyond)
        await scene.alive()
