"""The streaming wire through the relay: OC-01, OC-02, OC-03, OC-05 and OC-06 for answers of other servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

import openai
import pytest

from acceptance.asking import CHAT, COMP, envelope, on_loop
from acceptance.relay_scene import ALIAS, Got, relaying
from upstreams import DONE, Play, Request, chat_events, completion_events, event, stream, whole

USAGE = {"include_usage": True}
MAKE: dict[str, Callable[..., list[bytes]]] = {CHAT: chat_events, COMP: completion_events}
both = pytest.mark.parametrize("path", [CHAT, COMP])


def llama(events: Iterable[bytes]) -> list[bytes]:
    """As llama-server orders a chunk's fields."""
    out = []
    for one in events:
        if one == DONE:
            out.append(one)
        else:
            value = json.loads(one[6:])
            out.append(event({"choices": value.pop("choices"), **dict(sorted(value.items()))}, ascii=False))
    return out


def ollama(events: Iterable[bytes]) -> list[bytes]:
    """As Ollama does it: the role in every chunk of a chat."""
    out = []
    for one in events:
        value = None if one == DONE else json.loads(one[6:])
        for choice in value["choices"] if value else ():
            if "delta" in choice:
                choice["delta"] = {"role": "assistant", **choice["delta"]}
        out.append(one if value is None else event(value))
    return out


def attached(events: Iterable[bytes]) -> list[bytes]:
    """Usage on the chunk with the finish reason, CRLF line ends, ids and comments."""
    values = [json.loads(one[6:]) for one in events if one != DONE]
    *values, usage = values
    values[-1]["usage"] = usage["usage"]
    lines = [b"id: %d\nevent: message\n" % i + event(value) for i, value in enumerate(values)]
    return [one.replace(b"\n", b"\r\n") for one in (b": open\n\n", *lines, DONE)]


SHAPES: dict[str, Callable[[Iterable[bytes]], list[bytes]]] = {
    "vllm": list, "llama-server": llama, "ollama": ollama, "attached": attached,
}  # fmt: skip
every_shape = pytest.mark.parametrize("shape", SHAPES)


def playing(path: str, pieces: Iterable[str], shape: str) -> Callable[[Request], Play]:
    events = SHAPES[shape](MAKE[path](pieces))
    return lambda _: stream(events)


@both
@every_shape
@on_loop
async def test_oc_01_relay_unicode_line_separators(path: str, shape: str) -> None:
    pieces = ["a", "\u2028", "b", "\u0085", "c", "\u2029d", "\u000b\u000ce"]
    raw_shape = [one.replace(b"\\u2028", "\u2028".encode()).replace(b"\\u0085", "\u0085".encode())
                 for one in SHAPES[shape](MAKE[path](pieces))]  # fmt: skip
    async with relaying(lambda _: stream(raw_shape)) as scene:
        got = await scene.ask(path)
    for separator in (b"\xe2\x80\xa8", b"\xe2\x80\xa9", b"\xc2\x85", b"\x0b", b"\x0c"):
        assert separator not in got.body
    lines = [line for line in got.body.decode().splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: ")) for line in lines)
    assert got.text == "".join(pieces)


@both
@every_shape
@pytest.mark.parametrize("options", [None, USAGE])
@on_loop
async def test_oc_02_relay_one_id_role_finish_and_terminator(path: str, shape: str, options: Any) -> None:
    pieces = [f"{i} " for i in range(20)]
    async with relaying(playing(path, pieces, shape)) as scene:
        got = await scene.ask(path, stream_options=options)
    got.check_whole("".join(pieces))
    assert got.body.count(b"[DONE]") == 1
    choices = [choice for chunk in got.chunks for choice in chunk["choices"]]
    roles = ["role" in choice.get("delta", {}) for choice in choices]
    assert roles == [path == CHAT] + [False] * (len(choices) - 1)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    after = got.chunks[next(i for i, c in enumerate(got.chunks) if c["choices"] and c["choices"][0]["finish_reason"]) :]
    assert [chunk["choices"] for chunk in after[1:]] == ([[]] if options else [])
    assert {chunk["object"] for chunk in got.chunks} == {"chat.completion.chunk" if path == CHAT else "text_completion"}


# OC-03 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

FIVE = ["one ", "two ", "three ", "four ", "five"]
FAILURES: dict[str, Callable[[list[bytes]], Play]] = {
    "closes": lambda events: stream(events, end="close"),
    "resets": lambda events: stream(events, end="reset"),
    "ends": lambda events: stream(events),
    "says so": lambda events: stream([*events, event({"error": {"message": "no memory", "code": 500}})]),
    "says so, then done": lambda events: stream([*events, event({"error": {"message": "no memory"}}), DONE]),
    "old llama-server": lambda events: stream([*events, b'error: {"code":500,"error":{"message":"no memory"}}\n\n']),
    "nonsense": lambda events: stream([*events, b"data: <html>\n\n"], end="stall"),
}


@both
@pytest.mark.parametrize("failure", FAILURES)
@on_loop
async def test_oc_03_relay_upstream_fails_in_the_middle(path: str, failure: str) -> None:
    gate = asyncio.Event()
    events = MAKE[path](FIVE)[: len(FIVE) + (path == CHAT)]
    play = FAILURES[failure](events)
    play.gate, play.gated = gate, 1 + len(events)
    async with relaying(lambda _: play) as scene:
        wire = await scene.connect()
        await (wire.chat if path == CHAT else wire.comp)(stream=True)
        assert (await wire.head())[0] == 200
        body = b""
        while Got(200, body or b": \n\n").text != "".join(FIVE):
            body += await wire.chunk()
        gate.set()
        while chunk := await wire.chunk():
            body += chunk
        got = Got(200, body)
        assert got.text == "".join(FIVE)
        got.check_broken("".join(FIVE) + "…")
        error = got.events[-1]["error"]
        assert error["message"].strip()
        assert error["type"]
        assert "memory" not in got.body.decode()
        await scene.idle()
        assert scene.fleet.ends == [("a", "failed")]


@both
@on_loop
async def test_oc_03_relay_a_failure_that_comes_with_the_text_has_an_honest_status(path: str) -> None:
    events = MAKE[path](FIVE)[: len(FIVE) + (path == CHAT)]
    async with relaying(lambda _: Play([b"".join(stream(events).pieces)])) as scene:
        (await scene.ask(path)).check_broken("")


@on_loop
async def test_oc_03_relay_the_official_client_raises() -> None:
    gate = asyncio.Event()
    events = chat_events(FIVE)[: len(FIVE) + 1]
    said: list[str | None] = []
    async with (
        relaying(lambda _: stream(events, end="reset", gate=gate, gated=1 + len(events))) as scene,
        openai.AsyncOpenAI(base_url=f"{scene.url}/v1", api_key="none", max_retries=0) as client,
    ):

        async def read() -> None:
            async for chunk in await client.chat.completions.create(
                model=ALIAS, messages=[{"role": "user", "content": "hi"}], stream=True
            ):
                said.append(chunk.choices[0].delta.content)
                if said[-1] == FIVE[-1]:
                    gate.set()

        with pytest.raises(openai.APIError):
            await read()
        assert "".join(text or "" for text in said) == "".join(FIVE)


@both
@on_loop
async def test_oc_03_relay_an_early_error_has_an_honest_status(path: str) -> None:
    async with relaying(lambda _: stream([*MAKE[path]([""])[:1], event({"error": {"message": "x"}})])) as scene:
        got = await scene.ask(path)
        assert got.status == 502
        got.check_broken("")


# OC-05 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@both
@every_shape
@on_loop
async def test_oc_05_relay_stream_options(path: str, shape: str) -> None:
    async with relaying(playing(path, ["a", "b", "c"], shape)) as scene:
        silent: list[dict[str, Any]] = [
            {},
            {"stream_options": None},
            {"stream_options": {}},
            {"stream_options": {"include_usage": False}},
        ]
        for fields in silent:
            got = await scene.ask(path, **fields)
            assert got.text == "abc"
            assert all(chunk.get("usage") is None for chunk in got.chunks), fields
            assert all(chunk["choices"] for chunk in got.chunks), fields
            assert scene.there["a"].requests[-1].json["stream_options"] == USAGE
        got = await scene.ask(path, stream_options=USAGE)
        *others, last = got.chunks
        assert got.events[-1] == "[DONE]"
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == 12
        assert all(chunk.get("usage") is None for chunk in others)
        assert others[-1]["choices"][0]["finish_reason"] == "stop"
        envelope(await scene.chat(stream=False, stream_options=USAGE), 400, "stream_options")


# OC-06 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@both
@every_shape
@pytest.mark.parametrize("escaped", [True, False])
@on_loop
async def test_oc_06_relay_emoji_cut_anywhere(path: str, shape: str, escaped: bool) -> None:
    """A server writes whole characters, but the network cuts where it likes."""
    text = "ok \U0001f525\u010fx!"
    events = SHAPES[shape](MAKE[path](list(text)))
    if not escaped:
        values = [one if b"{" not in one else _unescaped(one) for one in events]
        assert any("\U0001f525".encode() in one for one in values)
        events = values
    raw = b"".join(events)
    async with relaying(lambda _: stream([raw[i : i + 1] for i in range(len(raw))])) as scene:
        got = await scene.ask(path)
        got.check_whole(text)
        assert "\ufffd" not in got.body.decode()
    answer = {"id": "i", "object": "x", "created": 1, "model": "up"}
    choice = {"text": text} if path == COMP else {"message": {"role": "assistant", "content": text}}
    async with relaying(lambda _: whole({**answer, "choices": [{"index": 0, **choice}]})) as scene:
        ns = await (scene.chat() if path == CHAT else scene.comp())
        assert ns.text == text
        assert ns.json["model"] == ALIAS


def _unescaped(one: bytes) -> bytes:
    head, brace, rest = one.partition(b"{")
    value, end = json.JSONDecoder().raw_decode((brace + rest).decode())
    return head + json.dumps(value, ensure_ascii=False).encode() + (brace + rest).decode()[end:].encode()


# Whole answers and refusals ───────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_a_whole_answer_with_our_timeline() -> None:
    body: dict[str, Any] = {
        "id": "i",
        "model": "up",
        "choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}],
    }
    body["usage"] = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    async with relaying(lambda _: whole(body)) as scene:
        answer = await scene.chat(headrace={"timings": True})
        assert answer.json["headrace"]["timeline"]["ttft"] > 0
        assert {**answer.json, "headrace": 0} == {**body, "model": ALIAS, "headrace": 0}
        assert "headrace" not in scene.there["a"].requests[-1].json


@on_loop
async def test_a_refusal_is_passed_on_and_tried_nowhere_else() -> None:
    refused = whole({"error": {"message": "top_p is 7", "param": "top_p", "code": "bad", "type": "x"}}, 400)
    async with relaying(lambda _: refused, lambda _: stream(chat_events(["x"]))) as scene:
        for streamed in (True, False):
            error = envelope(await scene.chat(stream=streamed, top_p=1), 400, "top_p", code="bad")
            assert error["message"] == "top_p is 7"
        assert scene.there["b"].asked(CHAT) == []
        assert scene.fleet.ends == [("a", "refused")] * 2


@pytest.mark.parametrize(
    "play",
    [
        whole({}, 429, retry_after="3"),
        whole({}, 401),
        whole({"error": {"message": "x", "code": "model_not_found"}}, 404),
        whole({}, 500),
        Play([], "close"),
        stream([*chat_events([])[:1], event({"error": {"message": "x"}})]),
    ],
)
@on_loop
async def test_what_is_the_engines_fault_is_tried_elsewhere(play: Play) -> None:
    async with relaying(lambda _: play, lambda _: stream(chat_events(["x", "y"]))) as scene:
        (await scene.ask()).check_whole("xy")
        assert scene.fleet.ends == [("a", "failed"), ("b", "ok")]


@on_loop
async def test_the_request_id_goes_along() -> None:
    async with relaying(lambda _: stream(chat_events(["x"]))) as scene:
        await scene.chat(stream=True, headers={"x-request-id": "abc-1"})
        assert scene.there["a"].requests[-1].headers["x-request-id"] == "abc-1"
