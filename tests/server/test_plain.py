"""The simple event stream over the whole application."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.core.events import Relayed
from server.asgi_driver import Call, Client, on_loop, settle
from server.hand_engine import INFO, HandEngine, Hands, clean, server
from server.socket_client import on_uvloop, serving, until

PATH = "/chat/v1/stream"


def prompt_of(engine: HandEngine) -> str:
    return bytes(token for token in engine.generations[-1].prompt if token < 256).decode()


def last(call: Call) -> Any:
    return call.events()[-1]


@on_loop
async def test_a_get_from_end_to_end() -> None:
    engine, clock = HandEngine(), Hands()
    app = server(engine, clock=clock)
    async with Client(app).get(f"{PATH}?prompt=Hi%20there&system=Be+kind&max_tokens=7&temperature=0") as call:
        assert call.sent == []
        clock.now += 0.0415
        engine.admit(2)
        engine.say("Once")
        await settle()
        assert call.status == 200
        assert call.headers["content-type"] == "text/event-stream; charset=utf-8"
        engine.say(" upon")
        await settle()
        engine.finish("length", 2)
        await call.task
    generation = engine.generations[0]
    assert (generation.max_tokens, generation.sampling.temperature) == (7, 0.0)
    assert prompt_of(engine) == "system\nBe kinduser\nHi thereassistant"
    ttft, first, second, done = call.events()
    assert ttft == {"event": "ttft", "value": 41.5}
    assert (first, second) == ({"tokens": ["Once"]}, {"tokens": [" upon"]})
    assert (done["event"], done["finish_reason"], done["usage"]["completion_tokens"]) == ("done", "length", 2)
    assert done["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert len(call.writes) == 3, "every piece in its own write, the end with none"
    clean(app, engine)


@on_loop
async def test_a_post_with_messages_and_a_window() -> None:
    engine = HandEngine()
    async with Client(server(engine)).post(
        PATH, {"messages": [{"role": "user", "content": "hi"}], "window": 3, "top_k": 5}
    ) as call:
        for text in "abcdefgh":
            engine.say(text)
            await settle()
        engine.finish()
        await call.task
    assert engine.generations[0].sampling.top_k == 5
    tokens = [event["tokens"] for event in call.events() if "tokens" in event]
    assert tokens == [["a"], ["b", "c", "d"], ["e", "f", "g"], ["h"]]


@on_loop
async def test_timings_are_on_the_last_event() -> None:
    engine = HandEngine()
    async with Client(server(engine)).post(PATH, {"prompt": "hi", "headrace": {"timings": True}}) as call:
        engine.say("a")
        engine.finish()
        await call.task
    assert "ttft" in last(call)["headrace"]["timeline"]


@on_loop
async def test_the_model_need_not_be_named_if_there_is_one() -> None:
    one, two = HandEngine(), HandEngine(info=_named("other"))
    async with Client(server(one, two)).get(f"{PATH}?prompt=hi") as call:
        await call.task
        assert call.status == 400
        assert call.json()["error"]["message"] == "model must be given; served here: m, other"
    async with Client(server(one, two)).get(f"{PATH}?prompt=hi&model=other") as call:
        two.say("a")
        two.finish()
        await call.task
        assert call.status == 200
    async with Client(server()).get(f"{PATH}?prompt=hi") as call:
        await call.task
        assert call.status == 503
    async with Client(server(one)).get(f"{PATH}?prompt=hi&model=none") as call:
        await call.task
        assert (call.status, call.json()["error"]["code"]) == (404, "model_not_found")


def _named(name: str) -> Any:
    return msgspec.structs.replace(INFO, name=name)


@pytest.mark.parametrize(
    ("query", "param"),
    [("", "prompt"), ("prompt=a&max_tokens=x", "max_tokens"), ("prompt=a&max_tokens=0", "max_tokens"),
     ("prompt=a&temperature=2.5", "temperature"), ("prompt=a&window=0", "window"), ("prompt=a&resume=1", "resume")],
)  # fmt: skip
@on_loop
async def test_refusals_are_honest_statuses(query: str, param: str) -> None:
    engine = HandEngine()
    async with Client(server(engine)).get(f"{PATH}?{query}") as call:
        await call.task
        assert (call.status, call.json()["error"]["param"]) == (400, param)
    assert engine.generations == []


@on_loop
async def test_a_key_counts_in_the_header_and_nowhere_else() -> None:
    engine = HandEngine()
    client = Client(server(engine, key="secret"))
    for query in ("prompt=hi", "prompt=hi&key=secret", "prompt=hi&api_key=secret"):
        async with client.get(f"{PATH}?{query}") as call:
            await call.task
            assert call.status == 401
    async with client.get(f"{PATH}?prompt=hi", headers=[(b"authorization", b"Bearer secret")]) as call:
        engine.say("a")
        engine.finish()
        await call.task
        assert call.status == 200


@on_loop
async def test_an_engine_that_breaks_ends_in_an_error_event() -> None:
    engine = HandEngine()
    app = server(engine)
    async with Client(app).get(f"{PATH}?prompt=hi") as call:
        engine.say("a")
        await settle()
        engine.fail("engine_failed", "it broke")
        await call.task
        assert last(call)["event"] == "error"
        assert last(call)["error"]["message"] == "it broke"
        assert b"[DONE]" not in call.body
    async with Client(app).get(f"{PATH}?prompt=hi") as call:
        engine.fail()
        await call.task
        assert call.status == 500, "before the first text it is a status"
    clean(app, engine)


@on_loop
async def test_a_relayed_answer_is_told_in_our_events() -> None:
    engine = HandEngine()
    async with Client(server(engine)).get(f"{PATH}?prompt=hi") as call:
        rid, sink = engine.rid, engine.live.pop(engine.rid)
        sink(Relayed(rid, b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'))  # type: ignore[arg-type]
        for text in ("a", "b"):
            sink(Relayed(rid, b"data: {}\n\n", text, text, 1))  # type: ignore[arg-type]
            await settle()
        sink(Relayed(rid, b'data: {"finish_reason":"length"}\n\n', over=True))  # type: ignore[arg-type]
        await call.task
    assert [event.get("tokens") for event in call.events()] == [None, ["a"], ["b"], None]
    assert last(call)["finish_reason"] == "length"
    assert b"choices" not in call.body


@on_loop
async def test_a_client_that_leaves_stops_it() -> None:
    engine = HandEngine()
    app = server(engine)
    async with Client(app).get(f"{PATH}?prompt=hi") as call:
        engine.say("a")
        await settle()
        call.hang_up()
        await call.task
    assert len(engine.cancelled) == 1
    clean(app, engine)


@on_loop
async def test_an_event_source_that_has_it_all_is_told_to_leave_off() -> None:
    engine = HandEngine()
    client = Client(server(engine))
    async with client.get(f"{PATH}?prompt=hi") as call:
        engine.say("a")
        engine.finish()
        await call.task
        assert b"\n\nid: done\ndata: " in call.body
    async with client.get(f"{PATH}?prompt=hi", headers=[(b"last-event-id", b"done")]) as call:
        await call.task
        assert (call.status, call.body) == (204, b"")
    async with client.call("HEAD", f"{PATH}?prompt=hi") as call:
        await call.task
        assert (call.status, call.body) == (200, b"")
    assert len(engine.generations) == 1


@on_loop
async def test_an_event_source_goes_on_by_itself_where_its_connection_broke() -> None:
    engine = HandEngine()
    app = server(engine)
    address = f"{PATH}?prompt=hi&resume=true"
    async with Client(app).get(address) as first:
        engine.say("Once")
        await settle()
        first.hang_up()
        await first.task
    said = [block.split(b"\n") for block in first.body.split(b"\n\n") if block.startswith(b"id: ")]
    assert [data[6:] for _, data in said][1:] == [b'{"tokens":["Once"]}']
    last = said[-1][0][4:]
    async with Client(app).get(address, headers=[(b"last-event-id", last)]) as second:
        engine.say(" upon")
        await settle()
        engine.finish()
        await second.task
    assert [event.get("tokens") for event in second.events()] == [[" upon"], None]
    assert len(engine.generations) == 1
    end = second.body.rstrip().split(b"\n")[-2]
    assert end.startswith(b"id: ")
    async with Client(app).get(address, headers=[(b"last-event-id", end[4:])]) as third:
        await third.task
        assert (third.status, third.body) == (204, b"")
    async with Client(app).get(f"{PATH}?prompt=ho&resume=true", headers=[(b"last-event-id", last)]) as other:
        await other.task
        assert other.status == 409
    app.resuming.streams.close()


@on_uvloop
async def test_over_a_socket() -> None:
    engine = HandEngine()
    async with serving(server(engine)) as running:
        connection = await running.connect()
        await connection.request("GET", f"{PATH}?prompt=hi", head=b"last-event-id: done\r\n")
        status, headers = await connection.head()
        assert status == 204
        assert not {"content-length", "transfer-encoding"} & set(headers)
        await connection.request("GET", f"{PATH}?prompt=hi")
        await until(lambda: bool(engine.generations))
        engine.say("a")
        engine.finish()
        status, _ = await connection.head()
        assert status == 200
        body = b""
        while piece := await connection.chunk():
            body += piece
        assert b'data: {"tokens":["a"]}\n\n' in body
