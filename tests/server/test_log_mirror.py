"""Streams read, stopped and gone on with at another server than the one that began them; the Redis is real."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import msgspec
import pytest

from headrace.core.events import Delta
from headrace.core.request import Ask, Generation, Sampling
from headrace.gateway.guard import Caller
from headrace.server.log_redis import Entry, Put
from redis_server import RedisServer
from server.asgi_driver import on_loop, settle
from server.log_servers import NamedGuard, Server, data, frames, sharing, text, writer_of, written
from server.socket_client import until


@on_loop
async def test_another_server_gives_the_same_live_and_after_the_end(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b):
        async with a.chat(stream_options={"include_usage": True}) as call:
            for word in ("one ", "two ", "drei\u2028 "):
                a.engine.say(word)
                await settle()
            await written(a)
            id = call.headers["x-headrace-stream"]
            async with b.get(id) as away:
                await until(lambda: text(away.body) == "one two drei\u2028 ")
                a.engine.say("more")
                await until(lambda: text(away.body).endswith("more"))
                a.engine.finish("stop", 5)
                await away.task
            await call.task
            assert away.body == call.body
        assert len(b.app.resuming.shared.mirrors) == 0  # type: ignore[union-attr]
        for end, _ in frames(call.body):
            async with b.get(id, last=end) as late:
                await late.task
            known = [name for name, _ in frames(call.body)].index(end)
            assert data(late.body) == data(call.body)[known + 1 :]
        assert b.engine.generations == []
        assert b.app.metrics.streams.resumed["elsewhere"] > 0


@on_loop
async def test_a_reader_that_comes_while_the_last_one_goes_gets_everything(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b), a.chat() as call:
        a.engine.say("one ")
        await settle()
        await written(a)
        id = call.headers["x-headrace-stream"]
        for _ in range(5):
            async with b.get(id) as first:
                await until(lambda: text(first.body) == "one ")
                first.hang_up()
                async with b.get(id) as second:
                    await until(lambda: text(second.body) == "one ")
                    await first.task
                    second.hang_up()
                    await second.task
        async with b.get(id) as last:
            await until(lambda: text(last.body) == "one ")
            a.engine.finish()
            await last.task
        await call.task
        assert last.body == call.body
        figures = b.app.metrics.streams
        assert (figures.open, figures.readers) == (0, 0)
        assert figures.kept == len(b.app.resuming.streams)


@on_loop
async def test_a_server_that_drains_sends_its_readers_elsewhere(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b), a.chat() as call:
        a.engine.say("one ")
        await settle()
        await written(a)
        async with b.get(call.headers["x-headrace-stream"]) as away:
            await until(lambda: text(away.body) == "one ")
            b.app.drain()
            await away.task
        assert away.body.endswith(b"\n\n")
        assert b'"code":"draining"' in away.body.split(b"\n\n")[-2]
        async with b.get(call.headers["x-headrace-stream"]) as late:
            await late.task
        assert (late.status, late.json()["error"]["code"]) == (503, "draining")
        assert len(b.app.resuming.shared.mirrors) == 0  # type: ignore[union-attr]
        a.engine.finish()
        await call.task


@on_loop
async def test_others_find_nothing_elsewhere_either(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b", guard=NamedGuard()) as (a, b):
        call = a.client.chat(stream=True, headrace={"resume": True}, headers=[(b"authorization", b"Bearer ann")])
        async with call:
            a.engine.say("x")
            await settle()
            await written(a)
            id = call.headers["x-headrace-stream"]
            for method in (b.get, b.delete):
                async with method(id, key="bob") as other:
                    await other.task
                assert other.status == 404
            async with b.get(id, key="ann") as own:
                await until(lambda: text(own.body) == "x")
            a.engine.finish()
            await call.task


@on_loop
async def test_a_stop_reaches_the_server_that_writes(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b), a.chat() as call:
        a.engine.say("x")
        await settle()
        await written(a)
        id = call.headers["x-headrace-stream"]
        async with b.delete(id) as stop:
            await stop.task
        assert (stop.status, stop.json()["status"]) == (200, "stopping")
        await until(lambda: call.ended)
        assert a.engine.cancelled
        assert data(call.body)[-1] == b"[DONE]"
        await until(lambda: len(a.app.resuming.shared.writer) == 0)  # type: ignore[union-attr]
        async with b.delete(id) as again:
            await again.task
        assert (again.status, again.json()["status"]) == (200, "stopped")


@on_loop
async def test_when_the_server_is_gone_another_goes_on_from_the_exact_token(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b):
        async with a.chat(stream_options={"include_usage": True}, max_tokens=9) as call:
            for letter in "abc":
                a.engine.emit(Delta(a.engine.rid, 0, letter, 1, ids=(ord(letter),)))
                await settle()
            await written(a)
            id = call.headers["x-headrace-stream"]
            said = call.body
            last = frames(said)[-1][0]
            await a.die()
        async with b.get(id, last=last) as on:
            await until(lambda: bool(b.engine.generations))
            (generation,) = b.engine.generations
            assert generation.resume == (tuple(b"abc"),)
            assert generation.sampling.seed == 42
            b.engine.admit()
            for letter in "de":
                b.engine.emit(Delta(b.engine.rid, 0, letter, 1, ids=(ord(letter),)))
            b.engine.finish("stop", 6)
            await on.task
        first, second = ([msgspec.json.decode(line) for line in data(body) if line != b"[DONE]"]
                         for body in (said, on.body))  # fmt: skip
        assert text(said) + text(on.body) == "abcde"
        assert {event["id"] for event in first + second} == {"chatcmpl-aid2"}
        assert second[-1]["usage"]["completion_tokens"] == 6
        assert not any("role" in choice["delta"] for event in second for choice in event["choices"])
        async with b.get(id) as whole:
            await whole.task
        assert data(whole.body) == data(said) + data(on.body)
        assert b.app.metrics.streams.adopted == 1
        positions = [int(end.rpartition("-")[2]) for end, _ in frames(whole.body)]
        assert positions == sorted(set(positions))


@on_loop
async def test_what_redis_did_not_hear_of_is_not_told_twice_however_it_is_cut(redis_server: RedisServer) -> None:
    """The client has more than Redis: the rest begins inside a piece of text of the second engine."""
    async with sharing(redis_server, "a", "b") as (a, b):
        async with a.chat() as call:
            a.engine.emit(Delta(a.engine.rid, 0, "a", 1, ids=(97,)))
            await settle()
            await written(a)
            id = call.headers["x-headrace-stream"]
            a.app.resuming.shared.writer._writings.clear()  # type: ignore[union-attr]
            for letter in "bcd":
                a.engine.emit(Delta(a.engine.rid, 0, letter, 1, ids=(ord(letter),)))
            await settle()
            said = call.body
            await a.die()
        assert text(said) == "abcd"
        async with b.get(id, last=frames(said)[-1][0]) as on:
            await until(lambda: bool(b.engine.generations))
            assert b.engine.generations[0].resume == ((97,),)
            b.engine.emit(Delta(b.engine.rid, 0, "bc", 2, ids=(98, 99)))
            b.engine.emit(Delta(b.engine.rid, 0, "def", 3, ids=(100, 101, 102)))
            b.engine.finish("stop", 7)
            await on.task
        assert text(on.body) == "ef"


@on_loop
async def test_who_cannot_go_on_says_so_once_and_lets_others_try(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b", "c") as (a, b, c):
        async with a.chat() as call:
            a.engine.emit(Delta(a.engine.rid, 0, "a", 1, ids=(97,)))
            await settle()
            await written(a)
            id = call.headers["x-headrace-stream"]
            await a.die()
        b.engine.ready = False
        async with b.get(id) as refused:
            await refused.task
        ((_, first),) = frames(refused.body.partition(b'data: {"error"')[0])
        assert b'"content":"a"' in first
        assert refused.body.count(b'"error"') == 1
        assert b"[DONE]" not in refused.body
        async with c.get(id) as on:
            await until(lambda: bool(c.engine.generations))
            c.engine.emit(Delta(c.engine.rid, 0, "b", 1, ids=(98,)))
            c.engine.finish("stop", 3)
            await on.task
        assert text(on.body) == "ab"
        assert data(on.body)[-1] == b"[DONE]"


SAID = "Hello, river!"
STEPS = len(SAID)


async def played(server: Server, rid: int, start: int, end: int, burst: int = 1) -> None:
    """The answer's tokens from `start` to `end`, so many at a time; the finish behind the last one."""
    for at in range(start, min(end, STEPS), burst):
        piece = SAID[at : min(at + burst, end, STEPS)]
        server.engine.emit(Delta(rid, 0, piece, len(piece), ids=tuple(piece.encode())))
        await settle(8)
    if end > STEPS:
        server.engine.finish("length", STEPS, rid=rid)
        await settle(8)


async def cut_at(server: Server, known: int, ahead: int) -> tuple[str, bytes]:
    """A stream of which Redis has `known` tokens and its reader `ahead` more when its server dies: id and bytes."""
    count = len(server.engine.generations)
    async with server.chat(max_tokens=STEPS, key=f"{known} {ahead}") as call:  # with a key, so that it may lack a head
        await until(lambda: len(server.engine.generations) > count)
        rid = server.engine.rid
        server.engine.admit(rid=rid)
        await played(server, rid, 0, known)
        await written(server)
        (writing,) = writer_of(server)._writings.values()
        del writer_of(server)._writings[writing.log.id]
        await played(server, rid, known, known + ahead)
        said = call.body if call.sent else b""
        server.engine.cancel(rid)
        id = writing.log.id
        call.hang_up()
    return id, said


@on_loop
async def test_a_stream_is_gone_on_with_at_every_token_whatever_its_reader_has_beyond(
    redis_server: RedisServer,
) -> None:
    async with sharing(redis_server, "a", "b") as (a, b):
        streams = [(known, await cut_at(a, known, ahead)) for ahead in (0, 1, 3) for known in range(STEPS + 1 - ahead)]
        await a.die()

        async def again(number: int, known: int, id: str, said: bytes) -> None:
            last = frames(said)[-1][0] if said else None
            async with b.get(id, last=last) as on:
                await until(lambda: on.task.done() or any(g for g in b.engine.generations if mine(g, id)))
                mines = [g for g in b.engine.generations if mine(g, id)]
                for generation in mines:
                    told = len(generation.resume[0] or ()) if generation.resume else 0
                    assert told == known
                    await played(b, generation.rid, told, STEPS + 1, burst=1 + number % 4)
                assert bool(mines) == (known < STEPS), "who has all its tokens needs no engine"
                await on.task
            whole = data(said) + data(on.body)
            assert text(said) + text(on.body) == SAID, (known, last)
            assert whole[-1] == b"[DONE]"
            assert len([line for line in whole if b'"finish_reason":"length"' in line]) == 1
            async with b.get(id) as late:
                await late.task
            assert text(late.body) == SAID

        seen: dict[int, str] = {}

        def mine(generation: Generation, id: str) -> bool:
            """Generations come in the order of the gets: one is played at a time."""
            return seen.setdefault(generation.rid, id) == id

        for number, (known, (id, said)) in enumerate(streams):
            await again(number, known, id, said)
        assert b.app.metrics.streams.adopted == len(streams)


@on_loop
async def test_the_simple_event_stream_is_gone_on_with_in_its_own_words(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b):
        asked = {"prompt": "hi", "headrace": {"resume": True}}
        async with a.client.post("/chat/v1/stream", asked) as call:
            a.engine.say("one ")
            await settle()
            await written(a)
            said = call.body
            id = call.headers["x-headrace-stream"]
            await a.die()
        async with b.get(id, last=frames(said)[-1][0]) as on:
            await until(lambda: bool(b.engine.generations))
            b.engine.say("two ")
            b.engine.finish("stop", 9)
            await on.task
        events = [msgspec.json.decode(line) for line in data(said) + data(on.body)]
        assert [event.get("event") or event["tokens"] for event in events] == ["ttft", ["one "], ["two "], "done"]


@on_loop
async def test_a_paced_answer_is_gone_on_with_from_what_its_reader_had(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b):
        fields = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        asked = {**fields, "headrace": {"resume": True, "pace": "window:3"}}
        async with a.client.post("/v1/chat/completions", asked) as call:
            for letter in "abcdef":
                a.engine.emit(Delta(a.engine.rid, 0, letter, 1, ids=(ord(letter),)))
                await settle()
            await written(a)
            said = call.body
            id = call.headers["x-headrace-stream"]
            await a.die()
        shown = text(said)
        assert "a" <= shown < "abcdef", "the pacer has the rest"
        async with b.get(id, last=frames(said)[-1][0]) as on:
            await until(lambda: bool(b.engine.generations))
            assert b.engine.generations[0].resume == (tuple(shown.encode()),)
            for letter in "abcdef"[len(shown) :]:
                b.engine.emit(Delta(b.engine.rid, 0, letter, 1, ids=(ord(letter),)))
            b.engine.finish("stop", 7)
            await on.task
        assert shown + text(on.body) == "abcdef"


class GatedGuard(NamedGuard):
    """What is gone on with waits for the gate."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.waiting = False

    async def admit(self, caller: Caller, ask: Ask) -> Any:
        if ask.told is not None:
            self.waiting = True
            await self.gate.wait()
        return await super().admit(caller, ask)


@pytest.mark.parametrize("well", [True, False])
@on_loop
async def test_what_is_stopped_before_it_is_gone_on_with_stops(redis_server: RedisServer, well: bool) -> None:
    guard = GatedGuard()
    async with sharing(redis_server, "a", "b", guard=guard) as (a, b):
        async with a.chat() as call:
            a.engine.say("one ")
            await settle()
            await written(a)
            id = call.headers["x-headrace-stream"]
            await a.die()
        async with b.get(id) as on:
            await until(lambda: guard.waiting)
            async with b.delete(id) as stop:
                await stop.task
            assert stop.json()["status"] == "stopped"
            b.engine.ready = well
            guard.gate.set()
            await on.task
        assert b.engine.live == {}
        assert (data(on.body)[-1] == b"[DONE]") == well
        assert b'"content":"one "' in on.body
        async with b.delete(id) as again:
            await again.task
        assert again.json()["status"] == "stopped"


@pytest.mark.parametrize("plain", [False, True])
@on_loop
async def test_an_answer_that_lacks_only_its_end_is_not_made_again(redis_server: RedisServer, plain: bool) -> None:
    async with sharing(redis_server, "a", "b", "c") as (a, b, c):
        asked = {"prompt": "hi", "headrace": {"resume": True}}
        async with a.client.post("/chat/v1/stream", asked) if plain else a.chat() as call:
            a.engine.say("one ")
            await settle()
            a.app.resuming._end = lambda *anything: None  # type: ignore[method-assign]
            a.engine.finish()
            await settle()
            await written(a)
            id = call.headers["x-headrace-stream"]
            (log,) = a.app.resuming.streams
            await a.die()
            async with b.get(id) as late:
                await late.task
            assert (b'"event":"done"' in late.body) if plain else (data(late.body)[-1] == b"[DONE]")
            assert late.body.count(b"\n\n") == 3
            async with c.delete(id) as stop:
                await stop.task
            assert stop.json()["status"] == "done"
            assert b.engine.generations == c.engine.generations == []
            log.end("done")
            a.app.resuming.streams.end(log)
            await call.task


@on_loop
async def test_the_simple_event_stream_says_in_its_own_words_that_nobody_goes_on(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b):
        async with a.client.post("/chat/v1/stream", {"prompt": "hi", "headrace": {"resume": True}}) as call:
            a.engine.say("one ")
            await settle()
            await written(a)
            id = call.headers["x-headrace-stream"]
            await a.die()
        b.engine.ready = False
        async with b.get(id) as refused:
            await refused.task
        last = msgspec.json.decode(refused.body.split(b"\n\n")[-2].removeprefix(b"data: "))
        assert (last["event"], last["error"]["code"]) == ("error", "engine_unavailable")


def block(text: bytes) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % text


@on_loop
async def test_who_falls_behind_what_is_kept_says_so_and_leaves_nothing_out(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b), a.chat() as call:
        a.engine.say("one ")
        await settle()
        await written(a)
        id = call.headers["x-headrace-stream"]
        async with b.get(id) as away:
            await until(lambda: text(away.body) == "one ")
            assert a.app.resuming.shared is not None
            assert b.app.resuming.shared is not None
            entry, entries = Entry(104, block(b"four"), None), a.app.resuming.shared.store
            put = Put(id, "", b"", 4, 100, True, 60.0, [entry])  # what lies between was let go in the same turn
            assert await entries.put([put]) == [1]
            await away.task
        assert b"four" not in away.body
        assert away.body.count(b'"code":"gone"') == 1
        assert len(b.app.resuming.shared.mirrors) == 0
        async with b.get(id, 4) as again:
            await again.task
        assert (again.status, again.json()["error"]["code"]) == (410, "gone")
        a.engine.finish()
        await call.task


@on_loop
async def test_who_lives_has_time_to_say_so_when_redis_was_away(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b), a.chat() as call:
        a.engine.say("one ")
        await settle()
        await written(a)
        id = call.headers["x-headrace-stream"]
        stores = [server.app.resuming.shared.store._shared for server in (a, b)]  # type: ignore[union-attr]
        for store in stores:
            store.timeout_s = 0.1
        b.app.resuming.shared.store.lease_s = 30.0  # type: ignore[union-attr]
        async with b.get(id) as away:
            await until(lambda: text(away.body) == "one ")
            redis_server.signal(signal.SIGSTOP)
            try:
                await until(lambda: stores[1].errors > 1)
            finally:
                redis_server.signal(signal.SIGCONT)
            stores[1]._breaker.success()
            for _ in range(5):
                stores[0]._breaker.failure(time.monotonic())
            await stores[1].client.delete(f"headrace:stream:{{{id}}}:lease")
            looked = LookingStore(b)
            await looked.looks(2)
            stores[0]._breaker.success()
            a.engine.say("two ")
            await until(lambda: text(away.body) == "one two ")
            a.engine.finish()
            await away.task
        await call.task
        assert b.engine.generations == []


class LookingStore:
    """Counts how often a server looked whether a stream is still written."""

    def __init__(self, server: Server) -> None:
        assert server.app.resuming.shared is not None
        self._store = server.app.resuming.shared.store
        self._held = self._store.held
        self._count = 0
        self._store.held = self._look  # type: ignore[method-assign]

    async def _look(self, id: str) -> bool | None:
        self._count += 1
        return await self._held(id)

    async def looks(self, count: int) -> None:
        await until(lambda: self._count >= count)


@on_loop
async def test_another_server_draws_the_rest_as_the_first_one_began(redis_server: RedisServer) -> None:
    """They serve the same model from two files that say different things of its sampling."""
    async with sharing(redis_server, "a", "b") as (a, b):
        own = [server.app.fleet.backends["m"] for server in (a, b)]
        own[0].sampling, own[1].sampling = Sampling(temperature=0.2), Sampling(temperature=0.9)  # type: ignore[attr-defined]
        async with a.chat(top_p=0.5) as call:
            a.engine.say("one ")
            await settle()
            await written(a)
            id = call.headers["x-headrace-stream"]
            await a.die()
        async with b.get(id) as on:
            await until(lambda: bool(b.engine.generations))
            began, goes_on = a.engine.generations[0].sampling, b.engine.generations[0].sampling
            assert (began.temperature, began.top_p) == (0.2, 0.5)
            assert goes_on == began
            b.engine.admit()
            b.engine.finish("stop", 6)
            await on.task
