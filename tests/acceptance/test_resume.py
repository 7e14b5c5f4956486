"""OC-49 and OC-50: a stream goes on exactly where its reader was, and stopping is not leaving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from acceptance.asking import CHAT, Wire, chat_fields, dumps, on_loop, strict_json
from acceptance.scene import MODEL, Scene, scripted
from acceptance.served import Served, serving_scripts
from headrace.gateway.guard import NO_PERMIT, Caller, Permit
from headrace.server.stream import StreamLimits
from headrace.server.streams import LogLimits
from redis_server import RedisServer
from server.socket_client import until

TOKENS = 50
SCRIPT = [[f"{i} ".encode()] for i in range(1, TOKENS + 1)]
TEXT = "".join(f"{i} " for i in range(1, TOKENS + 1))
ASKED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "headrace": {"resume": True}}
EVENTS = TOKENS + 3
"""Texts, finish, usage, [DONE]."""


class Names:
    """Everybody is who the bearer token says."""

    async def identify(self, authorization: Any) -> Caller:
        name = authorization[0].decode().partition(" ")[2] if authorization else ""
        return Caller(name=name, salt=name)

    async def admit(self, caller: Caller, ask: Any) -> Permit:
        return NO_PERMIT


def parse(block: bytes) -> tuple[str, str] | None:
    """(id, data) of one block; None for one that holds only a heartbeat."""
    lines = [line for line in block.decode().split("\n") if line and not line.startswith(":")]
    if not lines:
        return None
    assert len(lines) == 2, block
    assert lines[0].startswith("id: "), block
    assert lines[1].startswith("data: "), block
    return lines[0][4:], lines[1][6:]


def events(body: bytes) -> list[tuple[str, str]]:
    """All events of a body."""
    return [found for block in body.split(b"\n\n") if (found := parse(block)) is not None]


def text_of(data: list[str]) -> str:
    """CAT."""
    choices = [c for line in data if line != "[DONE]" for c in strict_json(line).get("choices", ())]
    return "".join(c["delta"].get("content") or "" for c in choices)


async def begin(scene: Scene | Served, key: str | None = None, **fields: Any) -> tuple[Wire, str]:
    """A resumable stream whose head is there: the connection, and the stream's id."""
    wire = await Wire.open(scene.port, scene.model, key)
    head = f"authorization: Bearer {key}\r\n".encode() if key else b""
    await wire.request("POST", CHAT, dumps(chat_fields(scene.model, {**ASKED, **fields})), head=head)
    status, headers = await wire.head()
    assert status == 200
    return wire, headers["x-headrace-stream"]


async def take(wire: Wire, count: int) -> list[tuple[str, str]]:
    """The next events."""
    found: list[tuple[str, str]] = []
    while len(found) < count:
        event = parse(await wire.block())
        if event is not None:
            found.append(event)
    return found


async def resume(
    scene: Scene | Served, id: str, last: str | None, *, key: str | None = None, after: int | None = None
) -> httpx.Response:
    """To its end."""
    headers = {} if last is None else {"last-event-id": last}
    if key:
        headers["authorization"] = f"Bearer {key}"
    async with httpx.AsyncClient(base_url=scene.url, timeout=60, trust_env=False) as client:
        return await client.get(
            f"/v1/streams/{id}", headers=headers, params={} if after is None else {"after": str(after)}
        )


async def stop(scene: Scene, id: str, key: str | None = None) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=scene.url, timeout=60, trust_env=False) as client:
        return await client.delete(f"/v1/streams/{id}", headers=headers)


async def forgotten(scene: Scene) -> None:
    """No log, no byte, no reader: everything ended and expired."""
    figures = scene.app.metrics.streams
    await until(lambda: not scene.app.running and not figures.readers)
    for log in scene.app.resuming.streams:
        scene.app.resuming.streams.forget(log)
    assert (figures.open, figures.kept, figures.bytes) == (0, 0, 0)
    await scene.idle()


# OC-49 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_oc_49_exact_continuation_at_every_event() -> None:
    async with scripted(SCRIPT, shut=True) as scene:
        for k in range(EVENTS):
            scene.gate.shut()
            before = scene.scripted.produced
            wire, id = await begin_paced(scene)
            if k > 2:
                scene.gate.open()
            first = await take(wire, k)
            wire.reset()
            scene.gate.open()
            if k % 2:  # live for some, finished for others
                await until(lambda: not scene.app.running)
            again = await resume(scene, id, first[-1][0] if first else None)
            assert again.status_code == 200
            rest = events(again.content)
            assert len(first) + len(rest) == EVENTS, k
            ids = [name for name, _ in first + rest]
            numbers = [int(name.rpartition("-")[2]) for name in ids]
            assert all(name.startswith(f"{id}-") for name in ids)
            assert numbers == sorted(set(numbers))
            whole = [data for _, data in events((await resume(scene, id, None)).content)]
            assert [data for _, data in first + rest] == whole
            assert text_of(whole) == TEXT
            assert whole[-1] == "[DONE]"
            assert whole.count("[DONE]") == 1
            assert strict_json(whole[-2])["usage"]["completion_tokens"] == TOKENS + 1
            assert scene.scripted.produced - before == TOKENS + 1, "the engine ran once"
        await forgotten(scene)


async def begin_paced(scene: Scene) -> tuple[Wire, str]:
    """A stream of whose answer two steps are done: the prompt's, and the next."""
    begun = asyncio.get_running_loop().create_task(begin(scene))
    scene.gate.allow(3)
    return await begun


@on_loop
async def test_oc_49_a_resume_is_like_an_uninterrupted_run() -> None:
    """The same request without resume gives the same lines, but for the names and times of the answer."""
    async with scripted(SCRIPT) as scene:
        plain = await scene.chat(stream=True, stream_options={"include_usage": True}, headrace={"cache": False})
        wire, id = await begin(scene, headrace={"resume": True, "cache": False})
        await take(wire, 7)
        wire.close()
        whole = [data for _, data in events((await resume(scene, id, None)).content)]
        assert [same(data.decode()) for data in plain.events] == [same(data) for data in whole]
        assert "x-headrace-stream" in plain.headers
        assert b"id: " not in plain.body
        await forgotten(scene)


def same(data: str) -> Any:
    if data == "[DONE]":
        return data
    return {**strict_json(data), "id": None, "created": None}


@on_loop
async def test_oc_49_a_post_with_the_same_key_is_the_same_stream() -> None:
    async with scripted(SCRIPT) as scene:
        body = dumps(chat_fields(MODEL, ASKED))
        headers = {"idempotency-key": "k 1"}
        first = events((await scene.post(CHAT, body, headers=headers)).body)
        asked = len(scene.scripted.asked)
        again = events((await scene.post(CHAT, body, headers=headers)).body)
        assert again == first
        late = await scene.post(CHAT, body, headers={**headers, "last-event-id": first[9][0]})
        assert events(late.body) == first[10:]
        nothing = await scene.post(CHAT, body, headers={**headers, "last-event-id": first[-1][0]})
        assert (nothing.status, nothing.body) == (204, b"")
        other = await scene.post(CHAT, dumps(chat_fields(MODEL, {**ASKED, "seed": 7})), headers=headers)
        assert other.status == 409
        unknown = await scene.post(CHAT, body, headers={**headers, "last-event-id": "none-3"})
        assert unknown.status == 404, "never a new generation"
        assert len(scene.scripted.asked) == asked
        await forgotten(scene)


@on_loop
async def test_oc_49_heartbeats_carry_no_id_and_end_no_block() -> None:
    limits = StreamLimits(heartbeat_s=0.3)
    async with scripted(SCRIPT, shut=True, stream_limits=limits) as scene:
        wire, id = await begin_paced(scene)
        await take(wire, 1)
        raw = b""
        while raw.count(b": hb") < 3:
            raw += await wire.chunk()
        rest = raw.partition(b": hb")[1] + raw.partition(b": hb")[2]
        assert set(rest.split(b"\n")) <= {b": hb", b""}
        assert b"\n\n" not in rest
        wire.close()
        scene.gate.open()
        assert text_of([data for _, data in events((await resume(scene, id, None)).content)]) == TEXT
        await forgotten(scene)


@on_loop
async def test_oc_49_openai_python_reads_a_resumable_stream() -> None:
    limits = StreamLimits(heartbeat_s=0.3)
    async with scripted(SCRIPT, shut=True, stream_limits=limits) as scene:
        async with openai.AsyncOpenAI(base_url=f"{scene.url}/v1", api_key="x", max_retries=0) as client:
            asked = asyncio.get_running_loop().create_task(
                client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": "hi"}],
                    stream=True,
                    extra_body={"headrace": {"resume": True}},
                )
            )
            scene.gate.allow(3)
            stream = await asked
            said = ""
            async for chunk in stream:
                said += chunk.choices[0].delta.content or ""
                if said == "1 2 ":
                    wire = await scene.connect()
                    await wire.request("GET", f"/v1/streams/{stream.response.headers['x-headrace-stream']}")
                    await wire.head()
                    beats = b""
                    while b": hb" not in beats:
                        beats += await wire.chunk()
                    scene.gate.open()
            assert said == TEXT
        await forgotten(scene)


# OC-50 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_oc_50_a_reader_that_comes_back_in_time_finds_it_going_on() -> None:
    async with scripted(SCRIPT, shut=True, log_limits=LogLimits(grace_s=60)) as scene:
        wire, id = await begin_paced(scene)
        first = await take(wire, 1)
        wire.reset()
        (log,) = scene.app.resuming.streams
        await until(lambda: not log.readers)
        assert scene.app.running == 1
        scene.gate.open()
        rest = events((await resume(scene, id, first[-1][0])).content)
        assert text_of([data for _, data in first + rest]) == TEXT
        await forgotten(scene)


@on_loop
async def test_oc_50_nobody_comes_back() -> None:
    async with scripted(SCRIPT, shut=True, log_limits=LogLimits(grace_s=0.4)) as scene:
        wire, id = await begin_paced(scene)
        await take(wire, 1)
        wire.reset()
        await until(lambda: not scene.app.running and not scene.stats.running)
        late = await resume(scene, id, None)
        *told, (_, last) = events(late.content)
        assert text_of([data for _, data in told]).startswith("1 ")
        assert strict_json(last)["error"]["code"] == "abandoned"
        assert b"[DONE]" not in late.content
        await forgotten(scene)


@on_loop
async def test_oc_50_leaving_without_resume_cancels_at_once() -> None:
    async with scripted(SCRIPT, shut=True) as scene:
        wire = await scene.connect()
        await wire.chat(stream=True)
        scene.gate.allow(2)
        await wire.head()
        wire.reset()
        await until(lambda: not scene.app.running and not scene.stats.running)
        await scene.idle()


@on_loop
async def test_oc_50_stopping_ends_it_for_everybody_and_twice_is_no_error() -> None:
    async with scripted(SCRIPT, shut=True) as scene:
        wire, id = await begin_paced(scene)
        first = await take(wire, 1)
        wire.reset()
        back = await scene.connect()
        await back.request("GET", f"/v1/streams/{id}", head=f"last-event-id: {first[-1][0]}\r\n".encode())
        assert (await back.head())[0] == 200
        answer = await stop(scene, id)
        assert (answer.status_code, answer.json()["status"]) == (200, "stopped")
        await until(lambda: not scene.app.running and not scene.stats.running)
        blocks = []
        while block := await back.block():
            blocks.append(block)
        told = [parse(block) for block in blocks]
        data = [data for event in told if event is not None for data in event[1:]]
        finish = [c for line in data[:-1] for c in strict_json(line)["choices"] if c["finish_reason"]]
        assert len(finish) == 1
        assert [strict_json(line)["headrace"] for line in data[:-1] if "headrace" in strict_json(line)] == [
            {"ended": "stopped"}
        ]
        assert data[-1] == "[DONE]"
        assert strict_json(data[-2])["usage"]["completion_tokens"] >= 2
        again = await stop(scene, id)
        assert (again.status_code, again.json()["status"]) == (200, "stopped")
        assert [d for _, d in events((await resume(scene, id, None)).content)] == [first[0][1], *data]
        await forgotten(scene)


@on_loop
async def test_oc_50_a_plain_stream_can_be_stopped_too() -> None:
    async with scripted(SCRIPT, shut=True) as scene:
        wire = await scene.connect()
        await wire.chat(stream=True)
        scene.gate.allow(3)
        id = (await wire.head())[1]["x-headrace-stream"]
        assert (await stop(scene, id)).status_code == 200
        rest = await wire.rest()
        assert rest[-1] == "[DONE]"
        assert rest[-2]["headrace"] == {"ended": "stopped"}
        assert (await stop(scene, id)).status_code == 404
        assert (await resume(scene, id, None)).status_code == 404
        await scene.idle()


@on_loop
async def test_oc_50_another_tenant_finds_nothing() -> None:
    async with scripted(SCRIPT, shut=True, guard=Names()) as scene:
        wire, id = await begin_as(scene, "ann")
        first = await take(wire, 1)
        for key in ("bob", None):
            assert (await stop(scene, id, key)).status_code == 404
            assert (await resume(scene, id, first[0][0], key=key)).status_code == 404
        scene.gate.open()
        rest = await take(wire, EVENTS - 1)
        assert text_of([data for _, data in first + rest]) == TEXT
        assert (await resume(scene, id, first[0][0], key="ann")).status_code == 200
        wire.close()
        await forgotten(scene)


async def begin_as(scene: Scene, key: str) -> tuple[Wire, str]:
    begun = asyncio.get_running_loop().create_task(begin(scene, key))
    scene.gate.allow(3)
    return await begun


# Through the end of a server ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    with serving_scripts(tmp_path) as start:
        yield start


LONG = 120
COUNT = "".join(f"{i} " for i in range(1, LONG + 1))


def sharing(redis: RedisServer, **settings: object) -> dict[str, object]:
    return {
        "shared.redis_url": redis.url,
        "shared.redis_timeout_ms": 5000,
        "streams.lease_s": 1.0,
        "server.drain_s": 0.3,
        **{name.replace("_", ".", 1): value for name, value in settings.items()},
    }


async def cut(old: Served, counts: range, end: Callable[[], None]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Streams of which so many events were read when the server ends, and their ids."""

    async def one(count: int) -> tuple[Wire, str, list[tuple[str, str]]]:
        wire, id = await begin(old, max_tokens=LONG)
        return wire, id, await take(wire, count)

    streams = await asyncio.gather(*map(one, counts))
    end()
    for wire, _, _ in streams:
        wire.reset()
    return [(id, told) for _, id, told in streams]


@pytest.mark.parametrize("end", ["kill", "terminate"])
@on_loop
async def test_oc_49_through_the_end_of_a_server(
    start: Callable[..., Served], redis_server: RedisServer, end: str
) -> None:
    """Every stream is gone on with at every event that its reader had."""
    old = start(60.0, sharing(redis_server))
    new = start(2000.0, sharing(redis_server))
    streams = await cut(old, range(1, 60, 5), getattr(old, end))
    for id, told in streams:
        again = await resume(new, id, told[-1][0])
        assert again.status_code == 200, new.log
        rest = events(again.content)
        data = [line for _, line in told + rest]
        assert text_of(data) == COUNT, (len(told), new.log)
        assert data[-1] == "[DONE]"
        assert strict_json(data[-2])["usage"]["completion_tokens"] == LONG
        assert len({strict_json(line)["id"] for line in data[:-1]}) == 1
    id, told = streams[-1]
    for name, _ in told:
        rest = events((await resume(new, id, name)).content)
        position = [known for known, _ in told].index(name)
        assert text_of([line for _, line in told[: position + 1] + rest]) == COUNT
    await no_key_without_an_end(redis_server)


async def no_key_without_an_end(redis_server: RedisServer) -> None:
    from redis.asyncio import Redis

    client = Redis.from_url(redis_server.url, protocol=2)
    keys = [key async for key in client.scan_iter("*")]
    assert keys
    assert [key for key in keys if await client.pttl(key) < 0] == []
    await client.aclose()
