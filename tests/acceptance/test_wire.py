"""Acceptance, section 1: the streaming wire."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from acceptance.asking import CHAT, COMP, Asking, Wire, chat_fields, comp_fields, dumps, envelope, events_of, on_loop
from acceptance.scene import FAIL, Scene, scripted
from acceptance.tiny import Tiny
from headrace.server.stream import StreamLimits
from server.socket_client import until

USAGE = {"include_usage": True}


async def raw_stream(scene: Scene, path: str, **fields: Any) -> bytes:
    """Every byte of a streamed response, from the status line until the server closes."""
    make = chat_fields if path == CHAT else comp_fields
    wire = await scene.connect()
    body = dumps(make(scene.model, {"stream": True, **fields}))
    await wire.request("POST", path, body, head=b"connection: close\r\n")
    return await wire.everything()


def unchunked(raw: bytes) -> bytes:
    """The body in a response's bytes; fails unless it is chunked and ends with the last chunk, once."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding: chunked" in head.lower()
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        body, rest = body + rest[:length], rest[length + 2 :]
        if not length:
            assert rest == b"", "bytes after the end"
            return body


@pytest.mark.parametrize("path", [CHAT, COMP])
@on_loop
async def test_oc_01_unicode_line_separators(path: str) -> None:
    pieces = ["a", "\u2028", "b", "\u0085", "c", "\u2029d", "\u000b\u000ce"]
    async with scripted([[piece.encode()] for piece in pieces]) as scene:
        raw = await raw_stream(scene, path)
    for separator in (b"\xe2\x80\xa8", b"\xe2\x80\xa9", b"\xc2\x85", b"\x0b", b"\x0c"):
        assert separator not in raw
    body = unchunked(raw).decode()
    lines = [line for line in body.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    choices = [c for line in lines for c in json.loads(line.removeprefix("data: "))["choices"]]
    cat = "".join(c["text"] if path == COMP else c["delta"].get("content", "") for c in choices)
    assert cat == "a\u2028b\u0085c\u2029d\u000b\u000ce"


@pytest.mark.parametrize("options", [None, USAGE])
@pytest.mark.parametrize("path", [CHAT, COMP])
@on_loop
async def test_oc_02_one_id_role_finish_and_terminator(path: str, options: dict[str, bool] | None) -> None:
    async with scripted([[b"%d " % i] for i in range(20)]) as scene:
        body = unchunked(await raw_stream(scene, path, stream_options=options, max_tokens=64))
    assert body.endswith(b"data: [DONE]\n\n")
    assert body.count(b"[DONE]") == 1
    chunks = [json.loads(data) for data in events_of(body)[:-1]]
    ids = {chunk["id"] for chunk in chunks}
    assert len(ids) == 1
    prefix = "chatcmpl-" if path == CHAT else "cmpl-"
    assert ids.pop().startswith(prefix)
    assert len({chunk["created"] for chunk in chunks}) == 1
    assert {chunk["model"] for chunk in chunks} == {"scripted"}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk" if path == CHAT else "text_completion"}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert all(choice["index"] == 0 for choice in choices)
    roles = ["role" in choice.get("delta", {}) for choice in choices]
    assert roles == [path == CHAT] + [False] * (len(choices) - 1)
    if path == CHAT:
        assert choices[0]["delta"]["role"] == "assistant"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    after = chunks[next(i for i, c in enumerate(chunks) if c["choices"] and c["choices"][0]["finish_reason"]) + 1 :]
    assert [chunk["choices"] for chunk in after] == ([[]] if options else [])
    text = "".join(c["text"] if path == COMP else c["delta"].get("content", "") for c in choices)
    assert text == "".join(f"{i} " for i in range(20))


# OC-03: the engine fails ──────────────────────────────────────────────────────────────────────────────────────────────

FIVE = [b"one ", b"two ", b"three ", b"four ", b"five"]
FIVE_THEN_FAIL = [*([token] for token in FIVE), [FAIL]]


def check_broken_off(events: list[Any]) -> None:
    """What is left of a stream that failed after its first text."""
    assert "[DONE]" not in events, "that is the end of a stream that went well"
    assert [event for event in events if "error" in event] == events[-1:]
    assert not any(choice["finish_reason"] for event in events[:-1] for choice in event["choices"])
    error = events[-1]["error"]
    assert error["message"].strip()
    assert error["type"]


def content(events: list[Any]) -> str:
    return "".join(c["delta"].get("content", "") for event in events for c in event.get("choices", []))


@on_loop
async def test_oc_03_engine_fails_in_the_middle_of_a_stream() -> None:
    async with scripted(FIVE_THEN_FAIL, shut=True) as scene:
        wire = await scene.connect()
        await wire.chat(stream=True)
        scene.gate.allow(len(FIVE))
        status, headers = await wire.head()
        assert (status, headers["transfer-encoding"]) == (200, "chunked")
        events: list[Any] = []
        while content(events) != b"".join(FIVE).decode():
            events.append(await wire.event())
        raised = time.monotonic()
        scene.gate.allow(1)
        events += await wire.rest()  # to the last chunk: the body's proper end
        assert time.monotonic() - raised < 1.0
        check_broken_off(events)
        scene.gate.open()
        await scene.idle()
        assert [entry["outcome"] for entry in scene.access if entry["path"] == CHAT] == ["error"]
        await scene.alive()


@on_loop
async def test_oc_03_the_official_client_raises() -> None:
    async with (
        scripted(FIVE_THEN_FAIL, shut=True) as scene,
        openai.AsyncOpenAI(base_url=f"{scene.url}/v1", api_key="none", max_retries=0) as client,
    ):
        said: list[str | None] = []

        async def read() -> None:
            scene.gate.allow()
            async for chunk in await client.chat.completions.create(
                model=scene.model, messages=[{"role": "user", "content": "hi"}], stream=True
            ):
                assert chunk.choices[0].finish_reason is None
                said.append(chunk.choices[0].delta.content)
                scene.gate.allow()

        with pytest.raises(openai.APIError) as caught:
            await read()
        assert said == [token.decode() for token in FIVE]
        assert caught.value.message
        scene.gate.open()
        envelope(await scene.chat(), 500, None, code="engine_failed")
        await scene.idle()
        await scene.alive()


def worker_of(server: Tiny) -> int:
    """The process that holds the model: the child that listens to the server's socket."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(int(c) for c in children if b"headrace.engines.worker" in Path(f"/proc/{c}/cmdline").read_bytes())


async def ready_again(server: Asking) -> None:
    async with asyncio.timeout(60):
        while (await server.get("/readyz")).status != 200:
            pass


@on_loop
async def test_oc_03_engine_process_dies_in_the_middle_of_a_stream(tiny: Callable[..., Tiny]) -> None:
    server = tiny(engine_max_running=1, engine_prefix_cache=False, optimizations_replay=False)
    async with server.calls():
        await server.alive()
        wire = await Wire.open(server.port, server.model, None)
        await wire.chat(stream=True, max_tokens=2000, logit_bias={str(eog): -100 for eog in server.eog})
        assert (await wire.head())[0] == 200
        events = [await wire.event() for _ in range(5)]
        died = time.monotonic()
        os.kill(worker_of(server), signal.SIGKILL)
        events += await wire.rest()
        assert time.monotonic() - died < 1.0
        wire.close()
        check_broken_off(events)
        assert (await server.get("/health")).status == 200
        await ready_again(server)
        await server.alive()


# OC-04 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_oc_04_bad_request_with_stream() -> None:
    async with scripted([[b"a"]], key="sesame") as scene:
        envelope(await scene.chat(stream=True, n=0), 400, "n")
        envelope(await scene.chat(stream=True, model="does-not-exist"), 404, "model", code="model_not_found")
        for headers in ({"authorization": "Bearer wrong"}, {"authorization": ""}):
            envelope(await scene.chat(stream=True, headers=headers), 401)
            envelope(await scene.chat(stream=True, n=0, headers=headers), 401)
        assert scene.scripted.steps == 0
        assert (await scene.chat(stream=True)).done
        await scene.alive()


@on_loop
async def test_oc_04_nothing_is_sent_before_the_queue_is_passed() -> None:
    """The head is never held longer than it takes here, and still a queued stream has none."""
    async with scripted(
        [[b"a"]], max_running=1, max_waiting=1, shut=True, stream_limits=StreamLimits(header_hold_s=0.0)
    ) as scene:
        running, queued = await scene.connect(), await scene.connect()
        await running.chat(stream=True)
        await until(lambda: scene.gate.standing)
        await queued.chat(stream=True)
        await until(lambda: scene.app.running == 2)
        head = asyncio.create_task(queued.head())
        refused = await scene.chat(stream=True)
        envelope(refused, 503, None, code="overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        scene.app.ticker.tick(time.monotonic() + 20.0)
        assert (await running.head())[0] == 200, "it is admitted, so its head is due"
        assert (await scene.get("/health")).status == 200
        assert not head.done()
        scene.gate.open()
        assert (await head)[0] == 200
        assert content([e for e in await queued.rest() if e != "[DONE]"]) == "a"
        await scene.alive()


# OC-05 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", [CHAT, COMP])
@on_loop
async def test_oc_05_stream_options(path: str) -> None:
    async with scripted([[b"a"], [b"b"], [b"c"]]) as scene:
        ask = scene.chat if path == CHAT else scene.comp
        silent: list[dict[str, Any]] = [
            {},
            {"stream_options": None},
            {"stream_options": {}},
            {"stream_options": {"include_usage": False}},
        ]
        for fields in silent:
            answer = await ask(stream=True, **fields)
            assert answer.text == "abc"
            assert answer.done
            assert all(chunk.get("usage") is None for chunk in answer.chunks), fields
            assert all(chunk["choices"] for chunk in answer.chunks), fields

        answer = await ask(stream=True, stream_options=USAGE)
        *others, last = answer.chunks
        assert answer.done, "the usage chunk stands before [DONE]"
        assert last["choices"] == []
        assert all(chunk.get("usage") is None for chunk in others)
        assert all(chunk["choices"] for chunk in others)
        assert others[-1]["choices"][0]["finish_reason"] == "stop", "… and directly after the finish chunk"
        usage = last["usage"]
        prompt = len(scene.scripted.prompts[-1])
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (prompt, 4, prompt + 4)
        assert set(usage["prompt_tokens_details"]) >= {"cached_tokens"}

        envelope(await ask(stream=False, stream_options=USAGE), 400, "stream_options")
        envelope(await ask(stream_options=USAGE), 400, "stream_options")
