"""The short way of a chunk: from the engine's sink to the socket in one call, and never out of order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from headrace.protocol.sse import COMMENT
from headrace.server.exchange import CHANNEL
from headrace.server.stream import StreamLimits
from server.asgi_driver import Call, Client, on_loop, settle
from server.hand_engine import HandEngine, Hands, server
from server.hand_fleet import HandFleet, fleet_server
from server.hand_upstream import HandUpstream
from server.socket_client import on_uvloop, serving, until


@dataclass
class HandChannel:
    """Writes into the call's own record, so that both ways are seen in their order."""

    call: Call | None = None
    open: bool = True
    written: list[bytes] = field(default_factory=list)

    def ready(self) -> bool:
        return self.open

    def write(self, body: bytes) -> None:
        assert self.open
        assert self.call is not None
        assert self.call.sent, "before the head"
        self.written.append(body)
        self.call.sent.append({"type": "http.response.body", "body": body, "more_body": True})


@on_loop
async def test_text_of_a_begun_stream_is_written_before_the_sink_returns() -> None:
    engine, channel = HandEngine(), HandChannel()
    app = server(engine)
    async with Client(app, extensions={CHANNEL: channel}).chat(stream=True) as call:
        channel.call = call
        engine.admit()
        engine.say("a")
        assert channel.written == [], "the head goes first"
        await settle()
        engine.say("b")
        assert len(channel.written) == 1
        assert call.content() == "ab"
        engine.say("c")
        engine.finish("stop", 4)
        await call.task
        assert call.content() == "abc"
        assert call.ended
        assert call.events()[-1] == "[DONE]"
    text = app.metrics.render().decode()
    assert "headrace_inter_token_seconds_count 2.0" in text, "both gaps are counted, whichever way a chunk took"


@on_loop
async def test_an_answer_that_was_relayed_and_goes_on_here_ends_as_ours() -> None:
    upstream, engine, channel = HandUpstream(), HandEngine(), HandChannel()
    app = fleet_server(HandFleet({"a": upstream, "b": engine}))
    asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    async with Client(app, extensions={CHANNEL: channel}).chat(**asked) as call:
        channel.call = call
        upstream.relay("one ", identity=("theirs", 55))
        await settle()
        upstream.fail()
        await settle()
        engine.admit()
        await settle()
        engine.say("two")
        assert len(channel.written) == 1, "the short way"
        engine.finish("stop", 8)
        await call.task
        *_, usage, done = call.events()
        assert (usage["id"], usage["usage"]["completion_tokens"], done) == ("theirs", 8, "[DONE]")


@on_loop
async def test_a_reader_that_does_not_keep_up_gets_everything_the_long_way() -> None:
    engine, channel = HandEngine(), HandChannel()
    async with Client(server(engine), extensions={CHANNEL: channel}).chat(stream=True) as call:
        channel.call = call
        engine.say("a")
        await settle()
        channel.open = False
        engine.say("b")
        channel.open = True
        engine.say("c")  # b waits to be taken: c must not overtake it
        assert channel.written == []
        await settle()
        engine.say("d")
        assert len(channel.written) == 1
        engine.finish()
        await call.task
        assert call.content() == "abcd"


@on_loop
async def test_a_heartbeat_that_is_due_goes_before_the_text() -> None:
    engine, channel, clock = HandEngine(), HandChannel(), Hands()
    app = server(engine, clock=clock, limits=StreamLimits(heartbeat_s=15.0))
    async with Client(app, extensions={CHANNEL: channel}).chat(stream=True) as call:
        channel.call = call
        engine.say("a")
        await settle()
        clock.now += 14.0
        engine.say("b")
        clock.now += 14.0
        app.ticker.tick(clock.now)
        await settle()
        assert b": hb" not in call.body, "a chunk that went the short way is a sign of life too"
        clock.now += 2.0
        app.ticker.tick(clock.now)
        await settle()
        assert call.body.endswith(b": hb\n\n")
        engine.finish()
        await call.task


@pytest.mark.parametrize("seed", range(20))
@on_loop
async def test_the_order_is_kept_whatever_the_reader_does(seed: int) -> None:
    rng = random.Random(seed)
    engine, channel = HandEngine(), HandChannel()
    async with Client(server(engine), extensions={CHANNEL: channel}).chat(stream=True, n=2) as call:
        channel.call = call
        said = ["", ""]
        for number in range(200):
            index = rng.randrange(2)
            said[index] += f"{number} "
            engine.say(f"{number} ", index=index)
            channel.open = rng.random() < 0.7
            if rng.random() < 0.5:
                await settle(rng.randrange(1, 12))
        for index in (0, 1):
            engine.finish(index=index)
        await call.task
        assert [call.content(0), call.content(1)] == said
        assert channel.written, "some went the short way"


@on_uvloop
async def test_over_a_socket_each_chunk_is_one_well_formed_piece() -> None:
    engine = HandEngine()
    async with serving(server(engine)) as running:
        connection = await running.connect()
        await connection.chat(stream=True)
        await until(lambda: bool(engine.generations))
        for number in range(50):
            engine.say(f"{number} ")
            await settle(3)
        engine.finish("stop", 50)
        status, _ = await connection.head()
        assert status == 200
        body = b""
        while piece := await connection.chunk():
            body += piece
        events = [msgspec.json.decode(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
        text = "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
        assert text == "".join(f"{number} " for number in range(50))
        assert body.endswith(b"data: [DONE]\n\n")


@on_loop
async def test_a_heartbeat_is_written_without_waking_the_stream() -> None:
    engine, channel, clock = HandEngine(), HandChannel(), Hands()
    app = server(engine, clock=clock, limits=StreamLimits(heartbeat_s=10.0))
    async with Client(app, extensions={CHANNEL: channel}).chat(stream=True) as call:
        channel.call = call
        engine.admit()
        engine.say("a")
        await settle()
        clock.now += 9.0
        app.ticker.tick(clock.now)
        assert channel.written == []
        clock.now += 1.0
        app.ticker.tick(clock.now)
        assert channel.written == [COMMENT]
        app.ticker.tick(clock.now)
        assert channel.written == [COMMENT], "the next one is due ten seconds later"
        channel.open = False
        clock.now += 10.0
        app.ticker.tick(clock.now)
        assert channel.written == [COMMENT]
        await settle()
        assert call.writes[-1] == COMMENT, "it went the long way"
        engine.finish()
        await call.task
        assert call.events()[-1] == "[DONE]"
