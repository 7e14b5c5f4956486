from __future__ import annotations

from typing import Any

from headrace.core.events import Delta, Marks
from headrace.server.stream import StreamLimits
from server.asgi_driver import Client, on_loop, settle
from server.hand_engine import HandEngine, Hands, clean, server


@on_loop
async def test_a_whole_answer() -> None:
    engine, clock = HandEngine(), Hands(step=0.001)
    app = server(engine, clock=clock)
    async with Client(app).chat(n=2, headrace={"timings": True}) as call:
        engine.admit(3)
        engine.admit(9, index=1)
        engine.say("b", index=1, marks=Marks(100.01, 100.01, 100.01, 100.01, 100.01))
        engine.say("a")
        await settle()
        engine.finish("length", 2, index=1)
        await settle()
        assert call.sent == []
        engine.say("A")
        engine.finish("stop", 3)
        await call.task
        assert call.headers["content-type"] == "application/json"
        assert int(call.headers["content-length"]) == len(call.body)
        assert "ttft;dur=" in call.headers["server-timing"]
        answer = call.json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["aA", "b"]
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
        timeline = answer["headrace"]["timeline"]
        stages = sum(value for name, value in timeline.items() if name not in ("ttft", "cached_tokens"))
        assert abs(stages - timeline["ttft"]) < 1.0
    clean(app, engine)


@on_loop
async def test_stream_and_whole_answer_agree() -> None:
    results = []
    for stream in (True, False):
        engine = HandEngine()
        fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        async with Client(server(engine)).chat(stream=stream, **fields) as call:
            engine.admit(5)
            engine.emit(Delta(engine.rid, 0, "abc", 3))
            engine.emit(Delta(engine.rid, 0, "de", 2))
            engine.finish("length", 5)
            await call.task
            if stream:
                results.append((call.content(), call.events()[-2]["usage"]))
            else:
                results.append((call.json()["choices"][0]["message"]["content"], call.json()["usage"]))
    assert results[0] == results[1]


@on_loop
async def test_whole_answers_are_never_paused() -> None:
    engine = HandEngine()
    async with Client(server(engine, limits=StreamLimits(max_pending_events=8))).chat() as call:
        for _ in range(50):
            for _ in range(4):
                engine.say("a")
            await settle(3)
        engine.finish()
        await call.task
        assert engine.told == []
        assert len(call.json()["choices"][0]["message"]["content"]) == 200
