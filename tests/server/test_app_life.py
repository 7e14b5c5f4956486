"""What an application keeps of its requests, and how it comes to an end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from headrace.core.errors import Draining
from headrace.server.attempts import LONG_BODY
from headrace.server.stream import StreamLimits
from server.asgi_driver import Call, Client, on_loop, settle
from server.hand_engine import INFO, HandEngine, Hands, server


def envelope(call: Call) -> dict[str, Any]:
    """The error; whole, typed and of the right length."""
    assert call.headers["content-type"] == "application/json"
    assert int(call.headers["content-length"]) == len(call.body)
    assert call.ended
    error = call.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


# Accounting ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_every_request_is_one_line_without_content(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="headrace.access")
    engine = HandEngine()
    app = server(engine)
    async with Client(app).chat(
        stream=True, user="secret-user", messages=[{"role": "user", "content": "secret"}]
    ) as call:
        engine.admit(2)
        engine.say("secret")
        engine.finish("stop", 3)
        await call.task
    async with Client(app).get("/secret") as call:
        pass
    async with Client(app).chat(model="secret") as call:
        pass
    lines = [msgspec.json.decode(record.getMessage()) for record in caplog.records]
    assert "secret" not in caplog.text
    assert [(line["path"], line["status"], line["outcome"], line["model"]) for line in lines] == [
        ("/v1/chat/completions", 200, "ok", "m"),
        ("other", 404, "invalid", None),
        ("/v1/chat/completions", 404, "invalid", "other"),
    ]
    first = lines[0]
    assert first["stream"] is True
    assert (first["cached_tokens"], first["completion_tokens"]) == (2, 3)
    assert first["prompt_tokens"] == len(engine.generations[0].prompt)
    assert first["request_id"] == "id1"


@on_loop
async def test_names_from_outside_make_no_series() -> None:
    engine = HandEngine()
    app = server(engine)

    def series() -> int:
        return sum(not line.startswith(b"#") for line in app.metrics.render().splitlines())

    async with Client(app).get("/x"), Client(app).chat(model="x"):
        pass
    before = series()
    for number in range(100):
        name = f"n{number}"
        async with Client(app).call(f"M{number}", f"/{name}", headers=[(b"x-request-id", name.encode())]):
            pass
        async with Client(app).chat(model=name, user=name):
            pass
    assert series() == before


@on_loop
async def test_a_request_uses_the_id_seed_and_order_it_is_given() -> None:
    engine = HandEngine()
    app = server(engine)
    for seed, used in ((None, 42), (7, 7)):
        async with Client(app).chat(seed=seed) as call:
            engine.finish()
            await call.task
            assert engine.generations[-1].sampling.seed == used
    assert [generation.rid for generation in engine.generations] == [1, 2]


@on_loop
async def test_one_request_id_on_many_requests_crosses_nothing() -> None:
    engine = HandEngine()
    app = server(engine)
    same = [(b"x-request-id", b"same")]
    calls = [Client(app).chat(headers=same, stream=True) for _ in range(20)]
    await settle()
    calls[7].hang_up()
    await settle()
    assert engine.cancelled == [engine.generations[7].rid]
    for number, generation in enumerate(engine.generations):
        engine.say(str(number), rid=generation.rid)
        engine.finish(rid=generation.rid)
    for number, call in enumerate(calls):
        await call.task
        if number != 7:
            assert call.content() == str(number)
            assert call.headers["x-request-id"] == "same"


@on_loop
async def test_a_long_body_is_parsed_elsewhere_with_the_same_result() -> None:
    engine = HandEngine(info=msgspec.structs.replace(INFO, n_ctx=10**6))
    app = server(engine)
    async with Client(app).chat(messages=[{"role": "user", "content": "x" * LONG_BODY}]) as call:
        for _ in range(1000):
            if engine.generations:
                break
            await asyncio.wait((call.task,), timeout=0.01)
        engine.finish()
        await call.task
        assert call.status == 200
    async with Client(app).chat(n=0, user="x" * LONG_BODY) as call:
        await call.task
        assert call.status == 400
    app.close()


# Draining ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    engine = HandEngine()
    app = server(engine)
    async with Client(app).chat(stream=True) as running:
        engine.say("a")
        await settle()
        app.drain()
        quiet = asyncio.create_task(app.quiet())
        async with Client(app).chat(stream=True) as late:
            assert late.status == 503
            assert late.headers["connection"] == "close"
            assert int(late.headers["retry-after"]) >= 1
            assert envelope(late)["code"] == "draining"
        assert not quiet.done()
        engine.say("b")
        engine.finish()
        await running.task
        assert running.content() == "ab"
        await quiet
    assert app.running == 0


@on_loop
async def test_an_idle_server_is_quiet_at_once() -> None:
    app = server(HandEngine())
    app.drain()
    await app.quiet()


@on_loop
async def test_what_does_not_finish_in_time_gets_one_error() -> None:
    engine = HandEngine()
    app = server(engine)
    async with (
        Client(app).chat(stream=True) as begun,
        Client(app).chat(stream=True) as held,
        Client(app).chat() as whole,
    ):
        engine.say("a", rid=engine.generations[0].rid)
        await settle()
        app.drain()
        app.fail_all(Draining("shutting down"))
        await app.quiet()
        await asyncio.gather(begun.task, held.task, whole.task)
        assert begun.status == 200
        assert begun.events()[-1]["error"]["code"] == "draining"
        assert begun.ended
        assert [held.status, whole.status] == [503, 503]
    assert len(engine.cancelled) == 3


@pytest.mark.parametrize("stream", [True, False])
@on_loop
async def test_a_request_that_waits_too_long_is_refused_before_anything_is_sent(stream: bool) -> None:
    engine, clock = HandEngine(), Hands()
    app = server(engine, clock=clock, limits=StreamLimits(queue_timeout_s=30.0))
    async with Client(app).chat(stream=stream) as call:
        await settle()
        app.ticker.tick(clock.now + 29.9)
        await settle()
        assert call.sent == []
        app.ticker.tick(clock.now + 30.0)
        await call.task
        assert call.status == 503
        assert envelope(call)["code"] == "overloaded"
        assert b'reason="queue_timeout"} 1.0' in app.metrics.render()
        assert int(call.headers["retry-after"]) >= 1
        assert engine.cancelled == [engine.rid]
    assert len(app.ticker) == 0


@on_loop
async def test_an_admitted_request_is_not_refused_for_waiting() -> None:
    engine, clock = HandEngine(), Hands()
    app = server(engine, clock=clock, limits=StreamLimits(queue_timeout_s=30.0))
    async with Client(app).chat() as call:
        engine.admit(0)
        await settle()
        app.ticker.tick(clock.now + 300.0)
        await settle()
        assert engine.cancelled == []
        engine.say("late")
        engine.finish("stop", 1)
        await call.task
        assert call.status == 200
