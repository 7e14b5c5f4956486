"""Readers: each at its own pace, none in another's way."""

from __future__ import annotations

from headrace.server.exchange import ABORT, CHANNEL
from headrace.server.reader import Reader
from headrace.server.stream import StreamLimits
from headrace.server.streams import LogLimits
from server.asgi_driver import Call, Client, on_loop, settle
from server.hand_engine import HandEngine, Hands
from server.log_servers import RESUME, data, nothing_left, one, text


class HandChannel:
    """Writes to the call it belongs to while it is open."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.open = True
        self.written = 0

    def ready(self) -> bool:
        return self.open

    def write(self, body: bytes) -> None:
        assert self.call is not None
        self.written += 1
        self.call.sent.append({"type": "http.response.body", "body": body, "more_body": True})


def tick(server: object, clock: Hands, seconds: float) -> None:
    clock.now += seconds
    server.app.ticker.tick(clock.now)  # type: ignore[attr-defined]


@on_loop
async def test_a_reader_that_keeps_up_gets_each_event_without_a_detour_and_one_that_does_not_gets_all() -> None:
    server, channel = one(), HandChannel()
    engine = server.engine
    client = Client(server.app, extensions={CHANNEL: channel})
    async with client.chat(stream=True, headrace=RESUME) as call:
        channel.call = call
        engine.say("a")
        await settle()
        for number in range(20):
            channel.open = number % 3 != 0
            engine.say(f"{number} ")
            if number % 2:
                await settle()
        await settle()
        assert channel.written > 0
        id = call.headers["x-headrace-stream"]
        engine.finish("stop", 21)
        await call.task
        async with server.get(id) as again:
            await again.task
        assert data(again.body) == data(call.body)
        assert text(call.body) == "a" + "".join(f"{number} " for number in range(20))
    server.app.resuming.streams.close()


@on_loop
async def test_a_slow_reader_holds_up_nobody_and_is_dropped() -> None:
    clock = Hands()
    server = one(clock=clock, limits=StreamLimits(write_timeout_s=60, heartbeat_s=1000))
    aborted = []

    def abort() -> None:
        aborted.append(True)
        slow.hang_up()

    slow = Client(server.app, extensions={ABORT: abort}).chat(stream=True, headrace=RESUME)
    async with slow:
        server.engine.say("a")
        await settle()
        id = slow.headers["x-headrace-stream"]
        async with server.get(id) as quick:
            slow.gate.clear()
            for _ in range(1000):
                server.engine.say("b" * 1000)
                await settle(1)
            await settle()
            assert text(quick.body).count("b") == 10**6
            assert server.engine.paused == set()
            tick(server, clock, 59)
            assert not aborted
            tick(server, clock, 2)
            await slow.task
            assert aborted == [True]
            server.engine.finish()
            await quick.task
    assert server.app.metrics.streams.readers == 0
    server.app.resuming.streams.close()


@on_loop
async def test_one_that_is_too_slow_for_what_is_kept_is_told() -> None:
    server = one(log_limits=LogLimits(max_bytes=5000))
    async with server.chat() as slow:
        server.engine.say("a")
        await settle()
        slow.gate.clear()
        for _ in range(100):
            server.engine.say("b" * 100)
            await settle(1)
        slow.gate.set()
        await settle()
        assert slow.ended
        assert slow.body.count(b'"error"') == 1
        assert b'"code":"gone"' in slow.body
        assert server.app.running == 1, "the generation goes on"
        id = slow.headers["x-headrace-stream"]
        async with server.get(id, 0) as late:
            await late.task
        assert (late.status, late.json()["error"]["code"]) == (410, "gone")
        server.engine.finish()
        await settle()
    server.app.resuming.streams.close()


@on_loop
async def test_a_silent_stream_beats_without_an_empty_line() -> None:
    clock = Hands()
    server = one(clock=clock, limits=StreamLimits(heartbeat_s=15))
    async with server.chat() as call:
        server.engine.say("a")
        await settle()
        before = call.body
        for _ in range(3):
            tick(server, clock, 15)
            await settle()
        assert call.body == before + b": hb\n" * 3
        server.engine.say("b")
        server.engine.finish()
        await call.task
        assert text(call.body) == "ab"
    server.app.resuming.streams.close()


@on_loop
async def test_a_silent_reader_is_left_alone_until_its_heartbeat_which_wakes_no_task() -> None:
    clock = Hands()
    server, channel = one(clock=clock, limits=StreamLimits(heartbeat_s=15, write_timeout_s=60)), HandChannel()
    ticker = server.app.ticker
    async with Client(server.app, extensions={CHANNEL: channel}).chat(stream=True, headrace=RESUME) as call:
        channel.call = call
        (reader,) = (member for member in ticker._where if isinstance(member, Reader))
        assert reader.tick(clock.now) == clock.now + 15, "it has no head"
        server.engine.say("a")
        await settle()
        begun, before = clock.now, call.body
        clock.now += 3
        assert reader.tick(clock.now) == begun + 15
        clock.now += 12
        assert reader.tick(clock.now) == clock.now + 15
        assert call.body == before + b": hb\n"
        channel.open = False
        clock.now += 15
        assert reader.tick(clock.now) is None
        call.gate.clear()
        await settle()
        assert reader.tick(clock.now + 1) == clock.now + 16, "what begins now is due by then"
        clock.now += 59
        assert reader.tick(clock.now) == clock.now + 1
        call.gate.set()
        await settle()
        assert call.body == before + b": hb\n" * 2
        server.engine.finish()
        await call.task
    server.app.resuming.streams.close()


@on_loop
async def test_a_head_that_comes_without_text_brings_a_comment() -> None:
    clock = Hands()
    server = one(clock=clock, limits=StreamLimits(header_hold_s=1))
    async with server.chat() as call:
        server.engine.admit()
        await settle()
        assert call.status is None
        tick(server, clock, 1)
        await settle()
        assert [call.status] == [200]
        assert call.body == b": hb\n"
        server.engine.say("a")
        server.engine.finish()
        await call.task
        assert text(call.body) == "a"
    server.app.resuming.streams.close()


@on_loop
async def test_nothing_is_left_when_all_has_ended_and_expired() -> None:
    clock = Hands()
    engine = HandEngine()
    server = one(clock=clock, engine=engine, log_limits=LogLimits(keep_s=10))
    async with server.chat() as call:
        engine.say("a")
        await settle()
        async with server.get(call.headers["x-headrace-stream"]) as other:
            other.hang_up()
            await other.task
        engine.finish()
        await call.task
    clock.now += 11
    server.app.resuming.streams.sweep(clock.now)
    await settle()
    nothing_left(server)
    server.app.resuming.streams.close()


@on_loop
async def test_a_stream_that_ends_before_its_reader_s_place_says_so() -> None:
    server = one()
    async with server.chat() as call:
        server.engine.say("abc")
        await settle()
        async with server.get(call.headers["x-headrace-stream"], 40) as ahead:
            server.engine.finish()
            await call.task
            await ahead.task
    assert ahead.status == 200
    assert ahead.body.count(b'"code":"gone"') == 1
    assert b"[DONE]" not in ahead.body
    server.app.resuming.streams.close()
