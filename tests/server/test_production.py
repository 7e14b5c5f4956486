"""Answers that are made: accounted for once, refused honestly, and gone on with under their own name."""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec
import pytest

from headrace.core.errors import EngineUnavailable, RateLimited
from headrace.core.events import Delta
from headrace.core.request import Ask, Told
from headrace.core.timeline import Timeline
from headrace.gateway.guard import ANYBODY, Caller, OpenGuard, Permit
from headrace.observe.record import Outcome, Record
from headrace.protocol.openai import common_options
from headrace.server.outlet import LogOutlet
from headrace.server.production import Production
from headrace.server.streamlog import StreamLog
from server.asgi_driver import on_loop, settle
from server.log_servers import Server, data, one, text

FIELDS = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "headrace": {"resume": True}}


def going_on(server: Server, told: Told) -> tuple[Production, StreamLog]:
    log = server.app.resuming.streams.open("o")
    log.begin(())
    ask = Ask(True, "m", FIELDS, 9, common_options(FIELDS), 42, "", told)
    timeline = Timeline(0.0)
    outlet = LogOutlet(log, "r", Record("r", "POST", "/v1/chat/completions", timeline, stream=True), timeline)
    return Production(outlet, ask, ("begun", 7), log.id, family="m", log=log), log


@on_loop
async def test_an_answer_is_gone_on_with_under_its_name_and_without_its_role() -> None:
    server = one()
    production, log = going_on(server, Told("ab", (97, 98), 2))
    server.app.resuming._run(production, ANYBODY)
    await settle()
    assert server.engine.generations[0].resume == ((97, 98),)
    server.engine.emit(Delta(server.engine.rid, 0, "c", 1, ids=(99,)))
    server.engine.finish("stop", 4)
    await settle()
    first, last, done = (block[6:-2] for _, block in log.since(0))
    assert msgspec.json.decode(first)["choices"][0]["delta"] == {"content": "c"}
    assert {msgspec.json.decode(line)["id"] for line in (first, last)} == {"begun"}
    assert done == b"[DONE]"
    assert production.outlet.record.completion_tokens == 4
    server.app.resuming.streams.close()


@on_loop
async def test_what_breaks_while_it_is_gone_on_with_ends_in_one_error_and_never_anew() -> None:
    server = one()
    production, log = going_on(server, Told("ab", (97, 98), 2))
    server.app.resuming._run(production, ANYBODY)
    await settle()
    server.engine.fail()
    await settle()
    ((_, only),) = log.since(0)
    assert b'"error"' in only
    assert log.ended == "failed"
    assert len(server.engine.generations) == 1
    server.app.resuming.streams.close()


@on_loop
async def test_an_answer_that_is_complete_needs_no_engine() -> None:
    server = one()
    production, log = going_on(server, Told("ab", (97, 98), 2))
    fields = {**FIELDS, "max_tokens": 2}
    production = replace(production, ask=replace(production.ask, fields=fields, options=common_options(fields)))
    server.app.resuming._run(production, ANYBODY)
    await settle()
    assert server.engine.generations == []
    finish, done = (block[6:-2] for _, block in log.since(0))
    assert msgspec.json.decode(finish)["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "length"}
    assert done == b"[DONE]"
    assert production.outlet.record.completion_tokens == 2
    server.app.resuming.streams.close()


class Books(OpenGuard):
    """Lets nobody in while `shut`, and remembers what was booked."""

    def __init__(self) -> None:
        self.booked: list[tuple[int, Outcome]] = []
        self.shut = False

    async def admit(self, caller: Caller, ask: object) -> Permit:
        if self.shut:
            raise RateLimited("too many", retry_after=3, limit="requests")
        return self

    def close(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int, outcome: Outcome) -> None:
        self.booked.append((completion_tokens, outcome))


@on_loop
async def test_what_went_on_alone_is_booked_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="headrace.access")
    books = Books()
    server = one(guard=books)
    async with server.chat() as call:
        server.engine.say("a")
        await settle()
        call.hang_up()
        await call.task
        assert books.booked == []
        server.engine.say("b")
        server.engine.finish("stop", 3)
        await settle()
    assert books.booked == [(3, "ok")]
    books.shut = True
    async with server.chat() as refused:
        await refused.task
    assert (refused.status, refused.headers["retry-after"]) == (429, "3")
    lines = [msgspec.json.decode(record.getMessage()) for record in caplog.records]
    assert [(line["status"], line["outcome"]) for line in lines] == [(200, "ok"), (429, "invalid")]
    server.app.resuming.streams.close()


@on_loop
async def test_a_plain_stream_is_as_it_was_and_named() -> None:
    server = one()
    async with server.client.chat(stream=True) as call:
        server.engine.say("a")
        await settle()
        async with server.delete(call.headers["x-headrace-stream"]) as stop:
            await stop.task
        await call.task
    assert [line for line in call.body.split(b"\n") if line][-1] == b"data: [DONE]"
    assert server.engine.cancelled == [1]
    server.engine.refusal = EngineUnavailable("no")
    async with server.client.chat(stream=True) as refused:
        await refused.task
    assert refused.status == 503
    assert server.app.running == 0


@on_loop
async def test_resumed_text_is_the_same_for_who_was_there_and_who_was_not() -> None:
    server = one()
    async with server.chat() as call:
        for word in ("a", "bc", "d"):
            server.engine.say(word)
            await settle()
        server.engine.finish()
        await call.task
        async with server.get(call.headers["x-headrace-stream"]) as late:
            await late.task
    assert data(late.body) == data(call.body)
    assert text(late.body) == "abcd"
    server.app.resuming.streams.close()
