"""OC-21 to OC-23: bodies that are too deep, too large, no JSON, or say a thing twice."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from acceptance.asking import CHAT, COMP, Answer, Wire, chat_fields, dumps, envelope, on_loop
from acceptance.process import Process
from acceptance.scene import CONTROL_PROMPT, MODEL, Scene, scripted
from acceptance.tiny import Tiny
from server.socket_client import until

ABC = [[b"a"], [b"b"], [b"c"]]
LONG = [[b"%d " % i] for i in range(3000)]
MIB = 2**20

# OC-21 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def arrays(depth: int) -> str:
    return "[" * depth + "]" * depth


def objects(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def around(text: str, deep: str) -> str:
    return text.replace("DEEP", deep)


def body(**fields: str) -> bytes:
    """A valid chat body and these fields, their values written in JSON already."""
    given = {"model": f'"{MODEL}"', "messages": '[{"role":"user","content":"hi"}]', **fields}
    return ("{" + ",".join(f'"{name}":{value}' for name, value in given.items()) + "}").encode()


DEEP = {
    "unknown field": body(foo=arrays(20_000)),
    "tools": body(tools=arrays(20_000)),
    "schema": body(
        response_format=around('{"type":"json_schema","json_schema":{"name":"x","schema":DEEP}}', arrays(20_000))
    ),
    "content": body(messages=around('[{"role":"user","content":DEEP}]', arrays(20_000))),
    "parameters": body(tools=around('[{"type":"function","function":{"name":"f","parameters":DEEP}}]', objects(1000))),
    # Not in the case: the same, large enough to be read on a thread.
    "unknown field, long": body(foo=arrays(2_000_000)),
}


class Watched:
    """A stream that goes on while other things happen: one engine step, one event."""

    def __init__(self, scene: Scene, wire: Wire) -> None:
        self._scene, self._wire = scene, wire
        self.text = ""

    @classmethod
    async def begin(cls, scene: Scene) -> Watched:
        wire = await scene.connect()
        await wire.chat(stream=True)
        scene.gate.allow(1)
        assert (await wire.head())[0] == 200
        watched = cls(scene, wire)
        watched._note(await wire.event())
        return watched

    async def advance(self) -> None:
        """The engine makes a step; its token comes."""
        self._scene.gate.allow(1)
        self._note(await self._wire.event())

    def _note(self, event: Any) -> None:
        (choice,) = event["choices"]
        self.text += choice["delta"]["content"]

    def check(self) -> None:
        """Nothing was lost on the way."""
        whole = b"".join(token for step in LONG for token in step).decode()
        assert self.text
        assert whole.startswith(self.text)


@on_loop
async def test_oc_21_nesting() -> None:
    async with scripted(LONG, shut=True) as scene:
        stream = await Watched.begin(scene)
        loop = asyncio.get_running_loop()
        for deep in DEEP.values():
            asked = loop.time()
            answer = asyncio.ensure_future(scene.post(CHAT, deep))
            await stream.advance()
            envelope(await answer, 400)
            assert loop.time() - asked < 1
        stream.check()
        assert scene.app.running == 1
        scene.gate.open()
        await scene.alive()


class Upload:
    """A body of 50 MB, sent piece by piece."""

    SIZE = 50 * MIB
    PIECE = 2**16

    def __init__(self, wire: Wire, *, chunked: bool) -> None:
        self._wire = wire
        self._chunked = chunked
        self.sent = 0

    async def begin(self) -> None:
        length = b"transfer-encoding: chunked" if self._chunked else b"content-length: %d" % self.SIZE
        await self._wire.raw(b"POST %b HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % (CHAT.encode(), length))

    @property
    def complete(self) -> bool:
        return self.sent == self.SIZE

    async def piece(self) -> None:
        """The next piece of a body that is valid as a whole."""
        data = b"x" * self.PIECE
        if self.sent == 0:
            data = (body()[:-1] + b',"foo":"').ljust(self.PIECE, b"x")
        elif self.sent == self.SIZE - self.PIECE:
            data = data[:-2] + b'"}'
        self.sent += len(data)
        await self._wire.raw(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        if self.complete and self._chunked:
            await self._wire.raw(b"0\r\n\r\n")
        await asyncio.sleep(0)


async def answer_of(wire: Wire) -> Answer:
    status, headers, value = await wire.answer()
    return Answer(status, httpx.Headers(headers), dumps(value))


def refused(answer: Answer, limit: int) -> None:
    error = envelope(answer, 413, None, code="body_too_large")
    assert str(limit) in error["message"]
    assert answer.headers["connection"] == "close"


SOCKETS = 16 * MIB
"""What two sockets may hold between client and server, generously."""


@pytest.mark.parametrize("chunked", [False, True])
@on_loop
async def test_oc_21_a_body_that_is_too_large(chunked: bool) -> None:
    limit = 10 * MIB
    async with scripted(LONG, shut=True, body_limit=limit) as scene:
        stream = await Watched.begin(scene)
        wire = await scene.connect()
        upload = Upload(wire, chunked=chunked)
        await upload.begin()
        if not chunked:
            refused(await answer_of(wire), limit)  # before a byte of the body was sent
        answer = asyncio.ensure_future(answer_of(wire))
        while not upload.complete:
            assert not chunked or answer.done() or upload.sent < limit + SOCKETS, "it reads on behind the limit"
            await upload.piece()
            if upload.sent % MIB == 0:
                await stream.advance()
        if chunked:
            refused(await answer, limit)
        else:
            with pytest.raises(asyncio.IncompleteReadError):  # one answer, then the end
                await answer
        assert await wire.everything() == b""
        stream.check()
        await until(lambda: scene.app.running == 1)
        assert len(scene.scripted.prompts) == 1, "only the stream's own prompt was computed"
        scene.gate.open()
        await scene.alive()


@pytest.mark.real
@pytest.mark.parametrize("chunked", [False, True])
@on_loop
async def test_oc_21_what_a_large_body_costs(tiny: Callable[..., Tiny], chunked: bool) -> None:
    server = tiny()
    limit = 10 * MIB
    async with server.calls():
        await server.alive()
        process = Process(server.process.pid)
        before = highest = process.memory
        wire = await Wire.open(server.port, server.model, None)
        upload = Upload(wire, chunked=chunked)
        await upload.begin()
        while not upload.complete:
            await upload.piece()
            highest = max(highest, process.memory)
        refused(await answer_of(wire), limit)
        wire.close()
        assert highest - before < 3 * limit
        await server.alive()


@on_loop
async def test_oc_21_a_client_that_only_writes_gets_its_answer() -> None:
    async with scripted(ABC, body_limit=MIB) as scene:
        for content in (body(foo='"' + "x" * 50 * MIB + '"'), _pieces(50 * MIB)):
            refused(await scene.send("POST", CHAT, content=content), MIB)
        await scene.alive()


async def _pieces(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // MIB):
        yield b"x" * MIB


# OC-22 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def text_body(content: str, **fields: Any) -> str:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": MODEL, "messages": messages, **fields}, ensure_ascii=False)


NOT_JSON = {
    "GBK": text_body("你好").encode("gbk"),
    "UTF-16 with a byte order mark": text_body("hi").encode("utf-16"),
    "UTF-16 without one": text_body("hi").encode("utf-16-le"),
    "Latin-1": text_body("é").encode("latin-1"),
    "a character cut at a string's end": text_body("漢").encode().replace("漢".encode(), "漢".encode()[:2]),
    "garbage behind": text_body("hi").encode() + b" x",
    "garbage behind in brackets": text_body("hi").encode() + b"]",
    "two objects": text_body("hi").encode() * 2,
    "two objects in two lines": text_body("hi").encode() + b"\n" + text_body("hi").encode(),
    "a byte order mark alone": b"\xef\xbb\xbf",
    "two byte order marks": b"\xef\xbb\xbf" * 2 + text_body("hi").encode(),
}


@on_loop
async def test_oc_22_bytes_that_are_not_json_text() -> None:
    async with scripted(ABC) as scene:
        for stream in (False, True):
            for path in (CHAT, COMP):
                for what, data in NOT_JSON.items():
                    if stream:
                        data = data.replace(b'"model"', b'"stream": true, "model"')
                    answer = await scene.post(path, data)
                    assert answer.status == 400, what
                    envelope(answer, 400, None)
        await scene.alive()
        assert scene.scripted.prompts == [list(CONTROL_PROMPT.encode())], "none was executed, not even in part"

        plain = await scene.post(CHAT, text_body("é漢").encode())
        marked = await scene.post(CHAT, b"\xef\xbb\xbf" + text_body("é漢").encode())
        assert plain.status == marked.status == 200
        assert plain.text == marked.text == "abc"
        assert scene.scripted.prompts[1] == scene.scripted.prompts[2]


# OC-23 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

EXTRAS: dict[str, Any] = {
    "foo": 1,
    "metadata": {"a": "b"},
    "store": True,
    "parallel_tool_calls": True,
    "service_tier": "auto",
}


@on_loop
async def test_oc_23_fields_nobody_knows() -> None:
    async with scripted(ABC) as scene:
        for stream in (False, True):
            without = await scene.chat(stream=stream, seed=1)
            for extra in (*({name: value} for name, value in EXTRAS.items()), EXTRAS):
                answer = await scene.chat(stream=stream, seed=1, **extra)
                assert answer.status == 200, answer
                assert (answer.text, answer.finish) == (without.text, without.finish) == ("abc", ["stop"])
        assert len({tuple(prompt) for prompt in scene.scripted.prompts}) == 1
        assert len({draw.sampling for draw in scene.scripted.draws}) == 1


def twice(name: str, first: Any, second: Any, **fields: Any) -> bytes:
    """A chat body in which a key stands at the beginning and at the end."""
    rest = json.dumps({k: v for k, v in chat_fields(MODEL, fields).items() if k != name})[1:-1]
    return f'{{"{name}":{json.dumps(first)},{rest},"{name}":{json.dumps(second)}}}'.encode()


@on_loop
async def test_oc_23_keys_that_stand_twice() -> None:
    """Of the two readings the case allows, ours is one winner: the last one, for everybody."""
    async with scripted(LONG) as scene:
        requests = itertools.count(1)

        async def logged() -> dict[str, Any]:
            """The access line of the newest request: it is written after the answer."""
            number = next(requests)
            await until(lambda: len(scene.access) == number)
            return scene.access[-1]

        # The model: what is looked up, answered with, logged and counted. (Model lists of keys come with the gateway.)
        answer = await scene.post(CHAT, twice("model", "forbidden", MODEL, max_tokens=2))
        assert answer.status == 200
        assert answer.json["model"] == MODEL
        assert (await logged())["model"] == MODEL
        envelope(await scene.post(CHAT, twice("model", MODEL, "forbidden")), 404, "model", code="model_not_found")
        assert (await logged())["model"] == "other"
        assert len(scene.scripted.prompts) == 1

        # The number of tokens: what the engine makes, the answer holds, usage and the log say.
        for first, second in ((5, 50), (50, 5)):
            produced = scene.scripted.produced
            answer = await scene.post(CHAT, twice("max_tokens", first, second))
            assert answer.status == 200
            assert answer.finish == ["length"]
            assert len(answer.text.split()) == second
            assert answer.usage["completion_tokens"] == second
            assert (await logged())["completion_tokens"] == second
            assert scene.scripted.produced - produced == second
        # The winner is checked as if it stood alone; the loser is not looked at.
        envelope(await scene.post(CHAT, twice("max_tokens", 5, 0)), 400, "max_tokens")
        await logged()
        assert (await scene.post(CHAT, twice("max_tokens", 0, 5))).status == 200
        await logged()

        for first, second in ((True, False), (False, True)):
            answer = await scene.post(CHAT, twice("stream", first, second, max_tokens=3))
            assert answer.status == 200
            assert answer.stream is second
            assert answer.text == "0 1 2 "
            assert (await logged())["stream"] is second
        # stream_options is checked against the same `stream` that is obeyed.
        options = {"include_usage": True}
        assert (await scene.post(CHAT, twice("stream", False, True, max_tokens=1, stream_options=options))).usage
        answer = await scene.post(CHAT, twice("stream", True, False, max_tokens=1, stream_options=options))
        envelope(answer, 400, "stream_options")
        await scene.alive()
