"""OC-63: request ids from outside, and everything else of a client that might get into a header."""

from __future__ import annotations

import json
import re

import pytest

from acceptance.asking import CHAT, COMP, Wire, chat_fields, dumps, on_loop
from acceptance.scene import MODEL, Scene, scripted
from headrace.server.cors import Cors
from server.socket_client import until

ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
MARK = "zqxjk"
"""Stands in whatever a client may write."""


async def asked(scene: Scene, id: bytes, **fields: object) -> tuple[Wire, int, dict[str, str]]:
    """A stream asked for with these bytes as its id."""
    wire = await scene.connect()
    body = dumps(chat_fields(MODEL, {"stream": True, **fields}))
    await wire.request("POST", CHAT, body, head=b"X-Request-Id: " + id + b"\r\n")
    status, headers = await wire.head()
    return wire, status, headers


def logged(scene: Scene) -> list[str]:
    return [record.getMessage() for record in scene.log]


@on_loop
async def test_oc_63_a_valid_id_comes_back() -> None:
    async with scripted([[b"a"]]) as scene:
        for id in ("ok-1", "a" * 128, "A.b_c-9"):
            wire, status, headers = await asked(scene, id.encode())
            assert status == 200
            assert headers["x-request-id"] == id
            first = await wire.event()
            assert re.fullmatch(r"chatcmpl-[0-9a-f]+", first["id"]), "the chunk's id is the server's own"
            while await wire.event() != "[DONE]":
                pass
        await scene.idle()
        assert [line["request_id"] for line in scene.access if line["path"] == CHAT] == ["ok-1", "a" * 128, "A.b_c-9"]


@pytest.mark.parametrize(
    "id",
    [b"a\tb", bytes(range(0x80, 0x100)), b'x" y', b"a" * 129, b"a b", b"", b"a%0d%0aX-Evil:1", b"<script>", b"a/b",
     "\u2028".encode()],
)  # fmt: skip
@on_loop
async def test_oc_63_another_id_is_replaced(id: bytes) -> None:
    async with scripted([[b"a"]]) as scene:
        wire, status, headers = await asked(scene, id)
        assert status == 200
        assert ID.fullmatch(headers["x-request-id"])
        assert headers["x-request-id"].encode() != id
        assert "x-evil" not in headers
        assert re.fullmatch(r"chatcmpl-[0-9a-f]+", (await wire.event())["id"])
        while await wire.event() != "[DONE]":
            pass
        await scene.idle()
        (line,) = [line for line in scene.access if line["path"] == CHAT]
        assert line["request_id"] == headers["x-request-id"]
        for said in logged(scene):
            assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", said), "one event is one line"


@pytest.mark.parametrize("id", [b"a" * 1_000_000, b"a\0b", b"a\x1b[31mb", b"a\rX-Evil: 1", b"a\nX-Evil: 1"])
@on_loop
async def test_oc_63_an_id_that_is_no_header_is_refused(id: bytes) -> None:
    async with scripted([[b"a"]]) as scene:
        _, status, headers = await asked(scene, id)
        assert status in (400, 431)
        assert headers["connection"] == "close"
        assert "x-evil" not in headers
        assert not scene.scripted.prompts
        await scene.alive()


@on_loop
async def test_oc_63_a_header_behind_the_id_stays_the_clients() -> None:
    async with scripted([[b"a"]]) as scene:
        _, status, headers = await asked(scene, b"a\r\nX-Evil: 1")
        assert status == 200
        assert headers["x-request-id"] == "a"
        assert "x-evil" not in headers


@on_loop
async def test_oc_63_two_ids_are_none() -> None:
    async with scripted([[b"a"]]) as scene:
        _, status, headers = await asked(scene, b"ok-1\r\nX-Request-Id: ok-2")
        assert status == 200
        assert headers["x-request-id"] not in ("ok-1", "ok-2")


@on_loop
async def test_oc_63_one_id_on_many_requests() -> None:
    async with scripted([[b"a"], [b"b"], [b"c"]], shut=True, max_running=32, slots=32) as scene:
        wires = [await scene.connect() for _ in range(20)]
        body = dumps(chat_fields(MODEL, {"stream": True}))
        for wire in wires:
            await wire.request("POST", CHAT, body, head=b"x-request-id: same\r\n")
        await until(lambda: scene.app.running == 20)
        wires[7].reset()
        await until(lambda: scene.app.running == 19)
        scene.gate.open()
        chunk_ids = set()
        for number, wire in enumerate(wires):
            if number == 7:
                continue
            status, headers = await wire.head()
            assert (status, headers["x-request-id"]) == (200, "same")
            text = ""
            while (event := await wire.event()) != "[DONE]":
                text += event["choices"][0]["delta"].get("content", "")
                chunk_ids.add(event["id"])
            assert text == "abc"
        assert len(chunk_ids) == 19
        await scene.idle()
        outcomes = sorted(line["outcome"] for line in scene.access if line["path"] == CHAT)
        assert outcomes == ["cancelled"] + ["ok"] * 19


HOSTILE = f"{MARK}\r\nX-{MARK}: 1"
ESCAPED = f"{MARK}%0d%0aX-{MARK}:%201"


@on_loop
async def test_oc_63_no_text_of_a_client_gets_into_a_header() -> None:
    """Names of models, paths, queries, methods, other headers: nothing of it comes back in a header, whole or cut."""
    heads = {
        "origin": f"https://{MARK}.example", "user-agent": MARK, "idempotency-key": MARK, "last-event-id": MARK,
        "x-request-id": f"{MARK} {MARK}", "accept": MARK, "authorization": f"Bearer {MARK}", "cookie": f"{MARK}=1",
        "x-headrace-stream": MARK, "host": f"{MARK}.example", "referer": MARK, "x-forwarded-host": MARK,
        "accept-encoding": MARK, "range": f"bytes={MARK}", "if-none-match": f'"{MARK}"',
    }  # fmt: skip
    async with scripted([[b"a"]], cors=Cors(["https://chat.example.org"])) as scene:
        answers = [
            await scene.chat(headers=heads, stream=stream, **fields)
            for stream in (False, True)
            for fields in (
                {}, {"model": HOSTILE}, {"user": HOSTILE}, {"temperature": HOSTILE}, {"stop": [HOSTILE]}, {HOSTILE: 1},
                {"messages": [{"role": HOSTILE, "content": HOSTILE}]}, {"headrace": {HOSTILE: HOSTILE}},
                {"response_format": {"type": HOSTILE}}, {"tools": [{"type": HOSTILE}]},
            )
        ]  # fmt: skip
        answers += [
            await scene.send(method, path, headers=heads, content=json.dumps({"model": HOSTILE, "prompt": HOSTILE}))
            for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PURGE")
            for path in (
                f"/v1/models/{ESCAPED}", f"/{ESCAPED}", f"/v1/streams/{ESCAPED}", f"/healthz?{ESCAPED}", COMP,
                "/metrics",
            )
        ]  # fmt: skip
        answers.append(
            await scene.send("OPTIONS", CHAT, headers={**heads, "access-control-request-method": MARK,
                                                       "access-control-request-headers": MARK})
        )  # fmt: skip
        assert {answer.status for answer in answers} >= {200, 204, 400, 404, 405}
        for answer in answers:
            for name, value in answer.headers.raw:
                assert MARK.encode() not in name.lower(), answer
                assert MARK.encode() not in value.lower(), (name, value)
        for said in logged(scene):
            assert MARK not in said
