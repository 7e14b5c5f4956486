"""Acceptance: who may come in, how much they may ask, what is booked for them, and what stands in the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from acceptance.asking import CHAT, Wire, chat_fields, dumps, envelope, on_loop
from acceptance.keyed import keyed, put_keys
from acceptance.scene import MODEL, Scene, scripted
from headrace.gateway.keyring_guard import LOOK_S
from headrace.gateway.keys import new_secret
from server.socket_client import until

PUBLIC = {"/healthz", "/health", "/readyz", "/"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
SECRET = new_secret()
ODD = [
    b"",
    b"authorization: Bearer wrong\r\n",
    b"authorization: Bearer\r\n",
    b"authorization: Bearer  %b\r\n" % SECRET.encode(),
    b"authorization: Basic %b\r\n" % SECRET.encode(),
    b"authorization: %b\r\n" % SECRET.encode(),
    b"authorization: Bearer \xd0\xba\r\n",
    b"authorization: Bearer \xff\xfe\r\n",
    b"authorization: Bearer %b\xd0\xba\r\n" % SECRET.encode(),
    b"authorization: Bearer %b\r\nauthorization: Bearer %b\r\n" % (SECRET.encode(), SECRET.encode()),
    b"authorization: Bearer %b, Bearer x\r\n" % SECRET.encode(),
    b"authorization: Bearer %b\r\n" % (b"x" * 30_000),
    b"x-api-key: %b\r\n" % SECRET.encode(),
]
STRANGE_PATHS = (
    "//v1/models",
    "/v1//models",
    "/v1/%2e%2e/v1/models",
    "/%2e%2e/v1/models",
    "/v1/models/",
    "/healthz/",
    "//healthz",
    "/healthz/../v1/models",
    "/healthz%2f",
    "/v1/models/%2e%2e/%2e%2e/metrics",
    "/V1/models",
    "/metrics/",
    "/nothing",
)


class Seen:
    """All that came back."""

    def __init__(self) -> None:
        self.bytes = bytearray()

    async def ask(self, wire: Wire, method: str, path: str, head: bytes = b"") -> int:
        """The status of an answer that is whole and of which the connection lives on."""
        await wire.request(method, path, head=head)
        raw = await wire.reader.readuntil(b"\r\n\r\n")
        lines = raw.decode("latin-1").lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        body = await wire.reader.readexactly(0 if method == "HEAD" else int(headers["content-length"]))
        self.bytes += raw + body
        status = int(lines[0].split()[1])
        if status == 401:
            assert headers["www-authenticate"] == "bearer"
            assert headers["content-type"] == "application/json"
            if method != "HEAD":
                assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        return status


def with_keys(test: Callable[[Scene], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    """A test of a server with one key of a file, SECRET."""

    def wrapper(tmp_path: Path) -> None:
        @on_loop
        async def check() -> None:
            put_keys(tmp_path / "keys.toml", all={"secret": SECRET})
            async with keyed(tmp_path) as (guard, _), scripted([[b"a"]], key=SECRET, guard=guard) as scene:
                await test(scene)

        check()

    wrapper.__name__ = test.__name__
    return wrapper


# OC-53 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@with_keys
async def test_oc_53_every_route_and_every_odd_key(scene: Scene) -> None:
    seen, wire = Seen(), await scene.connect()
    paths = [row.path.replace("{name}", "x") for row in scene.app.routes]
    assert PUBLIC < set(paths)
    for path in paths:
        for method in METHODS:
            for head in ODD:
                status = await seen.ask(wire, method, path, head)
                assert status < 500
                assert (status == 401) == (path not in PUBLIC), (method, path, head[:40])
    for path in STRANGE_PATHS:
        for head in ODD:
            assert await seen.ask(wire, "GET", path, head) == 401, (path, head[:40])
        assert await seen.ask(wire, "GET", path, b"authorization: Bearer %b\r\n" % SECRET.encode()) == 404
    for absolute in (f"http://127.0.0.1:{scene.port}/v1/models", "http://elsewhere/v1/models"):
        assert await seen.ask(wire, "GET", absolute) == 401
    for scheme in (b"Bearer", b"bearer", b"BEARER"):
        assert await seen.ask(wire, "GET", "/v1/models", b"authorization: %b %b\r\n" % (scheme, SECRET.encode())) == 200
    assert scene.scripted.steps == 0, "nobody reached the engine"
    await no_trace_of_the_key(scene, seen)
    await scene.alive()


@with_keys
async def test_oc_53_a_key_of_a_megabyte(scene: Scene) -> None:
    for path in ("/v1/models", CHAT, "/healthz", "/nothing"):
        wire = await scene.connect()
        await wire.raw(b"GET %b HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " % path.encode())
        answer = asyncio.ensure_future(wire.reader.readuntil(b"\r\n\r\n"))
        sent = 0
        while sent < 2**20 and not answer.done():  # a client that looks at what comes back while it sends
            with contextlib.suppress(ConnectionError):  # it is told, and then the connection is closed
                await wire.raw(b"x" * 8192)
            sent += 8192
            await asyncio.sleep(0)
        assert (await answer).startswith(b"HTTP/1.1 431 "), path
    await scene.alive()


async def no_trace_of_the_key(scene: Scene, seen: Seen) -> None:
    """Neither in answers, nor in the log, nor in the metrics; nor its random part alone."""
    metrics = (await scene.get("/metrics")).body
    log = "\n".join(record.getMessage() + str(record.exc_text) for record in scene.log)
    assert "/v1/models" in log
    for text in (bytes(seen.bytes), metrics, log.encode()):
        assert SECRET.encode() not in text
        assert SECRET.removeprefix("hr-")[:12].encode() not in text


# OC-04 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_oc_04_refusals_of_a_key_are_no_streams(tmp_path: Path) -> None:
    put_keys(
        tmp_path / "keys.toml",
        all={"secret": SECRET},
        few={"secret": "few", "models": (MODEL,), "rpm": 1},
        old={"secret": "old", "expires": 1},
        slow={"secret": "slow", "tpm": 10},
    )
    async with (
        keyed(tmp_path) as (guard, _),
        scripted([[b"a"]], key=SECRET, guard=guard, aliases=(MODEL, "other")) as scene,
    ):
        few = {"authorization": "Bearer few"}
        for stream in (True, False):
            for wrong in ("wrong", "old", "Few"):
                envelope(await scene.chat(stream=stream, headers={"authorization": f"Bearer {wrong}"}), 401, None)
            refused = await scene.chat(stream=stream, model="other", headers=few)
            error = envelope(refused, 403, "model", code="model_not_allowed")
            assert error["type"] == "permission_error"
            assert "other" not in error["message"]
        assert scene.scripted.steps == 0
        listed = (await scene.send("GET", "/v1/models", headers=few)).json["data"]
        assert [card["id"] for card in listed] == [MODEL]
        envelope(await scene.send("GET", "/v1/models/other", headers=few), 403, "model", code="model_not_allowed")
        envelope(await scene.chat(model="none", headers=few), 404, "model", code="model_not_found")
        assert (await scene.chat(stream=True, headers=few)).done
        steps = scene.scripted.steps
        for stream in (True, False):
            refused = await scene.chat(stream=stream, headers=few)
            error = envelope(refused, 429, None, code="rate_limit_exceeded")
            assert error["type"] == "rate_limit_error"
            assert 50 <= int(refused.headers["retry-after"]) <= 60
        assert scene.scripted.steps == steps
        slow = {"authorization": "Bearer slow"}
        assert (await scene.chat(stream=True, headers=slow)).done
        steps = scene.scripted.steps
        refused = await scene.chat(stream=True, headers=slow)
        assert "10 tokens a minute" in envelope(refused, 429, None)["message"]
        assert scene.scripted.steps == steps
        series = await scene.metrics()
        assert series['headrace_limited_total{reason="requests"}'] == 2
        assert series['headrace_limited_total{reason="tokens"}'] == 1
        assert {line["key"] for line in scene.access} == {"all", "few", "slow", None}
        await scene.alive()


# Limits and books over the wire ───────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_a_key_s_places_are_freed_however_its_requests_end(tmp_path: Path) -> None:
    put_keys(tmp_path / "keys.toml", all={"secret": SECRET}, two={"secret": "two", "streams": 2})
    async with (
        keyed(tmp_path) as (guard, usage),
        scripted([[b"a"], [b"b"]], key=SECRET, guard=guard, shut=True) as scene,
    ):
        two = {"authorization": "Bearer two"}
        streams = [await scene.connect("two") for _ in range(2)]
        for wire in streams:
            await wire.chat(stream=True)
        await until(lambda: scene.app.running == 2)
        envelope(await scene.chat(headers=two), 429, None)
        scene.gate.allow(1)
        streams[0].reset()
        await until(lambda: scene.app.running == 1)
        third = asyncio.ensure_future(scene.chat(stream=True, headers=two))
        await until(lambda: scene.app.running == 2)
        envelope(await scene.chat(headers=two), 429, None)
        scene.gate.open()
        assert (await third).done
        assert (await streams[1].head())[0] == 200
        assert (await streams[1].rest())[-1] == "[DONE]"
        await scene.idle()
        long = [{"role": "user", "content": "x" * 5000}]
        envelope(await scene.chat(messages=long, headers=two), 400, "messages", code="context_length_exceeded")
        assert (await scene.chat(headers=two)).status == 200
        rows = (await usage.table(usage.today, usage.today, "two")).rows
        assert sum(int(row["cancelled"]) for row in rows) == 1
        (row,) = rows
        assert (row["requests"], row["ok"], row["limited"], row["invalid"]) == (5, 3, 2, 1)
        assert int(row["prompt_tokens"]) > 0
        await scene.alive()


@on_loop
async def test_what_is_booked_is_our_own_count_also_of_a_stream_cut_short(tmp_path: Path) -> None:
    put_keys(tmp_path / "keys.toml", all={"secret": SECRET}, one={"secret": "one"})
    async with keyed(tmp_path) as (guard, usage), scripted([[b"a"]] * 50, key=SECRET, guard=guard, shut=True) as scene:
        wire = await scene.connect("one")
        await wire.chat(stream=True)
        await until(lambda: scene.gate.standing)
        scene.gate.allow(3)
        assert (await wire.head())[0] == 200
        text = ""
        while text != "aaa":
            text += (await wire.event())["choices"][0]["delta"].get("content") or ""
        wire.reset()
        await until(lambda: not scene.app.running)
        scene.gate.open()
        await scene.idle()
        (line,) = [line for line in scene.access if line["key"] == "one"]
        (row,) = (await usage.table(usage.today, usage.today, "one")).rows
        assert (row["requests"], row["cancelled"], row["model"]) == (1, 1, MODEL)
        assert row["prompt_tokens"] == line["prompt_tokens"] > 0
        assert 3 <= int(row["completion_tokens"]) == line["completion_tokens"] < 50
        answer = await scene.chat(headers={"authorization": "Bearer one"}, max_tokens=7)
        (row,) = (await usage.table(usage.today, usage.today, "one")).rows
        assert row["ok"] == 1
        assert int(row["completion_tokens"]) - line["completion_tokens"] == answer.usage["completion_tokens"] == 7
        await scene.alive()


@on_loop
async def test_a_key_is_made_and_revoked_while_the_server_runs(tmp_path: Path) -> None:
    put_keys(tmp_path / "keys.toml", all={"secret": SECRET})

    class Leaping:
        by = 0.0

        def __call__(self) -> float:
            return time.monotonic() + self.by

    clock = Leaping()
    async with keyed(tmp_path, clock=clock) as (guard, _), scripted([[b"a"]], key=SECRET, guard=guard) as scene:
        new = {"authorization": "Bearer new"}
        envelope(await scene.chat(headers=new), 401)
        put_keys(tmp_path / "keys.toml", all={"secret": SECRET}, new={"secret": "new"})
        clock.by += LOOK_S
        assert (await scene.chat(headers=new)).status == 200
        put_keys(tmp_path / "keys.toml", all={"secret": SECRET})
        clock.by += LOOK_S
        envelope(await scene.chat(headers=new), 401)
        await scene.alive()


# OC-55 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@with_keys
async def test_oc_55_what_clients_write_becomes_no_series(scene: Scene) -> None:
    rng = random.Random(55)

    def word() -> str:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=12))

    async def series() -> set[str]:
        text = (await scene.get("/metrics")).body.decode()
        for line in (line.split() for line in text.splitlines() if line.startswith("#")):
            assert line[1] in ("HELP", "TYPE")
        for kind in ("HELP", "TYPE"):
            names = [line.split()[2] for line in text.splitlines() if line.startswith(f"# {kind} ")]
            assert len(names) == len(set(names))
        return {
            f"{sample.name}{sorted(sample.labels.items())}"
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    good = {"authorization": f"Bearer {SECRET}"}
    await scene.chat()
    await scene.get("/nothing")
    assert (await scene.chat(model="none")).status == 404
    before, words = await series(), []
    for number in range(500):
        words.append(word())
        headers = {**(good if number % 2 else {"authorization": f"Bearer {words[-1]}"}), "x-request-id": words[-1]}
        if number % 5 < 3:
            body = dumps(chat_fields(words[-1] if number % 5 else MODEL, {"user": words[-1], "max_tokens": 1}))
            await scene.post(CHAT, body, headers=headers)
        else:
            await scene.send(words[-1].upper() if number % 5 == 3 else "GET", f"/{words[-1]}", headers=headers)
    after = await series()
    assert len(after - before) <= 5, sorted(after - before)
    text = "".join(after)
    assert not [one for one in words if one in text or one.upper() in text]
    await scene.alive()
