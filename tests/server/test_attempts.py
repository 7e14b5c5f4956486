from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.core.errors import ContextExceeded, EngineUnavailable, Overloaded, UpstreamFailed
from headrace.core.events import Admitted, Broken, Delta
from headrace.core.request import Ask, Sampling
from headrace.gateway.backend import Work
from headrace.observe.accesslog import LOGGER
from headrace.protocol.sse import COMMENT
from headrace.server.stream import StreamLimits
from server.asgi_driver import Call as Asking
from server.asgi_driver import Client, on_loop, settle
from server.hand_engine import INFO, HandEngine, Hands, model
from server.hand_fleet import HandFleet, fleet_server
from server.hand_upstream import HandUpstream
from server.socket_client import until

LONG = [{"role": "user", "content": "x" * 100}]


def two(**options: Any) -> tuple[HandEngine, HandEngine, HandFleet]:
    a, b = HandEngine(), HandEngine()
    return a, b, HandFleet({"a": a, "b": b}, **options)


def errors(call: Asking) -> list[Any]:
    return [event["error"] for event in call.events() if isinstance(event, dict) and "error" in event]


# Before the first text ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
@on_loop
async def test_an_engine_that_refuses_is_replaced(stream: bool) -> None:
    a, b, fleet = two()
    a.refusal = Overloaded("full")
    async with Client(fleet_server(fleet)).chat(stream=stream) as call:
        b.admit()
        b.say("hello")
        b.finish()
        await call.task
        assert call.status == 200
        assert b"hello" in call.body
    assert fleet.ends == [("a", ["failed"]), ("b", ["ok"])]


@on_loop
async def test_a_full_queue_is_no_sign_of_illness() -> None:
    a, b, fleet = two()
    a.refusal = Overloaded("256 requests wait", reason="queue_full")
    async with Client(fleet_server(fleet)).chat(stream=False) as call:
        b.admit()
        b.say("hello")
        b.finish()
        await call.task
        assert call.status == 200
    assert fleet.ends == [("a", ["refused"]), ("b", ["ok"])]


@on_loop
async def test_when_all_refuse_the_first_refusal_is_told() -> None:
    a, b, fleet = two()
    a.refusal, b.refusal = Overloaded("a is full", retry_after=7), EngineUnavailable("b is away")
    async with Client(fleet_server(fleet)).chat(stream=True) as call:
        await call.task
        assert call.status == 503
        assert call.json()["error"]["message"] == "a is full"
        assert call.headers["retry-after"] == "7"
    assert [ends for _, ends in fleet.ends] == [["failed"], ["failed"]]


@on_loop
async def test_what_the_client_did_wrong_is_tried_nowhere_else() -> None:
    _, b, fleet = two()
    async with Client(fleet_server(fleet)).chat(temperature=9) as call:
        await call.task
        assert call.status == 400
    assert fleet.ends == [("a", ["refused"])]
    assert b.generations == []


@on_loop
async def test_what_one_engine_cannot_do_another_may() -> None:
    upstream = HandUpstream()
    fleet = HandFleet({"a": HandEngine(), "b": upstream})
    async with Client(fleet_server(fleet)).chat(stream=True, tools=[{"type": "function"}]) as call:
        upstream.relay("yes")
        upstream.over()
        await call.task
        assert call.status == 200
        assert call.content() == "yes"
    assert fleet.ends == [("a", ["refused"]), ("b", ["ok"])]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("over_there", [False, True])
@on_loop
async def test_what_one_engine_has_no_room_for_another_may_hold(stream: bool, over_there: bool) -> None:
    small, b = HandEngine(info=replace(INFO, n_ctx=20)), HandEngine()
    upstream = HandUpstream()
    fleet = HandFleet({"a": upstream if over_there else small, "b": b})
    async with Client(fleet_server(fleet)).chat(stream=stream, messages=LONG) as call:
        if over_there:
            upstream.fail(ContextExceeded("it holds 20"))
            await settle()
        b.admit()
        b.say("hello")
        b.finish()
        await call.task
        assert call.status == 200
    assert fleet.ends == [("a", ["refused"]), ("b", ["ok"])]


@on_loop
async def test_a_prompt_that_none_has_room_for_is_the_first_one_s_error() -> None:
    fleet = HandFleet({name: HandEngine(info=replace(INFO, n_ctx=n)) for name, n in (("a", 20), ("b", 30))})
    async with Client(fleet_server(fleet)).chat(messages=LONG) as call:
        await call.task
        assert (call.status, call.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "holds 20" in call.json()["error"]["message"]
    assert fleet.ends == [("a", ["refused"]), ("b", ["refused"])]


@on_loop
async def test_a_model_that_cannot_chat_leaves_it_to_one_that_can() -> None:
    b = HandEngine()
    fleet = HandFleet({"a": model(HandEngine(), template=None), "b": b})
    async with Client(fleet_server(fleet)).chat() as call:
        b.admit()
        b.finish()
        await call.task
        assert call.status == 200


@on_loop
async def test_the_prompt_of_an_engine_that_refused_is_not_booked() -> None:
    a, b = HandEngine(), HandEngine()
    a.refusal = Overloaded("full", reason="queue_full")
    shorter = "{% for m in messages %}{{ m.content }}{% endfor %}"
    async with Client(fleet_server(HandFleet({"a": a, "b": model(b, template=shorter)}))).chat() as call:
        b.admit()
        b.finish()
        await call.task
        assert call.json()["usage"]["prompt_tokens"] == len(b.generations[0].prompt)


@on_loop
async def test_a_fault_of_ours_says_nothing_good_of_the_engine() -> None:
    class Faulty(HandUpstream):
        async def prepare(self, ask: Ask, parsed: Any, rids: Iterator[int]) -> Work:
            raise RuntimeError("a bug")

    fleet = HandFleet({"a": Faulty()})
    async with Client(fleet_server(fleet)).chat() as call:
        await call.task
        assert call.status == 500
    assert fleet.ends == [("a", ["cancelled"])]


@pytest.mark.parametrize("stream", [True, False])
@on_loop
async def test_one_that_breaks_before_its_first_text_is_replaced_unseen(stream: bool) -> None:
    a, b, fleet = two()
    async with Client(fleet_server(fleet)).chat(stream=stream, headrace={"timings": True}) as call:
        a.admit(5)
        a.fail()
        await settle()
        assert call.sent == []
        b.admit(3)
        b.say("hello")
        b.finish(tokens=1)
        await call.task
        assert b"hello" in call.body
        assert call.status == 200
        assert b'"error"' not in call.body
        report = (call.events()[-2] if stream else call.json())["headrace"]["timeline"]
        assert [(one["engine"], one["end"], one["continued"]) for one in report["attempts"]] == [
            ("a", "failed", False),
            ("b", "running", False),
        ]
        assert report["cached_tokens"] == 3, "what the first one had cached does not count"
    assert a.cancelled == [], "it was over"
    assert fleet.ends == [("a", ["failed"]), ("b", ["ok"])]


@on_loop
async def test_text_that_was_not_written_yet_is_void() -> None:
    a, b, fleet = two()
    async with Client(fleet_server(fleet)).chat(stream=True) as call:
        a.admit()
        a.say("never seen")
        a.fail()
        await settle()
        b.admit()
        b.say("seen")
        b.finish()
        await call.task
        assert call.content() == "seen"


@on_loop
async def test_role_and_heartbeats_do_not_commit() -> None:
    clock = Hands()
    upstream, b = HandUpstream(), HandEngine()
    fleet = HandFleet({"a": upstream, "b": b})
    app = fleet_server(fleet, clock=clock, limits=StreamLimits(header_hold_s=1.0))
    async with Client(app).chat(stream=True) as call:
        await settle()
        assert upstream.sink is not None
        upstream.sink(Admitted(upstream.rid, 0, 0))
        upstream.relay("", raw=b'data: {"id":"theirs","choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n')
        await settle()
        assert call.sent == []
        clock.now += 1.0
        app.ticker.tick(clock.now)
        await settle()
        for _ in range(2):
            clock.now += 20.0
            app.ticker.tick(clock.now)
            await settle()
        assert call.body == COMMENT * 3
        upstream.sink(Broken(upstream.rid, UpstreamFailed("it broke off")))
        await settle()
        b.admit()
        b.say("hello")
        b.finish()
        await call.task
        assert call.content() == "hello"
        assert call.body.count(b'"role"') == 1
        assert b"theirs" not in call.body
        assert not errors(call)


@on_loop
async def test_without_another_engine_the_error_is_told() -> None:
    a = HandEngine()
    fleet = HandFleet({"a": a})
    async with Client(fleet_server(fleet)).chat(stream=True) as call:
        a.admit()
        a.fail()
        await call.task
        assert call.status == 500
    assert fleet.ends == [("a", ["failed"])]


@on_loop
async def test_a_silent_engine_is_replaced_after_its_time() -> None:
    a, b, fleet = two()
    fleet.timeouts["a"] = 0.001
    async with Client(fleet_server(fleet)).chat(stream=True) as call:
        a.admit()
        await until(lambda: bool(b.generations))
        b.admit()
        b.say("hello")
        b.finish()
        await call.task
        assert call.content() == "hello"
    assert a.cancelled == [1]
    assert fleet.ends == [("a", ["slow"]), ("b", ["ok"])]


@on_loop
async def test_a_silent_engine_is_better_than_none() -> None:
    a = HandEngine()
    fleet = HandFleet({"a": a})
    fleet.timeouts["a"] = 0.0
    async with Client(fleet_server(fleet)).chat(stream=True) as call:
        a.admit()
        for _ in range(100):
            await asyncio.sleep(0)
        a.say("late")
        a.finish()
        await call.task
        assert call.content() == "late"
    assert fleet.ends == [("a", ["ok"])]


@on_loop
async def test_a_whole_answer_of_another_server_is_not_slow_for_coming_in_one_piece() -> None:
    upstream, b = HandUpstream(), HandEngine()
    fleet = HandFleet({"a": upstream, "b": b})
    fleet.timeouts["a"] = 0.0
    async with Client(fleet_server(fleet)).chat() as call:
        for _ in range(100):
            await asyncio.sleep(0)
        assert upstream.cancelled == []
        upstream.relay("yes", raw=b'{"id":"theirs","choices":[]}', over=True)
        await call.task
        assert call.json()["id"] == "theirs"
    assert fleet.ends == [("a", ["ok"])]
    assert fleet.leases[0].texts == [], "how soon it spoke is not known"


@on_loop
async def test_a_whole_answer_of_ours_may_be_slow() -> None:
    _, b, fleet = two()
    fleet.timeouts["a"] = 0.0
    async with Client(fleet_server(fleet)).chat() as call:
        await until(lambda: bool(b.generations))
        b.admit()
        b.say("hello")
        b.finish()
        await call.task
    assert fleet.ends == [("a", ["slow"]), ("b", ["ok"])]
    assert len(fleet.leases[1].texts) == 1


# After it ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_an_engine_of_the_same_family_goes_on_from_the_exact_token() -> None:
    a, b, fleet = two()
    async with Client(fleet_server(fleet)).chat(stream=True, stream_options={"include_usage": True}) as call:
        a.admit(2)
        a.emit(Delta(a.rid, 0, "one ", 4, ids=tuple(b"one ")))
        await settle()
        assert call.content() == "one "
        a.fail()
        await settle()
        (going_on,) = b.generations
        assert going_on.resume == (tuple(b"one "),)
        assert going_on.sampling == a.generations[0].sampling, "it draws what the first one would have drawn"
        b.admit(4)
        b.emit(Delta(b.rid, 0, "two", 3, ids=tuple(b"two")))
        b.finish("stop", 8)
        await call.task
        assert call.content() == "one two"
        assert call.events()[-1] == "[DONE]"
        assert call.body.count(b'"role"') == 1
        assert len({event["id"] for event in call.events() if isinstance(event, dict)}) == 1
        assert call.events()[-2]["usage"]["completion_tokens"] == 8
    assert fleet.ends == [("a", ["failed"]), ("b", ["ok"])]


@pytest.mark.parametrize("families", [{"a": "x", "b": "y"}])
@on_loop
async def test_one_of_another_family_does_not(families: dict[str, str]) -> None:
    a, b, fleet = two(families=families)
    async with Client(fleet_server(fleet)).chat(stream=True) as call:
        a.admit()
        a.say("one ")
        await settle()
        a.fail()
        await call.task
        assert call.content() == "one "
        assert len(errors(call)) == 1
        assert b"[DONE]" not in call.body
    assert b.generations == []
    assert fleet.ends == [("a", ["failed"])]


@on_loop
async def test_one_that_goes_on_may_take_its_time() -> None:
    a, b, c = HandEngine(), HandEngine(), HandEngine()
    fleet = HandFleet({"a": a, "b": b, "c": c})
    fleet.timeouts["b"] = 0.0
    async with Client(fleet_server(fleet)).chat(stream=True) as call:
        a.admit()
        a.say("one ")
        await settle()
        a.fail()
        await settle()
        for _ in range(100):
            await asyncio.sleep(0)
        assert b.cancelled == []
        b.admit()
        b.say("two")
        b.finish("stop", 8)
        await call.task
        assert call.content() == "one two"
    assert fleet.ends == [("a", ["failed"]), ("b", ["ok"])]


@on_loop
async def test_what_a_relaying_server_began_goes_on_under_its_name() -> None:
    upstream, b = HandUpstream(), HandEngine()
    fleet = HandFleet({"a": upstream, "b": b})
    async with Client(fleet_server(fleet)).chat(stream=True) as call:
        upstream.relay("one ", identity=("theirs", 55))
        await settle()
        assert call.content() == "one "
        assert upstream.sink is not None
        upstream.sink(Broken(upstream.rid, UpstreamFailed("it broke off")))
        await settle()
        assert b.generations[0].resume == (tuple(b"one "),)
        b.admit()
        b.say("two")
        b.finish("stop", 8)
        await call.task
        assert call.content() == "one two"
        assert {event["id"] for event in call.events() if isinstance(event, dict)} == {"theirs"}
        assert call.events()[1]["created"] == 55
        assert b'"role"' not in call.body, "the other server's first chunk brought it, or none"
        assert call.body.endswith(b"data: [DONE]\n\n")


@on_loop
async def test_a_stop_string_that_was_shown_in_part_does_not_come_twice() -> None:
    upstream, b = HandUpstream(), HandEngine()
    fleet = HandFleet({"a": upstream, "b": b})
    async with Client(fleet_server(fleet)).chat(stream=True, stop=["END"]) as call:
        upstream.relay("go E", identity=("theirs", 55))
        await settle()
        assert upstream.sink is not None
        upstream.sink(Broken(upstream.rid, UpstreamFailed("it broke off")))
        await settle()
        b.admit()
        b.say("Ex")  # the engine held the E back and lets it go now
        b.finish("stop", 6)
        await call.task
        assert call.content() == "go Ex"


@on_loop
async def test_what_did_not_come_twice_is_not_told_twice() -> None:
    upstream, b, c = HandUpstream(), HandEngine(), HandEngine()
    fleet = HandFleet({"a": upstream, "b": b, "c": c})
    async with Client(fleet_server(fleet)).chat(stream=True, stop=["END"]) as call:
        upstream.relay("go E", identity=("theirs", 55))
        await settle()
        upstream.fail()
        await settle()
        b.admit()
        b.say("Ex ")
        await settle()
        b.fail()
        await settle()
        assert c.generations[0].resume == (tuple(b"go Ex "),)
        c.admit()
        c.finish("stop", 6)
        await call.task
        assert call.content() == "go Ex "


@on_loop
async def test_an_answer_that_is_more_than_text_is_not_continued() -> None:
    upstream, b = HandUpstream(), HandEngine()
    fleet = HandFleet({"a": upstream, "b": b})
    async with Client(fleet_server(fleet)).chat(stream=True) as call:
        upstream.relay("a call", content=None)
        await settle()
        assert upstream.sink is not None
        upstream.sink(Broken(upstream.rid, UpstreamFailed("it broke off")))
        await call.task
        assert [error["code"] for error in errors(call)] == ["upstream_failed"]
    assert b.generations == []


@on_loop
async def test_a_client_that_leaves_does_not_wait_for_who_would_continue() -> None:
    class Asking(HandUpstream):
        given_up = False

        async def prepare(self, ask: Ask, parsed: Any, rids: Iterator[int]) -> Work:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.given_up = True
                raise
            raise AssertionError

    a, b = HandEngine(), Asking()
    fleet = HandFleet({"a": a, "b": b})
    async with Client(fleet_server(fleet)).chat(stream=True) as call:
        a.admit()
        a.say("one")
        await settle()
        a.fail()
        await settle()
        call.hang_up()
        await call.task
    assert b.given_up
    assert fleet.ends == [("a", ["failed"]), ("b", ["cancelled"])]


@on_loop
async def test_a_client_that_leaves_ends_the_attempt() -> None:
    a, _, fleet = two()
    app = fleet_server(fleet)
    async with Client(app).chat(stream=True) as call:
        a.admit()
        a.say("x")
        await settle()
        call.hang_up()
        await call.task
    assert a.cancelled == [1]
    assert fleet.ends == [("a", ["cancelled"])]
    assert app.running == 0


# Relayed answers ──────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_bytes_pass_through_and_the_other_server_s_count_is_booked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger=LOGGER)
    upstream = HandUpstream()
    async with Client(fleet_server(HandFleet({"a": upstream}))).chat(stream=True) as call:
        upstream.relay("one ")
        await settle()
        upstream.relay("two")
        await settle()
        upstream.over()
        await call.task
        assert call.content() == "one two"
        assert call.body.endswith(b'"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
    assert '"prompt_tokens":9' in caplog.text
    assert '"completion_tokens":2' in caplog.text
    assert '"engine":"a"' in caplog.text


@on_loop
async def test_the_timeline_comes_in_a_chunk_of_its_own() -> None:
    upstream = HandUpstream()
    async with Client(fleet_server(HandFleet({"a": upstream}))).chat(stream=True, headrace={"timings": True}) as call:
        upstream.relay("one")
        upstream.over()
        await call.task
        *_, last, done = call.events()
        assert done == "[DONE]"
        assert last["choices"] == []
        assert last["headrace"]["timeline"]["ttft"] >= 0


@pytest.mark.parametrize("timings", [False, True])
@on_loop
async def test_who_asked_for_the_usage_gets_ours_if_the_other_server_does_not_count(timings: bool) -> None:
    upstream = HandUpstream()
    asked: dict[str, Any] = {"stream_options": {"include_usage": True}, "headrace": {"timings": timings}}
    async with Client(fleet_server(HandFleet({"a": upstream}))).chat(stream=True, **asked) as call:
        upstream.relay("one ", identity=("theirs", 55))
        upstream.relay("two")
        upstream.over(usage=None)
        await call.task
        *_, usage, done = call.events()
        assert (usage["id"], usage["created"], usage["choices"], done) == ("theirs", 55, [], "[DONE]")
        assert usage["usage"]["completion_tokens"] == 2
        assert call.body.count(b'"completion_tokens"') == 1


@on_loop
async def test_usage_that_the_other_server_told_does_not_come_twice() -> None:
    upstream = HandUpstream()
    asked: dict[str, Any] = {"stream_options": {"include_usage": True}}
    async with Client(fleet_server(HandFleet({"a": upstream}))).chat(stream=True, **asked) as call:
        upstream.relay("one")
        upstream.over()  # its bytes, a chunk with the usage among them, are another one's matter
        await call.task
        assert b'"usage"' not in call.body


@on_loop
async def test_a_whole_body_is_passed_on() -> None:
    upstream = HandUpstream()
    async with Client(fleet_server(HandFleet({"a": upstream}))).chat(headrace={"timings": True}) as call:
        upstream.relay("yes", raw=b'{"id":"theirs","choices":[]}\n', over=True)
        await call.task
        assert call.status == 200
        answer = call.json()
        assert answer["id"] == "theirs"
        assert answer["headrace"]["timeline"]["ttft"] >= 0


@on_loop
async def test_an_answer_is_drawn_in_one_way_though_engines_differ_in_their_own() -> None:
    a, b, c = HandEngine(), HandEngine(), HandUpstream()
    ours = {"a": model(a, sampling=Sampling(temperature=0.2)), "b": model(b, sampling=Sampling(temperature=0.9))}
    fleet = HandFleet({**ours, "c": c})
    async with Client(fleet_server(fleet)).chat(stream=True, top_p=0.5) as call:
        a.admit()
        a.emit(Delta(a.rid, 0, "one ", 4, ids=tuple(b"one ")))
        await settle()
        a.fail()
        await settle()
        began, goes_on = a.generations[0].sampling, b.generations[0].sampling
        assert (began.temperature, began.top_p) == (0.2, 0.5)
        assert goes_on == began
        b.admit()
        b.fail()
        await settle()
        assert c.asks[-1].sampling == began, "who is no engine of ours can say it too"
        c.relay("two")
        c.over()
        await call.task


@on_loop
async def test_who_begins_anew_draws_in_its_own_way() -> None:
    a, b = HandEngine(), HandEngine()
    fleet = HandFleet({"a": model(a, sampling=Sampling(temperature=0.2)), "b": model(b, sampling=Sampling(top_k=40))})
    async with Client(fleet_server(fleet)).chat(stream=True) as call:
        a.admit()
        a.fail()
        await settle()
        sampling = b.generations[0].sampling
        assert (sampling.temperature, sampling.top_k) == (1.0, 40), "nobody has seen a word of the first one"
        b.admit()
        b.say("x")
        b.finish()
        await call.task
