"""OC-51: another model under the same name, while requests run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from acceptance.asking import CHAT, Answer, Asking, Wire, envelope, on_loop
from acceptance.hall import Hall, hall, paced, timed
from acceptance.process import Process
from acceptance.tiny import ALIAS, Tiny, tinies
from headrace.server.launch import listen
from headrace.testing import ScriptedTokenizer
from server.socket_client import until

A = [[f"a{i} ".encode()] for i in range(100)]
B = [[f"b{i} ".encode()] for i in range(100)]
TEXT_A, TEXT_B = (b"".join(step[0] for step in script).decode() for script in (A, B))


async def streamed(wire: Wire, events: list[Any]) -> tuple[str, set[str]]:
    """The text and the models of a begun stream, read to its end."""
    events += await wire.rest()
    assert events.pop() == "[DONE]"
    chunks = [event for event in events if event["choices"]]
    assert [c["choices"][0]["finish_reason"] for c in chunks].count("stop") == 1
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    return text, {c["model"] for c in chunks}


async def begun(house: Hall, *, tokens: int, model: str = "chat", engine: str = "a") -> tuple[Wire, list[Any]]:
    """A stream of which so many tokens are read; its engine's gate is shut."""
    wire = await house.connect(model)
    await wire.chat(stream=True)
    events: list[Any] = []
    for number in range(tokens):
        house.engines[engine].gate.allow(1)
        if not number:
            await wire.head()
        events.append(await wire.event())
    return wire, events


def honest(answer: Answer) -> bool:
    """It was answered, or told when to try again."""
    if answer.status == 503:
        envelope(answer, 503)
        assert int(answer.headers["retry-after"]) >= 1
        return False
    assert answer.status == 200, answer
    return True


@on_loop
async def test_oc_51_swap_under_load() -> None:
    engines = {"a": paced(A), "b": paced(B)}
    async with hall(engines, {"A": {"a": 1.0}, "B": {"b": 1.0}}, max_running=2) as house:
        a, b = house.engines["a"], house.engines["b"]
        assert (await house.get("/readyz")).json == {"status": "ready", "models": ["A"]}
        a.gate.shut()
        b.loads.clear()
        wires = [await house.connect("A") for _ in range(2)]
        for wire in wires:
            await wire.chat(stream=True)
        await until(lambda: house.pool.members["a"].leases == 2 and a.gate.standing)
        a.gate.allow(31)
        heads = [await wire.head() for wire in wires]
        assert [status for status, _ in heads] == [200, 200]
        events = [[await wire.event() for _ in range(30)] for wire in wires]

        house.model = "A"
        queued = [asyncio.ensure_future(house.chat()) for _ in range(5)]
        await until(lambda: house.pool.members["a"].leases == 7)
        switch = asyncio.ensure_future(house.admin("POST", "switch", {"alias": "A", "to": "b"}))
        await until(b.loading.is_set)
        envelope(await house.admin("POST", "switch", {"alias": "A", "to": "b"}), 409, code="conflict")
        during_a = [asyncio.ensure_future(house.chat()) for _ in range(5)]
        during_b = [await house.send("POST", CHAT, json={"model": "B", "messages": [{"role": "user", "content": "hi"}]})
                    for _ in range(5)]  # fmt: skip
        assert [honest(answer) for answer in during_b] == [False] * 5
        assert (await house.get("/health")).status == (await house.get("/readyz")).status == 200
        await until(lambda: house.pool.members["a"].leases == 12)
        wires[1].reset()

        b.loads.set()
        report = (await switch).json
        assert (report["stage"], report["draining"], report["error"]) == ("draining", ["a"], None)
        late = await house.chat()
        assert (late.text, late.json["model"]) == (TEXT_B, "A")
        assert (house.state("a"), a.resident, b.resident) == ("draining", 1, 1)

        a.gate.open()
        assert await streamed(wires[0], events[0]) == (TEXT_A, {"A"})
        answers = await asyncio.gather(*queued, *during_a)
        assert all(map(honest, answers))
        assert {answer.text for answer in answers} == {TEXT_A}
        await until(lambda: house.state("a") == "gone")
        assert (a.resident, b.resident) == (0, 1)
        (told,) = (await house.admin("GET", "switch")).json["last"]
        assert (told["id"], told["stage"], told["draining"]) == (report["id"], "done", [])
        assert (await house.chat()).text == TEXT_B
        house.model = "B"
        assert (await house.chat()).text == TEXT_B


@on_loop
async def test_oc_51_health_does_not_lie_while_nothing_can_answer() -> None:
    async with hall({"a": paced(A), "b": paced(B)}, {"chat": {"a": 1.0}}, loaded=()) as house:
        assert (await house.get("/health")).status == 200
        envelope(await house.get("/readyz"), 503)
        assert not honest(await house.chat())
        house.engines["b"].loads.clear()
        switch = asyncio.ensure_future(house.admin("POST", "switch", {"alias": "chat", "to": "b"}))
        await until(house.engines["b"].loading.is_set)
        envelope(await house.get("/readyz"), 503)
        house.engines["b"].loads.set()
        assert (await switch).status == 200
        assert (await house.get("/readyz")).json == {"status": "ready", "models": ["chat"]}
        assert (await house.chat()).text == TEXT_B


# The end of the drain time ────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_oc_51_at_the_end_of_its_time_a_stream_ends_with_one_error() -> None:
    async with hall({"a": paced(A), "b": paced(B)}, {"chat": {"a": 1.0}}, drain_s=0.0) as house:
        house.engines["a"].gate.shut()
        wire, events = await begun(house, tokens=30)
        assert (await house.admin("POST", "switch", {"alias": "chat", "to": "b"})).status == 200
        events += await wire.rest()
        error = events.pop()["error"]
        assert (error["code"], error["message"]) == (
            "engine_unavailable", "the engine was shut down before it had finished this answer"
        )  # fmt: skip
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        assert len(events) >= 30
        assert all(event["choices"][0]["delta"].get("content") for event in events)
        assert TEXT_A.startswith(text)
        assert not any(event["choices"][0]["finish_reason"] for event in events)
        await until(lambda: house.state("a") == "gone")
        assert (await house.chat()).text == TEXT_B


@on_loop
async def test_oc_51_or_goes_on_with_the_new_engine_if_that_is_of_its_family() -> None:
    tokenizer, families = ScriptedTokenizer(), {"a": "f", "b": "f"}
    engines = {name: paced(A, tokenizer=tokenizer) for name in families}
    async with hall(engines, {"chat": {"a": 1.0}}, families=families, drain_s=0.0) as house:
        house.engines["a"].gate.shut()
        wire, events = await begun(house, tokens=30)
        assert (await house.admin("POST", "switch", {"alias": "chat", "to": "b"})).status == 200
        assert await streamed(wire, events) == (TEXT_A, {"chat"})
        assert house.engines["b"].made[0].produced > 60
        await until(lambda: house.state("a") == "gone")
        assert house.pool.counts["continued"] == 1


@on_loop
async def test_oc_51_what_was_not_begun_is_asked_of_the_new_engine() -> None:
    async with hall({"a": paced(A), "b": paced(B)}, {"chat": {"a": 1.0}}, drain_s=0.0) as house:
        house.engines["a"].gate.shut()
        waiting = asyncio.ensure_future(house.chat())
        wire = await house.connect()
        await wire.chat(stream=True)
        await until(lambda: house.pool.members["a"].leases == 2)
        assert (await house.admin("POST", "switch", {"alias": "chat", "to": "b"})).status == 200
        assert (await waiting).text == TEXT_B
        await wire.head()
        assert await streamed(wire, []) == (TEXT_B, {"chat"})


# Candidates and rollback ──────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_oc_51_a_candidate_that_does_not_come_up_changes_nothing() -> None:
    async with hall({"a": paced(A), "b": paced(B)}, {"chat": {"a": 1.0}}) as house:
        house.engines["a"].gate.shut()
        wire, events = await begun(house, tokens=5)
        house.engines["b"].fault = "b.gguf: is no model"
        error = (await house.admin("POST", "switch", {"alias": "chat", "to": "b"})).json["error"]
        assert (error["code"], error["message"]) == ("load_failed", "b: b.gguf: is no model")
        row = (await house.admin("GET", "engines/b")).json
        assert (row["state"], row["reason"]) == ("gone", "b.gguf: is no model")
        assert (await house.admin("GET", "aliases/chat")).json["engines"] == {"a": 1.0}
        house.engines["a"].gate.open()
        assert await streamed(wire, events) == (TEXT_A, {"chat"})
        assert (await house.chat()).text == TEXT_A
        house.engines["b"].fault = None
        assert (await house.admin("POST", "switch", {"alias": "chat", "to": "b"})).status == 200


@on_loop
async def test_oc_51_rollback_while_the_old_engine_drains() -> None:
    async with hall({"a": paced(A), "b": paced(B)}, {"chat": {"a": 1.0}}) as house:
        a = house.engines["a"]
        a.gate.shut()
        wire, events = await begun(house, tokens=5)
        await house.admin("POST", "switch", {"alias": "chat", "to": "b"})
        assert house.state("a") == "draining"
        assert (await house.chat()).text == TEXT_B
        back = (await house.admin("POST", "switch", {"alias": "chat", "to": "a"})).json
        assert (back["load_ms"], house.state("a"), len(a.made)) == (None, "ready", 1)
        a.gate.open()
        assert await streamed(wire, events) == (TEXT_A, {"chat"})
        assert (await house.chat()).text == TEXT_A
        await until(lambda: house.state("b") == "gone")
        assert (a.resident, house.engines["b"].resident) == (1, 0)


@on_loop
async def test_oc_51_the_admin_client_may_leave() -> None:
    async with hall({"a": paced(A), "b": paced(B)}, {"chat": {"a": 1.0}}) as house:
        house.engines["b"].loads.clear()
        wire = await house.connect()
        body = json.dumps({"alias": "chat", "to": "b"}).encode()
        head = f"POST /admin/v1/switch HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        await wire.raw(head.encode() + body)
        await until(house.engines["b"].loading.is_set)
        wire.reset()
        house.engines["b"].loads.set()
        await until(lambda: house.state("a") == "gone")
        assert (await house.chat()).text == TEXT_B


# Under a steady load ──────────────────────────────────────────────────────────────────────────────────────────────────

REQUESTS = 150
EVERY_S = 0.02
SHORT = 20


@on_loop
async def test_oc_51_no_request_notices_a_switch() -> None:
    scripts = {name: [[f"{name}{i} ".encode()] for i in range(SHORT)] for name in ("a", "b")}
    texts = {name: "".join(step[0].decode() for step in script) for name, script in scripts.items()}
    engines = {name: timed(script, 0.004) for name, script in scripts.items()}
    async with hall(engines, {"chat": {"a": 1.0}}, max_running=64) as house:
        sent: list[asyncio.Task[Answer]] = []

        async def load() -> None:
            # The next request goes out whether the last one is answered or not.
            for number in range(REQUESTS):
                sent.append(asyncio.ensure_future(house.chat(stream=number % 3 > 0)))
                await asyncio.sleep(EVERY_S)

        async def switches() -> None:
            for number, to in enumerate(("b", "a", "b", "a")):
                await until(lambda: len(sent) >= REQUESTS // 5 * (number + 1))  # noqa: B023
                answer = await house.admin("POST", "switch", {"alias": "chat", "to": to})
                assert answer.status == 200, answer

        await asyncio.gather(load(), switches())
        answers = await asyncio.gather(*sent)
        assert [answer.status for answer in answers] == [200] * REQUESTS
        assert all(answer.text in texts.values() for answer in answers), "no token is lost, doubled or another's"
        assert all(answer.done for answer in answers if answer.stream)
        assert {answer.text for answer in answers} == set(texts.values())
        await until(lambda: house.state("b") == "gone")
        assert [house.engines[name].resident for name in "ab"] == [1, 0]
        assert house.pool.counts == {}, "nothing had to be tried again"


# The real thing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def children(pid: int) -> list[int]:
    """Processes that it started and that are there."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def memory(server: Tiny) -> int:
    """Resident bytes of the server's engines."""
    return sum(Process(child).memory for child in children(server.process.pid))


def headrace(*arguments: str, **environ: str) -> str:
    """What the program prints; it ends well."""
    command = [sys.executable, "-m", "headrace", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environ})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.real
def test_oc_51_the_demo_model_is_switched_and_its_memory_is_back(demo_model: Path, tmp_path: Path) -> None:
    @on_loop
    async def run(server: Tiny) -> None:
        async with server.calls():
            await server.alive()
            before = memory(server)
            wire = await Wire.open(server.port, ALIAS, None)
            bias = {str(token): -100 for token in server.eog}
            await wire.chat(stream=True, max_tokens=200, logit_bias=bias, stream_options={"include_usage": True})
            await wire.head()
            first = await wire.event()
            body = {"name": "b", "kind": "llama", "model": str(demo_model), "engine": {"max_running": 4}, "load": False}
            assert (await server.send("POST", "/admin/v1/engines", json=body)).status == 201
            said = await asyncio.to_thread(headrace, "switch", ALIAS, "b", "--at", server.url)
            assert said.startswith(f"b answers everything to {ALIAS}: loaded in ")
            await server.alive()
            events = [first, *await wire.rest()]
            wire.close()
            assert events[-1] == "[DONE]"
            assert events[-2]["usage"]["completion_tokens"] == 200
            assert {event["model"] for event in events[:-1]} == {ALIAS}
            assert await gone(server, ALIAS)
            assert len(children(server.process.pid)) == 1
            assert memory(server) == pytest.approx(before, rel=0.1)
            assert "b " in await asyncio.to_thread(headrace, "engines", "--at", server.url)
            await asyncio.to_thread(headrace, "switch", ALIAS, ALIAS, "--at", server.url)
            await server.alive()
            assert await gone(server, "b")
            assert memory(server) == pytest.approx(before, rel=0.1)

    with tinies(demo_model, tmp_path) as start:
        run(start(engine_cells=2048))


def headrace_fails(*arguments: str, **environ: str) -> str:
    """What the program says when it does not end well."""
    command = [sys.executable, "-m", "headrace", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environ})
    assert done.returncode == 2, done.stdout
    return done.stderr


def test_oc_51_the_admin_api_on_an_address_of_its_own(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0, guarded=True) as sock:
        port = sock.getsockname()[1]
    at = f"http://127.0.0.1:{port}"

    @on_loop
    async def run(server: Tiny) -> None:
        main, side = Asking(server.url, ALIAS, "client"), Asking(at, ALIAS, "admin")
        async with main.calls(), side.calls():
            envelope(await main.get("/admin/v1/engines"), 404)
            envelope(await main.send("GET", "/admin/v1/engines", headers={"authorization": "Bearer admin"}), 401)
            envelope(await side.send("GET", "/admin/v1/engines", headers={"authorization": "Bearer client"}), 401)
            envelope(await side.chat(), 404)
            assert (await side.get("/metrics")).status == (await side.get("/health")).status == 200
            assert "needs its key" in await asyncio.to_thread(headrace_fails, "engines", "--at", at)
            environ = {"HEADRACE_SERVER_ADMIN_KEY": "admin", "HEADRACE_SERVER_ADMIN_PORT": str(port)}
            command = ("switch", ALIAS, "fast", "--model", "scripted:900")
            said = await asyncio.to_thread(headrace, *command, **environ)
            assert said.startswith(f"fast answers everything to {ALIAS}")
            assert "is named fast already" in await asyncio.to_thread(headrace_fails, *command, **environ)
            rows = (await side.get("/admin/v1/engines")).json["engines"]
            assert [row["name"] for row in rows] == [ALIAS, "fast"]
            assert rows[1]["memory_bytes"] > 1_000_000
            assert (await main.comp(max_tokens=3)).text == "1 2 3 "
            assert (await main.get("/readyz")).json["models"] == [ALIAS]

    with tinies(Path("scripted:100"), tmp_path) as start:
        run(start(server_key="client", server_admin_key="admin", server_admin_port=port))


@pytest.mark.real
def test_oc_51_a_server_may_be_stopped_in_the_middle_of_a_switch(demo_model: Path, tmp_path: Path) -> None:
    workers: list[int] = []

    @on_loop
    async def run(server: Tiny) -> None:
        async with server.calls():
            body = {"name": "b", "kind": "llama", "model": str(demo_model), "load": False}
            assert (await server.send("POST", "/admin/v1/engines", json=body)).status == 201
            ask = {"alias": ALIAS, "to": "b", "wait": False}
            assert (await server.send("POST", "/admin/v1/switch", json=ask)).status == 202
            async with asyncio.timeout(60):
                while len(children(server.process.pid)) < 2:
                    await server.get("/health")  # the other process says when it likes; each look is a round trip
            workers.extend(children(server.process.pid))

    with tinies(Path("scripted:100"), tmp_path) as start:
        run(start())
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


async def gone(server: Tiny, engine: str) -> bool:
    """Wait until that engine is unloaded."""
    async with asyncio.timeout(60):
        while (await server.get(f"/admin/v1/engines/{engine}")).json["state"] != "gone":
            pass  # each look is a round trip
    return True
