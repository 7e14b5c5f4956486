"""OC-64: what keeps streams moving, on the bare socket and behind a real nginx.

The engine draws a token when the test lets it, and the test lets it when the one before has arrived: a proxy that
collects tokens would wait for ever. No clock is asked.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from acceptance.asking import CHAT, Asking, Wire, chat_fields, dumps, envelope, on_loop
from acceptance.http2 import Http2
from acceptance.scene import FAIL, MODEL, Scene, scripted
from nginx_server import PLAIN, NginxServer, deployed, nginx_or_skip
from redis_server import free_port
from server.socket_client import until

TOKENS = [b"one", " zwölf".encode(), " 漢".encode(), b" \xf0\x9f\x94\xa5", b" five", b" six"]
SCRIPT = [[token] for token in TOKENS]
ENCODINGS = b"accept-encoding: gzip, br, deflate\r\n"
COUNT = itertools.count()


def check_head(status: int, headers: dict[str, str]) -> None:
    """Of a stream over HTTP/1.1."""
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert {"no-cache", "no-transform"} <= set(headers["cache-control"].split(", "))
    assert headers["transfer-encoding"] == "chunked"
    assert not {"content-encoding", "content-length"} & headers.keys()


async def ask(wire: Wire, **fields: object) -> None:
    body = dumps(chat_fields(MODEL, {"stream": True, **fields}))
    await wire.request("POST", CHAT, body, head=ENCODINGS)


def contents(piece: bytes) -> list[str]:
    """The texts of the events in a piece of a body; it holds whole events."""
    assert piece.endswith(b"\n\n"), piece
    events = [json.loads(line[6:]) for line in piece.decode().split("\n") if line.startswith("data: {")]
    texts = [choice["delta"].get("content") for event in events for choice in event["choices"]]
    return [text for text in texts if text]


async def first(scene: Scene, wire: Wire) -> dict[str, str]:
    """Let the engine go on until the first text has arrived; the head's headers."""
    scene.gate.allow(1)
    status, given = await wire.head()
    headers = {name.lower(): value for name, value in given.items()}
    check_head(status, headers)
    assert contents(await wire.chunk()) == [TOKENS[0].decode()]
    return headers


async def arrives_alone(scene: Scene, wire: Wire) -> None:
    """Every further token is one piece of its own, there before the next one is drawn."""
    for token in TOKENS[1:]:
        passed = scene.gate.passed
        scene.gate.allow(1)
        assert contents(await wire.chunk()) == [token.decode()]
        assert scene.gate.passed == passed + 1
    scene.gate.open()
    rest = b""
    while piece := await wire.chunk():
        rest += piece
    assert rest.endswith(b"data: [DONE]\n\n")
    assert contents(rest) == []


# The bare socket ──────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_oc_64_headers_and_one_write_a_token() -> None:
    async with scripted(SCRIPT, shut=True) as scene:
        wire = await scene.connect()
        await ask(wire)
        headers = await first(scene, wire)
        assert headers["x-accel-buffering"] == "no"
        (connection,) = [one for one in connections(scene) if one.cycle is not None and one.cycle.response_started]
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await arrives_alone(scene, wire)


def connections(scene: Scene) -> list:  # type: ignore[type-arg]
    return list(scene.running.service._http.server_state.connections)


# nginx ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def program() -> str:
    return nginx_or_skip()


@contextlib.asynccontextmanager
async def behind(program: str, tmp_path: Path, scene: Scene, site: str) -> AsyncIterator[NginxServer]:
    """An nginx before the scene. `site`: "plain", "deployed" or "http2"."""
    port = free_port()
    if site == "plain":
        text = PLAIN % {"port": port, "upstream": scene.port}
    else:
        text = deployed(port, scene.port, listen=" http2" if site == "http2" else "")
    nginx = NginxServer(program, tmp_path / f"nginx{next(COUNT)}", port, text)
    nginx.check()
    nginx.start()
    try:
        yield nginx
    finally:
        nginx.stop()


async def through(nginx: NginxServer, scene: Scene) -> Wire:
    wire = await Wire.open(nginx.port, MODEL, None)
    scene.running.connections.append(wire)
    return wire


SITES = pytest.mark.parametrize("site", ["plain", "deployed"])


@SITES
@on_loop
async def test_oc_64_every_token_comes_through_nginx_on_its_own(program: str, tmp_path: Path, site: str) -> None:
    async with scripted(SCRIPT, shut=True) as scene, behind(program, tmp_path, scene, site) as nginx:
        wire = await through(nginx, scene)
        await ask(wire)
        await first(scene, wire)
        await arrives_alone(scene, wire)
        await scene.idle()


@on_loop
async def test_oc_64_every_token_comes_through_http2_on_its_own(program: str, tmp_path: Path) -> None:
    async with scripted(SCRIPT, shut=True) as scene, behind(program, tmp_path, scene, "http2") as nginx:
        client = await Http2.open(nginx.port)
        client.post(CHAT, dumps(chat_fields(MODEL, {"stream": True})))
        for token in TOKENS:
            scene.gate.allow(1)
            assert contents(await client.data()) == [token.decode()]
        scene.gate.open()
        rest = b""
        while piece := await client.data():
            rest += piece
        assert rest.endswith(b"data: [DONE]\n\n")
        client.close()
        await scene.idle()


@on_loop
async def test_oc_64_a_stream_that_is_reset_in_http2_stops_the_engine(program: str, tmp_path: Path) -> None:
    async with scripted(SCRIPT, shut=True) as scene, behind(program, tmp_path, scene, "http2") as nginx:
        client = await Http2.open(nginx.port)
        client.post(CHAT, dumps(chat_fields(MODEL, {"stream": True})))
        scene.gate.allow(1)
        assert await client.data()
        client.reset()
        await until(lambda: scene.app.running == 0)
        scene.gate.open()
        await scene.idle()
        assert [line["outcome"] for line in scene.access if line["path"] == CHAT] == ["cancelled"]
        client.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [True, False])
@SITES
@on_loop
async def test_oc_64_who_leaves_nginx_leaves_the_engine(
    program: str, tmp_path: Path, site: str, begun: bool, stream: bool
) -> None:
    async with scripted(SCRIPT, shut=True) as scene, behind(program, tmp_path, scene, site) as nginx:
        wire = await through(nginx, scene)
        await ask(wire, stream=stream)
        await until(lambda: scene.app.running == 1)
        if begun and stream:
            await first(scene, wire)
        elif begun:
            scene.gate.allow(2)
        await until(lambda: scene.gate.standing)
        wire.close()
        await until(lambda: scene.app.running == 0)
        scene.gate.open()
        await scene.idle()
        assert scene.scripted.produced < len(TOKENS)
        assert [line["outcome"] for line in scene.access if line["path"] == CHAT] == ["cancelled"]


@on_loop
async def test_oc_64_nginx_keeps_its_connection_to_us(program: str, tmp_path: Path) -> None:
    async with scripted(SCRIPT) as scene, behind(program, tmp_path, scene, "deployed") as nginx:
        async with Asking(f"http://127.0.0.1:{nginx.port}", MODEL, None).calls() as outside:
            used = set()
            for number in range(6):
                answer = await outside.chat(stream=bool(number % 2))
                assert answer.status == 200
                assert answer.text == b"".join(TOKENS).decode()
                used |= {id(one) for one in connections(scene)}
        assert len(used) == 1
        assert len(connections(scene)) == 1


@SITES
@on_loop
async def test_oc_64_statuses_come_through_as_they_are(program: str, tmp_path: Path, site: str) -> None:
    async with (
        scripted([[FAIL]], body_limit=100_000) as scene,
        behind(program, tmp_path, scene, site) as nginx,
        Asking(f"http://127.0.0.1:{nginx.port}", MODEL, None).calls() as outside,
    ):
        failed = await outside.chat(stream=True)
        envelope(failed, 500)
        envelope(await outside.chat(stream=True, temperature="hot"), 400)
        envelope(await outside.chat(stream=True, model="other"), 404)
        envelope(await outside.post(CHAT, b" " * 300_000), 413)
        scene.app.drain()
        refused = await outside.chat(stream=True)
        envelope(refused, 503)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-request-id"]


@on_loop
async def test_oc_64_what_is_for_the_inside_stays_inside(program: str, tmp_path: Path) -> None:
    async with (
        scripted(SCRIPT) as scene,
        behind(program, tmp_path, scene, "deployed") as nginx,
        Asking(f"http://127.0.0.1:{nginx.port}", MODEL, None).calls() as outside,
    ):
        assert (await outside.get("/healthz")).status == 200
        for path in ("/metrics", "/admin/v1/engines"):
            answer = await outside.get(path)
            assert answer.status == 404
            assert "nginx" in answer.headers["server"]
            assert b"headrace" not in answer.body
