"""Every way a stream can end, and what is left behind: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headrace.server.stream import StreamLimits
from server.asgi_driver import Call, Client, on_loop, settle
from server.hand_engine import HandEngine, Hands, clean, server

COMMENT = b": hb\n\n"


# Failure ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("code", "status"), [("overloaded", 503), ("engine_failed", 500)])
@pytest.mark.parametrize("stream", [True, False])
@on_loop
async def test_a_failure_before_the_first_text_is_an_honest_status(code: str, status: int, stream: bool) -> None:
    engine = HandEngine()
    app = server(engine)
    async with Client(app).chat(stream=stream) as call:
        engine.admit()
        engine.fail(code, "it did not work")
        await call.task
        assert call.status == status
        assert call.headers["content-type"] == "application/json"
        assert call.json()["error"]["message"] == "it did not work"
        assert call.json()["error"]["code"] == code
        assert ("retry-after" in call.headers) == (status == 503)
    clean(app, engine)


@on_loop
async def test_a_failure_in_the_middle_ends_the_stream_with_one_error() -> None:
    engine = HandEngine()
    app = server(engine)
    async with Client(app).chat(stream=True) as call:
        for text in "abcde":
            engine.say(text)
            await settle()
        engine.fail(message="the engine broke")
        await call.task
        *chunks, error = call.events()
        assert call.content() == "abcde"
        assert error["error"]["message"] == "the engine broke"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert b"[DONE]" not in call.body
        assert call.ended
    clean(app, engine)


@on_loop
async def test_text_that_came_with_the_failure_goes_first() -> None:
    engine = HandEngine()
    async with Client(server(engine)).chat(stream=True) as call:
        engine.say("a")
        await settle()
        engine.say("b")
        engine.fail()
        await call.task
        assert call.content() == "ab"
        assert "error" in call.events()[-1]
        assert len(call.writes) == 2


@on_loop
async def test_one_failed_prompt_ends_them_all() -> None:
    engine = HandEngine()
    app = server(engine)
    async with Client(app).complete(prompt=["a", "b"], stream=True) as call:
        engine.say("x", rid=engine.generations[0].rid)
        await settle()
        engine.fail()
        await call.task
        assert engine.cancelled == [engine.generations[0].rid]
    clean(app, engine)


@on_loop
async def test_a_fault_of_ours_in_the_middle_is_one_error_event(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = HandEngine()
    app = server(engine)
    async with Client(app).chat(stream=True) as call:
        engine.say("a")
        await settle()

        words = "the user's words"

        def broken(*args: Any) -> bytes:
            raise ValueError(words)

        monkeypatch.setattr("headrace.protocol.answer.ChatAnswer.delta", broken)
        engine.say("b")
        await call.task
        assert call.events()[-1]["error"]["code"] == "internal_error"
        assert call.ended
        assert words.encode() not in call.body
    assert "ValueError" in caplog.text
    assert "broken" in caplog.text, "the log says where"
    assert words not in caplog.text
    clean(app, engine)


# Leaving ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def queued(engine: HandEngine) -> None: ...


def admitted(engine: HandEngine) -> None:
    engine.admit()


def decoding(engine: HandEngine) -> None:
    engine.admit()
    engine.say("a")


@pytest.mark.parametrize("stage", [queued, admitted, decoding])
@pytest.mark.parametrize("stream", [True, False])
@on_loop
async def test_a_client_that_leaves_stops_the_engine(stage: Callable[[HandEngine], None], stream: bool) -> None:
    engine = HandEngine()
    app = server(engine)
    async with Client(app).chat(stream=stream) as call:
        stage(engine)
        await settle()
        sent = len(call.sent)
        call.hang_up()
        await settle(3)
        assert engine.cancelled == [engine.rid]
        await call.task
        assert len(call.sent) == sent
    clean(app, engine)
    assert 'outcome="cancelled",route="/v1/chat/completions"} 1.0' in app.metrics.render().decode()


@on_loop
async def test_two_hundred_clients_leave_before_anything_was_read() -> None:
    engine = HandEngine()
    app = server(engine)
    before = len(asyncio.all_tasks())
    for _ in range(200):
        call = Client(app).chat(stream=True)
        call.hang_up()
        await call.task
    await settle()
    assert len(asyncio.all_tasks()) == before
    clean(app, engine)


@on_loop
async def test_a_send_that_fails_is_a_client_that_left() -> None:
    engine = HandEngine()
    app = server(engine)
    async with Client(app).chat(stream=True) as call:
        engine.say("a")
        await settle()
        call.broken = BrokenPipeError()
        engine.say("b")
        await call.task
        assert engine.cancelled == [engine.rid]
    clean(app, engine)


class Scripted:
    """Plays a stream step by step; the sweep below cancels after each step."""

    def __init__(self, engine: HandEngine, call: Call) -> None:
        self.steps: list[Callable[[], None]] = [
            lambda: None,
            engine.admit,
            lambda: engine.say("a"),
            lambda: engine.say("b"),
            call.gate.clear,
            lambda: engine.say("c"),
            call.gate.set,
            lambda: engine.finish("stop", 3),
        ]


@pytest.mark.parametrize("way", ["cancel", "hang up"])
@on_loop
async def test_ending_at_every_step_leaves_nothing_behind(way: str) -> None:
    """n-th step, m-th turn of the loop: the task is cancelled, or the client leaves, there."""
    finished = False
    for step in range(9):
        for turns in range(8):
            engine = HandEngine()
            app = server(engine)
            async with Client(app).chat(stream=True) as call:
                for act in Scripted(engine, call).steps[:step]:
                    act()
                    await settle()
                await settle(turns)
                finished = call.task.done()
                if way == "cancel":
                    call.task.cancel()
                else:
                    call.hang_up()
                await asyncio.wait((call.task,))
                await settle()
                clean(app, engine)
    assert finished, "the sweep came to the stream's own end"


@on_loop
async def test_cancelling_at_the_start_of_a_request_leaves_nothing_behind() -> None:
    for turns in range(12):
        engine = HandEngine()
        app = server(engine)
        call = Client(app).chat(stream=True)
        await settle(turns)
        call.task.cancel()
        await asyncio.wait((call.task,))
        await settle()
        clean(app, engine)


# Slow readers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_a_slow_reader_parks_its_sequence_and_loses_nothing() -> None:
    engine = HandEngine()
    app = server(engine, limits=StreamLimits(max_pending_events=8))
    async with Client(app).chat(stream=True) as call:
        engine.say("0")
        await settle()
        call.gate.clear()
        said = "0"
        for number in range(1, 100):
            if engine.rid in engine.paused:
                break
            engine.say(str(number))
            said += str(number)
            await settle()
        assert engine.paused == {engine.rid}
        assert number <= 10
        call.gate.set()
        await settle()
        assert engine.paused == set()
        assert call.content() == said
        assert engine.told == [("pause", engine.rid), ("resume", engine.rid)]


@pytest.mark.parametrize("extension", [True, False])
@on_loop
async def test_a_reader_that_takes_nothing_is_dropped(extension: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine, clock = HandEngine(), Hands()
    app = server(engine, clock=clock, limits=StreamLimits(write_timeout_s=60.0))
    aborted: list[Call] = []

    def abort() -> None:
        aborted.append(call)
        call.hang_up()

    client = Client(app, extensions={"headrace.abort": abort} if extension else None)
    async with client.chat(stream=True) as call:
        engine.say("a")
        await settle()
        call.gate.clear()
        engine.say("b")
        await settle()
        assert call.blocked == 1
        app.ticker.tick(clock.now + 59.9)
        await settle()
        assert engine.cancelled == []
        app.ticker.tick(clock.now + 60.0)
        await asyncio.wait((call.task,))
        assert engine.cancelled == [engine.rid]
        assert call.task.exception() is None
        assert aborted == ([call] if extension else [])
    clean(app, engine)
    assert "took nothing for 60 s" in caplog.text
    assert 'outcome="cancelled"' in app.metrics.render().decode()


@on_loop
async def test_a_blocked_stream_gets_no_heartbeats() -> None:
    engine, clock = HandEngine(), Hands()
    app = server(engine, clock=clock)
    async with Client(app).chat(stream=True) as call:
        engine.say("a")
        await settle()
        call.gate.clear()
        engine.say("b")
        await settle()
        for seconds in range(0, 59):
            app.ticker.tick(clock.now + seconds)
            await settle(3)
        call.gate.set()
        await settle()
        assert COMMENT not in call.body
