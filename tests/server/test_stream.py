"""Streams over the whole application, in memory: the wire and time by hand. How they end: test_stream_ends."""

from __future__ import annotations

import pytest

from headrace.core.events import Delta, Marks, TokenLogprob
from headrace.server.stream import MAX_HELD, StreamLimits
from server.asgi_driver import Client, on_loop, settle
from server.hand_engine import HandEngine, Hands, clean, server

COMMENT = b": hb\n\n"
MARKS = Marks(0, 0, 0, 0, 0)


# The wire ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_a_stream_from_end_to_end() -> None:
    engine = HandEngine()
    app = server(engine)
    async with Client(app).chat(stream=True, stream_options={"include_usage": True}) as call:
        assert call.sent == [], "nothing before the first text"
        engine.admit(4)
        await settle()
        assert call.sent == []
        engine.say("Hel")
        await settle()
        assert len(call.sent) == 2
        assert call.status == 200
        engine.say("lo")
        await settle()
        engine.finish("stop", 3)
        await call.task
        assert [message["more_body"] for message in call.sent[1:]] == [True, True, False]
        *chunks, usage, done = call.events()
        assert done == "[DONE]"
        assert {chunk["id"] for chunk in [*chunks, usage]} == {"chatcmpl-id2"}
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
            {"role": "assistant", "content": "Hel"}, {"content": "lo"}, {},
        ]  # fmt: skip
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 3
        assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        assert usage["usage"]["prompt_tokens"] == len(engine.generations[0].prompt)
    clean(app, engine)


@on_loop
async def test_the_head_of_a_stream() -> None:
    engine = HandEngine()
    async with Client(server(engine), headers=[(b"accept-encoding", b"gzip, br")]).chat(stream=True) as call:
        engine.say("a", marks=MARKS)
        await settle()
        headers = call.headers
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert headers["cache-control"] == "no-cache, no-transform"
        assert headers["x-accel-buffering"] == "no"
        assert headers["x-request-id"] == "id1"
        assert headers["server-timing"].endswith("ttft;dur=0.00")
        assert not {"content-length", "content-encoding", "connection", "transfer-encoding"} & set(headers)


@on_loop
async def test_events_that_are_there_together_are_one_write() -> None:
    engine = HandEngine()
    async with Client(server(engine)).chat(stream=True) as call:
        engine.admit()
        for text in ("a", "b", "c"):
            engine.say(text)
        await settle()
        assert len(call.writes) == 1
        assert call.content() == "abc"
        engine.say("d")
        engine.finish()
        await call.task
        assert len(call.writes) == 2
        assert call.body.endswith(b"data: [DONE]\n\n")
        assert call.body.count(b"[DONE]") == 1


@on_loop
async def test_choices_and_prompts_are_interleaved_by_index() -> None:
    engine = HandEngine()
    async with Client(server(engine)).complete(
        prompt=["p", "q"], n=2, stream=True, stream_options={"include_usage": True}
    ) as call:
        first, second = (generation.rid for generation in engine.generations)
        for rid, index, text in ((second, 1, "D"), (first, 0, "A"), (second, 0, "C"), (first, 1, "B")):
            engine.admit(1, rid=rid, index=index)
            engine.say(text, rid=rid, index=index)
            await settle()
        for rid in (first, second):
            for index in (1, 0):
                engine.finish("length", 2, rid=rid, index=index)
        await call.task
        assert [call.content(index) for index in range(4)] == ["A", "B", "C", "D"]
        events = call.events()
        assert sum(bool(event["choices"] and event["choices"][0]["finish_reason"]) for event in events[:-1]) == 4
        usage = events[-2]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 8)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2


@on_loop
async def test_echo_without_an_answer() -> None:
    engine = HandEngine()
    async with Client(server(engine)).complete(prompt="abc", echo=True, max_tokens=0, stream=True) as call:
        await call.task
        assert engine.generations == []
        assert call.content() == "abc"
        assert call.events()[-2]["choices"][0]["finish_reason"] == "length"


# The timeline ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_the_stages_add_up_to_the_time_to_first_text() -> None:
    engine, clock = HandEngine(clock_offset=1000.0), Hands(step=0.0007)
    async with Client(server(engine, clock=clock)).chat(stream=True, headrace={"timings": True}) as call:
        start = clock.now - 1000.0
        engine.admit(2)
        await settle()
        engine.say("a", marks=Marks(start + 0.01, start + 0.02, start + 0.05, start + 0.25, start + 0.27))
        clock.now += 0.3
        await settle()
        engine.finish()
        await call.task
        timeline = call.events()[-2]["headrace"]["timeline"]
        stages = ["receive", "route", "tokenize", "queue", "restore", "prefill", "sample", "deliver"]
        assert list(timeline) == [*stages, "ttft", "cached_tokens"]
        assert abs(sum(timeline[stage] for stage in stages) - timeline["ttft"]) < 1.0
        assert all(timeline[stage] > 0 for stage in stages)
        assert timeline["prefill"] == pytest.approx(200, abs=0.01)
        assert timeline["cached_tokens"] == 2
        header = dict(part.split(";dur=") for part in call.headers["server-timing"].split(", "))
        assert list(header) == [*stages, "ttft"]
        assert abs(sum(float(header[stage]) for stage in stages) - float(header["ttft"])) < 1.0
        assert float(header["ttft"]) == pytest.approx(timeline["ttft"], abs=0.01)


@on_loop
async def test_an_answer_in_one_flush_has_a_whole_timeline_too() -> None:
    engine, clock = HandEngine(), Hands(step=0.001)
    async with Client(server(engine, clock=clock)).chat(stream=True, headrace={"timings": True}) as call:
        engine.say("a", marks=Marks(100.01, 100.01, 100.01, 100.01, 100.01))
        engine.finish()
        await call.task
        assert len(call.writes) == 1
        assert call.events()[-2]["headrace"]["timeline"]["ttft"] > 0


@on_loop
async def test_the_timeline_is_only_for_who_asks() -> None:
    engine = HandEngine()
    async with Client(server(engine)).chat(stream=True) as call:
        engine.say("a")
        engine.finish()
        await call.task
        assert b"timeline" not in call.body


@on_loop
async def test_gaps_between_writes_of_text_are_kept() -> None:
    engine, clock = HandEngine(), Hands()
    app = server(engine, clock=clock)
    async with Client(app).chat(stream=True) as call:
        for gap in (0.0, 0.02, 0.05):
            clock.now += gap
            engine.say("a")
            await settle()
        clock.now += 9.0
        engine.finish()
        await call.task
    text = app.metrics.render().decode()
    assert "headrace_inter_token_seconds_count 2.0" in text
    assert float(text.split("headrace_inter_token_seconds_sum ")[1].split()[0]) == pytest.approx(0.07)


# Silence ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_nothing_is_sent_while_the_request_is_queued() -> None:
    engine, clock = HandEngine(), Hands()
    app = server(engine, clock=clock)
    async with Client(app).chat(stream=True) as call:
        app.ticker.tick(clock.now + 29.0)
        await settle()
        assert call.sent == []


@on_loop
async def test_a_held_head_goes_out_before_its_time_is_over() -> None:
    engine, clock = HandEngine(), Hands()
    app = server(engine, clock=clock)
    async with Client(app).chat(stream=True) as call:
        clock.now += 5.0
        engine.admit()
        await settle()
        for after, sent in ((0.25, 0), (0.5, 0), (0.74, 0), (0.76, 2)):
            app.ticker.tick(clock.now + after)
            await settle()
            assert len(call.sent) == sent, after
        assert call.status == 200
        assert call.body == COMMENT
        assert "ttft" not in call.headers["server-timing"]
        engine.say("a")
        await settle()
        assert call.content() == "a"


@on_loop
async def test_a_hold_of_zero_means_at_the_first_tick() -> None:
    engine, clock = HandEngine(), Hands()
    app = server(engine, clock=clock, limits=StreamLimits(header_hold_s=0.0))
    async with Client(app).chat(stream=True) as call:
        engine.admit()
        await settle()
        app.ticker.tick(clock.now)
        await settle()
        assert call.status == 200


@on_loop
async def test_tokens_without_text_are_held_with_the_head() -> None:
    engine = HandEngine()
    async with Client(server(engine)).chat(stream=True, logprobs=True) as call:
        engine.admit()
        engine.emit(Delta(engine.rid, 0, "", 1, (TokenLogprob(1, b"\xf0\x9f", -0.5),)))
        await settle()
        assert call.sent == []
        engine.emit(Delta(engine.rid, 0, "x", 1, (TokenLogprob(2, b"x", -0.25),)))
        engine.finish("stop", 2)
        await call.task
        tokens = [
            entry["logprob"]
            for event in call.events()[:-1]
            for entry in (event["choices"][0].get("logprobs") or {}).get("content") or ()
        ]
        assert tokens == [-0.5, -0.25]


def silent(engine: HandEngine) -> Delta:
    """A token of which nothing can be shown yet, and that is written all the same."""
    return Delta(engine.rid, 0, "", 1, (TokenLogprob(1, b"\xf0\x9f", -0.5),))


@pytest.mark.parametrize("headrace", [{}, {"pace": "adaptive"}])
@pytest.mark.parametrize("begun", [False, True])
@on_loop
async def test_what_is_held_for_the_first_text_holds_no_engine_up(begun: bool, headrace: dict[str, str]) -> None:
    engine, clock = HandEngine(), Hands()
    app = server(engine, clock=clock, limits=StreamLimits(max_pending_events=8))
    async with Client(app).chat(stream=True, logprobs=True, headrace=headrace) as call:
        engine.admit()
        await settle()
        if begun:
            app.ticker.tick(clock.now + 1.0)
            await settle()
            assert call.status == 200
        for _ in range(100):
            engine.emit(silent(engine))
            await settle()
        assert engine.told == []
        assert len(call.writes) == begun
        engine.say("x")
        await settle()
        assert call.content() == "x"
        assert len(call.events()) == 101


@on_loop
async def test_only_so_much_is_held_for_the_first_text() -> None:
    engine, clock = HandEngine(), Hands()
    app = server(engine, clock=clock)
    async with Client(app).chat(stream=True, logprobs=True, headrace={"timings": True}) as call:
        engine.admit()
        sizes = [0]
        while not call.sent:
            assert sizes[-1] <= MAX_HELD, "no end"
            engine.emit(silent(engine))
            await settle()
            sizes.append(sizes[-1] + 100)  # no event is smaller
        assert MAX_HELD < len(call.body) < MAX_HELD + 1000
        clock.now += 1.0
        engine.say("x", marks=Marks(clock.now, clock.now, clock.now, clock.now, clock.now))
        engine.finish()
        await call.task
        assert call.content() == "x"
        timeline = call.events()[-2]["headrace"]["timeline"]
        assert all(value >= 0 for name, value in timeline.items() if name != "attempts")


@on_loop
async def test_a_silent_stream_is_kept_alive() -> None:
    engine, clock = HandEngine(), Hands()
    app = server(engine, clock=clock, limits=StreamLimits(heartbeat_s=3.0))
    async with Client(app).chat(stream=True) as call:
        engine.say("a")
        await settle()
        beats = []
        for _ in range(40):
            clock.now += 0.25
            app.ticker.tick(clock.now)
            await settle()
            beats.append(call.body.count(COMMENT))
        assert beats[10] == 1, "due before three seconds of silence are over"
        assert beats[-1] == 3
        engine.say("b")
        engine.finish()
        await call.task
        assert call.content() == "ab"
        assert b"id:" not in call.body


@on_loop
async def test_a_stream_that_speaks_needs_no_heartbeat() -> None:
    engine, clock = HandEngine(), Hands()
    app = server(engine, clock=clock, limits=StreamLimits(heartbeat_s=3.0))
    async with Client(app).chat(stream=True) as call:
        for _ in range(40):
            clock.now += 0.25
            engine.say("a")
            await settle()
            app.ticker.tick(clock.now)
            await settle()
        assert call.content() == "a" * 40
        assert COMMENT not in call.body


@on_loop
async def test_says_when_to_look_again_and_what_comes_in_between_is_not_missed() -> None:
    """A look that is put off must not make a head, a heartbeat or a timeout late by more than a tick."""
    limits = StreamLimits(header_hold_s=2.0, heartbeat_s=10.0, write_timeout_s=30.0, queue_timeout_s=60.0)
    engine, clock = HandEngine(), Hands()
    app = server(engine, clock=clock, limits=limits)
    ticker = app.ticker

    async def until(seconds: float) -> None:
        """Let the ticker's time pass, tick by tick."""
        end = clock.now + seconds
        while clock.now < end:
            clock.now += ticker.interval
            ticker._fire(clock.now)
            await settle()

    async with Client(app).chat(stream=True) as call:
        await until(5.0)
        assert call.sent == []
        engine.admit()
        await settle()
        await until(1.5)
        assert call.sent == [], "the head waits for text"
        await until(0.5)
        assert call.status == 200, "and not for longer than it may"
        writes = len(call.writes)
        await until(9.5)
        assert len(call.writes) == writes
        await until(0.5)
        assert len(call.writes) == writes + 1, "a heartbeat"
        await until(5.0)
        call.gate.clear()
        engine.say("a")
        await settle()
        assert call.blocked == 1
        await until(29.5)
        assert app.running == 1
        await until(0.75)
        assert app.running == 0, "a reader that takes nothing is dropped"
    assert engine.cancelled == [engine.rid]

    async with Client(app).chat(stream=True) as call:
        await until(59.5)
        assert call.sent == []
        await until(0.75)
        assert call.status == 503
