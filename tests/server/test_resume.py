"""What a request for a resumable stream leads to: one generation, or the log of the one there is, or a refusal."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import msgspec
import pytest

from headrace.core.errors import Draining, EngineUnavailable
from headrace.core.events import Relayed
from headrace.core.request import Ask
from headrace.gateway.guard import Caller
from headrace.server.attempts import LONG_BODY
from headrace.server.resume import _encode
from headrace.server.streams import LogLimits
from server.asgi_driver import Call, on_loop, settle
from server.hand_engine import Hands
from server.log_servers import NamedGuard, Server, data, frames, nothing_left, one, text
from server.socket_client import until
from server.test_garbage import kept


class WaitingGuard(NamedGuard):
    """Nobody is admitted before the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.closed = 0

    async def admit(self, caller: Caller, ask: Any) -> Any:
        await self.gate.wait()
        return self

    def close(self, *spent: Any) -> None:
        self.closed += 1


async def over(server: Server) -> None:
    """Everything has ended and expired."""
    await settle()
    for log in server.app.resuming.streams:
        assert log.ended is not None
        server.app.resuming.streams.forget(log)
    nothing_left(server)
    server.app.resuming.streams.close()


def error(call: Call) -> dict[str, Any]:
    return dict(call.json()["error"])


# Before the head ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "status"), [({"model": "x"}, 404), ({"temperature": "hot"}, 400), ({"messages": []}, 400)]
)
@on_loop
async def test_what_is_wrong_is_an_honest_status(fields: dict[str, Any], status: int) -> None:
    server = one()
    async with server.chat(**fields) as call:
        await call.task
    assert call.status == status
    assert "x-headrace-stream" not in call.headers
    await over(server)


@on_loop
async def test_an_engine_that_fails_before_the_first_text_is_an_honest_status() -> None:
    server = one()
    server.engine.refusal = EngineUnavailable("not now")
    async with server.chat() as call:
        await call.task
    assert (call.status, error(call)["message"]) == (503, "not now")
    async with server.chat() as call:
        server.engine.fail()
        await call.task
    assert call.status == 500
    await over(server)


@on_loop
async def test_who_leaves_before_the_head_leaves_nothing_behind() -> None:
    server = one()
    async with server.chat() as call:
        assert server.app.running == 1
        call.hang_up()
        await call.task
    await settle()
    assert server.engine.cancelled == [1]
    await over(server)


@on_loop
async def test_with_a_key_one_may_leave_before_the_head_and_come_back() -> None:
    server = one()
    async with server.chat(key="k") as call:
        call.hang_up()
        await call.task
    assert server.app.running == 1
    async with server.chat(key="k") as again:
        server.engine.say("a")
        server.engine.finish()
        await again.task
    assert text(again.body) == "a"
    assert len(server.engine.generations) == 1
    await over(server)


@on_loop
async def test_a_key_whose_request_was_refused_is_free_again() -> None:
    server = one()
    server.engine.refusal = EngineUnavailable("not now")
    async with server.chat(key="k") as call:
        await call.task
    assert call.status == 503
    async with server.chat(key="k") as again:
        server.engine.say("a")
        server.engine.finish()
        await again.task
    assert (again.status, text(again.body)) == (200, "a")
    await over(server)


# The same once more ───────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_two_at_the_same_time_with_one_key_share_one_generation() -> None:
    server = one()
    async with server.chat(key="k") as first, server.chat(key="k") as second:
        assert len(server.engine.generations) == 1
        server.engine.say("a")
        await settle()
        server.engine.finish()
        await first.task
        await second.task
    assert first.body == second.body
    assert first.headers["x-headrace-stream"] == second.headers["x-headrace-stream"]
    await over(server)


@on_loop
async def test_another_body_or_another_path_under_a_known_key_is_a_conflict() -> None:
    server = one()
    async with server.chat(key="k") as first:
        server.engine.say("a")
        for call in (
            server.chat(key="k", seed=1),
            server.client.complete(stream=True, headrace={"resume": True}, headers=[(b"idempotency-key", b"k")]),
            server.chat(last="s1-1", seed=1),
        ):
            async with call:
                await call.task
            assert (call.status, error(call)["code"]) == (409, "conflict")
        server.engine.finish()
        await first.task
    assert len(server.engine.generations) == 1
    await over(server)


@on_loop
async def test_the_same_request_written_otherwise_is_the_same() -> None:
    server = one()
    fields = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "headrace": {"resume": True},
    }
    headers = [(b"idempotency-key", b"k")]
    other = msgspec.json.format(msgspec.json.encode(dict(reversed(fields.items()))))
    async with server.client.post("/v1/chat/completions", fields, headers=headers) as first:
        server.engine.say("a")
        server.engine.finish()
        await first.task
    async with server.client.post("/v1/chat/completions", other, headers=headers) as second:
        await second.task
    assert second.body == first.body
    await over(server)


@on_loop
async def test_a_key_without_resume_means_nothing() -> None:
    server = one()
    for _ in range(2):
        headers = [(b"idempotency-key", b"k"), (b"last-event-id", b"from-elsewhere-7")]
        async with server.client.chat(stream=True, headers=headers) as call:
            server.engine.say("a")
            server.engine.finish()
            await call.task
        assert call.status == 200
        assert b"id: " not in call.body
        assert "x-headrace-stream" in call.headers
    assert len(server.engine.generations) == 2
    await over(server)


# What is asked for ────────────────────────────────────────────────────────────────────────────────────────────────────


async def finished(server: Server, *words: str) -> tuple[str, Call]:
    async with server.chat() as call:
        for word in words:
            server.engine.say(word)
            await settle()
        server.engine.finish("stop", len(words))
        await call.task
    return call.headers["x-headrace-stream"], call


@on_loop
async def test_after_and_last_event_id_and_the_newer_of_both() -> None:
    server = one()
    id, call = await finished(server, "ab", "cd", "ef")
    everything = data(call.body)
    for asked, left in (
        (server.get(id), 0),
        (server.get(id, 0), 0),
        (server.get(id, 2), 1),
        (server.get(id, last=f"{id}-4"), 2),
        (server.get(id, 2, last=f"{id}-4"), 2),
        (server.get(id, last=""), 0),
    ):
        async with asked:
            await asked.task
        assert data(asked.body) == everything[left:]
        assert asked.headers["content-type"].startswith("text/event-stream")
        assert asked.headers["x-headrace-stream"] == id
    async with server.get(id, 3) as inside:
        await inside.task
    assert text(inside.body) == "def"
    await over(server)


@on_loop
async def test_who_has_everything_need_not_come_again() -> None:
    server = one()
    id, call = await finished(server, "ab")
    last = frames(call.body)[-1][0]
    for asked in (server.get(id, last=last), server.chat(last=last)):
        async with asked:
            await asked.task
        assert (asked.status, asked.body) == (204, b"")
    async with server.get(id, 10**9) as beyond:
        await beyond.task
    assert (beyond.status, error(beyond)["code"]) == (410, "gone")
    await over(server)


@on_loop
async def test_wrong_positions_are_refused() -> None:
    server = one()
    id, _ = await finished(server, "ab")
    for query in ("after=x", "after=-1", "after=1&after=2", "after=", "after=" + "9" * 40):
        async with server.client.call("GET", f"/v1/streams/{id}?{query}") as call:
            await call.task
        assert (call.status, error(call)["param"]) == (400, "after")
    for last in ("x", f"{id}-", "other-1", f"{id}-1x"):
        async with server.get(id, last=last) as call:
            await call.task
        assert call.status == 400
    async with server.chat(key="k" * 300) as call:
        await call.task
    assert call.status == 400
    await over(server)


@on_loop
async def test_a_head_request_gets_the_head() -> None:
    server = one()
    id, _ = await finished(server, "ab")
    async with server.client.call("HEAD", f"/v1/streams/{id}") as call:
        await call.task
    assert (call.status, call.body, call.headers["x-headrace-stream"]) == (200, b"", id)
    await over(server)


@on_loop
async def test_others_find_nothing_whatever_they_know() -> None:
    server = one(guard=NamedGuard())

    def as_(name: str, **more: Any) -> Call:
        headers = [(b"authorization", f"Bearer {name}".encode()), *more.pop("headers", ())]
        return server.client.chat(stream=True, headrace={"resume": True}, headers=headers)

    async with as_("ann", headers=[(b"idempotency-key", b"k")]) as call:
        server.engine.say("a")
        await settle()
        id = call.headers["x-headrace-stream"]
        for other in (
            server.get(id, key="bob"),
            server.get(id),
            server.delete(id, key="bob"),
            as_("bob", headers=[(b"last-event-id", f"{id}-1".encode())]),
            server.get("none", key="ann"),
        ):
            async with other:
                await other.task
            assert (other.status, error(other)["code"]) == (404, "stream_not_found")
        async with as_("bob", headers=[(b"idempotency-key", b"k")]) as own:
            await settle()
            assert len(server.engine.generations) == 2, "bob's key is not ann's"
            server.engine.say("b")
            server.engine.finish()
            await own.task
        assert text(own.body) == "b"
        server.engine.finish(rid=1)
        await call.task
    await over(server)


# Ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_an_error_is_part_of_the_log() -> None:
    server = one()
    async with server.chat() as call:
        server.engine.say("a")
        await settle()
        server.engine.fail()
        await call.task
    async with server.get(call.headers["x-headrace-stream"]) as late:
        await late.task
    assert late.body == call.body
    assert late.body.count(b'data: {"error"') == 1
    assert b"[DONE]" not in late.body
    assert late.ended
    assert server.app.metrics.streams.ended["failed"] == 1
    await over(server)


@on_loop
async def test_a_stop_finishes_every_choice_once() -> None:
    server = one()
    async with server.chat(n=3, stream_options={"include_usage": True}) as call:
        server.engine.say("a", index=0)
        server.engine.say("b", index=1)
        server.engine.finish(index=1)
        await settle()
        async with server.delete(call.headers["x-headrace-stream"]) as stop:
            await stop.task
        await call.task
    events = [msgspec.json.decode(line) for line in data(call.body)[:-1]]
    ends = [(c["index"], e.get("headrace")) for e in events for c in e["choices"] if c["finish_reason"]]
    assert sorted(ends, key=lambda end: end[0]) == [(0, {"ended": "stopped"}), (1, None), (2, {"ended": "stopped"})]
    assert events[-1]["usage"]["total_tokens"] > 0
    assert data(call.body)[-1] == b"[DONE]"
    await over(server)


@on_loop
async def test_a_relayed_answer_is_stopped_under_its_own_name() -> None:
    server = one()
    async with server.chat() as call:
        raw = b'data: {"id":"up-1","created":5,"choices":[{"index":0,"delta":{"role":"assistant","content":"hi"}}]}\n\n'
        sink = server.engine.live[server.engine.rid]
        sink(Relayed(server.engine.rid, raw, "hi", "hi", 1, identity=("up-1", 5)))  # type: ignore[arg-type]
        await settle()
        async with server.delete(call.headers["x-headrace-stream"]) as stop:
            await stop.task
        await call.task
    first, last, done = data(call.body)
    assert first == raw[6:-2]
    assert (msgspec.json.decode(last)["id"], msgspec.json.decode(last)["created"]) == ("up-1", 5)
    assert "role" not in msgspec.json.decode(last)["choices"][0]["delta"]
    assert done == b"[DONE]"
    await over(server)


@on_loop
async def test_a_generation_is_accounted_for_once_and_with_all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="headrace.access")
    server = one()
    async with server.chat() as call:
        server.engine.say("a")
        await settle()
        call.hang_up()
        await call.task
        assert not caplog.records, "it is not over"
        server.engine.say("b")
        server.engine.finish("stop", 3)
        await settle()
    async with server.get(call.headers["x-headrace-stream"]) as again:
        await again.task
    first, second = (msgspec.json.decode(record.getMessage()) for record in caplog.records)
    assert (first["outcome"], first["status"], first["completion_tokens"]) == ("ok", 200, 3)
    assert (second["path"], second["outcome"], second["completion_tokens"]) == ("/v1/streams/{name}", "ok", 0)
    await over(server)


@on_loop
async def test_a_server_that_drains_takes_no_new_one_and_ends_those_there_are() -> None:
    server = one()
    async with server.chat() as call:
        server.engine.say("a")
        await settle()
        server.app.drain()
        async with server.chat() as refused:
            await refused.task
        assert (refused.status, error(refused)["code"]) == (503, "draining")
        async with server.get(call.headers["x-headrace-stream"]) as reader:
            server.app.fail_all(Draining("the end"))
            await call.task
            await reader.task
    assert reader.body == call.body
    assert msgspec.json.decode(data(call.body)[-1])["error"]["code"] == "draining"
    await server.app.quiet()
    await over(server)


@on_loop
async def test_what_waits_for_its_permit_while_the_server_drains_gets_none() -> None:
    guard = WaitingGuard()
    server = one(guard=guard)
    async with server.chat(key="k") as call, server.client.chat(stream=True) as plain:
        await settle()
        server.app.drain()
        await server.app.quiet()
        guard.gate.set()
        for refused in (call, plain):
            await refused.task
            assert (refused.status, error(refused)["code"]) == (503, "draining")
    assert guard.closed == 2
    assert server.engine.generations == []
    await server.app.finish()
    await over(server)


@on_loop
async def test_a_server_ends_whatever_its_generations_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.resume.CLOSE_S", 0.01)
    guard = WaitingGuard()
    server = one(guard=guard)
    async with server.chat(key="k") as call:
        await settle()
        server.app.drain()
        await server.app.finish()
        await call.task
    assert call.status == 503
    guard.gate.set()
    server = one(guard=guard)
    async with server.chat() as call:
        server.engine.say("a")
        await settle()
        await server.app.finish()
        await call.task
    assert msgspec.json.decode(data(call.body)[-1])["error"]["code"] == "draining"
    await over(server)


@on_loop
async def test_what_nobody_reads_is_stopped_and_the_log_says_so() -> None:
    clock = Hands()
    server = one(clock=clock, log_limits=LogLimits(grace_s=5))
    async with server.chat() as call:
        server.engine.say("a")
        await settle()
        call.hang_up()
        await call.task
    clock.now += 6
    server.app.resuming.streams.sweep(clock.now)
    await settle()
    assert server.engine.cancelled == [1]
    assert server.app.metrics.streams.ended["abandoned"] == 1
    async with server.get(call.headers["x-headrace-stream"]) as late:
        await late.task
    assert msgspec.json.decode(data(late.body)[-1])["error"]["code"] == "abandoned"
    await over(server)


@on_loop
async def test_the_simple_event_stream_is_stopped_in_its_own_words() -> None:
    server = one()
    async with server.client.post("/chat/v1/stream", {"prompt": "hi", "headrace": {"resume": True}}) as call:
        server.engine.say("a")
        await settle()
        async with server.delete(call.headers["x-headrace-stream"]) as stop:
            await stop.task
        await call.task
    done = msgspec.json.decode(data(call.body)[-1])
    assert (done["event"], done["headrace"]) == ("done", {"ended": "stopped"})
    async with server.get(call.headers["x-headrace-stream"]) as late:
        await late.task
    assert late.body == call.body
    await over(server)


@on_loop
async def test_a_refusal_that_nobody_heard_leaves_nothing_for_the_collector() -> None:
    server = one()

    async def refused(key: str) -> None:
        async with server.chat(key=key) as call:
            call.hang_up()
            await call.task
        server.engine.fail()
        await settle()

    await refused("first")
    with kept() as found:
        for number in range(10):
            await refused(str(number))
    assert found["Production"] == found["StreamLog"] == found["Live"] == 0, found
    await over(server)


@on_loop
async def test_a_long_request_is_told_from_others_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def encode(path: str, ask: Ask, kept: bool) -> tuple[bytes, bytes | None]:
        threads.append(threading.current_thread() is threading.main_thread())
        return _encode(path, ask, kept)

    monkeypatch.setattr("headrace.server.resume._encode", encode)
    server = one()
    for size in (1, LONG_BODY):
        async with server.chat(key="k", messages=[{"role": "user", "content": "hi"}], user="x" * size) as call:
            await until(lambda size=size: len(threads) > (size > 1))  # type: ignore[misc]
            await until(lambda: bool(server.engine.live) or call.task.done())
            if size == 1:
                server.engine.say("a")
                server.engine.finish()
            await call.task
        assert call.status == (200 if size == 1 else 409)
    assert threads == [True, False]
    await over(server)
    server.app.close()
