"""What servers do for each other's streams: keys and stops that hold for all of them."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from headrace.core.errors import EngineUnavailable, RateLimited
from headrace.gateway.guard import ANYBODY, Caller
from headrace.server.log_redis import key_hash
from headrace.server.streams import owner_of
from redis_server import RedisServer
from server.asgi_driver import on_loop, settle
from server.log_servers import NamedGuard, sharing, text, writer_of, written
from server.socket_client import until


@on_loop
async def test_a_key_leads_to_the_stream_of_another_server(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b), a.chat(key="k") as first:
        await until(lambda: bool(a.engine.generations))
        a.engine.say("one ")
        await until(lambda: bool(first.sent))
        await written(a)
        async with b.chat(key="k") as second:
            await until(lambda: text(second.body) == "one ")
            assert b.engine.generations == []
            assert second.headers["x-headrace-stream"] == first.headers["x-headrace-stream"]
            a.engine.finish()
            await second.task
        await first.task
        assert second.body == first.body
        async with b.chat(key="k", seed=9) as other:
            await other.task
        assert other.status == 409


@on_loop
async def test_two_servers_that_are_asked_at_once_generate_once(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b), a.chat(key="k") as one, b.chat(key="k") as two:
        await until(lambda: bool(a.engine.generations or b.engine.generations))
        maker = a if a.engine.generations else b
        maker.engine.say("x")
        maker.engine.finish()
        await one.task
        await two.task
        assert len(a.engine.generations) + len(b.engine.generations) == 1
        assert one.body == two.body
        assert text(one.body) == "x"


@on_loop
async def test_a_key_whose_server_died_before_it_said_anything_is_soon_free(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a") as (a,):
        assert a.app.resuming.shared is not None
        store = a.app.resuming.shared.store
        assert await store.claim(key_hash(owner_of(ANYBODY), "k"), "gone", 0.2) == "gone"
        async with a.chat(key="k") as call:
            await until(call.task.done)
        assert (call.status, call.json()["error"]["code"]) == (409, "conflict")
        assert a.engine.generations == []
        async with a.chat(key="k") as again:
            await until(lambda: bool(a.engine.generations))
            a.engine.say("x")
            a.engine.finish()
            await again.task
        assert again.status == 200


class OnceFull(NamedGuard):
    """Refuses the first one."""

    refused = False

    async def admit(self, caller: Caller, ask: Any) -> Any:
        if not self.refused:
            self.refused = True
            raise RateLimited("too much", limit="requests", retry_after=1)
        return await super().admit(caller, ask)


@pytest.mark.parametrize("begun", [False, True])
@on_loop
async def test_a_key_whose_request_was_refused_is_free_at_once(redis_server: RedisServer, begun: bool) -> None:
    guard = OnceFull()
    guard.refused = begun
    async with sharing(redis_server, "a", "b", guard=guard) as (a, b):
        if begun:
            a.engine.refusal = EngineUnavailable("not now")
        async with a.chat(key="k") as call:
            await call.task
        assert call.status == (503 if begun else 429)
        async with b.chat(key="k") as again:
            await until(lambda: bool(b.engine.generations))
            b.engine.say("x")
            b.engine.finish()
            await again.task
        assert (again.status, again.headers["x-headrace-stream"]) == (200, "bs1")


@on_loop
async def test_a_stop_waits_for_who_goes_on_when_the_server_is_gone(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b):
        async with a.chat() as call:
            a.engine.say("x")
            await settle()
            await written(a)
            id = call.headers["x-headrace-stream"]
            await a.die()
        async with b.delete(id) as stop:
            await stop.task
        assert stop.json()["status"] == "stopping"
        async with b.get(id) as late:
            await late.task
        assert b"[DONE]" in late.body
        assert b'"ended":"stopped"' in late.body
        assert b.engine.live == {}


@on_loop
async def test_without_an_answer_of_redis_nobody_is_told_that_there_is_no_stream(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a") as (a,):
        assert a.app.resuming.shared is not None
        a.app.resuming.shared.store._shared.timeout_s = 0.1
        redis_server.signal(signal.SIGSTOP)
        try:
            for method in (a.get, a.delete):
                a.app.resuming.shared.store._shared._breaker.success()
                async with method("x") as call:
                    await until(call.task.done)
                assert call.status == 503
            async with a.chat(key="k") as new:
                await until(lambda: bool(a.engine.generations))
                a.engine.say("x")
                a.engine.finish()
                await new.task
            assert text(new.body) == "x"
        finally:
            redis_server.signal(signal.SIGCONT)


@on_loop
async def test_a_key_leads_to_its_stream_though_redis_lost_everything(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b") as (a, b), a.chat(key="k") as first:
        await until(lambda: bool(a.engine.generations))
        a.engine.say("one ")
        await written(a)
        assert a.app.resuming.shared is not None
        await a.app.resuming.shared.store._shared.client.flushall()
        a.engine.say("two ")
        (writing,) = writer_of(a)._writings.values()
        await until(lambda: writing.known is None)
        await written(a)
        async with b.chat(key="k") as second:
            await until(lambda: text(second.body) == "one two ")
            a.engine.finish()
            await second.task
        await first.task
        assert b.engine.generations == []


@on_loop
async def test_a_key_goes_over_to_who_goes_on_with_its_stream(redis_server: RedisServer) -> None:
    async with sharing(redis_server, "a", "b", "c") as (a, b, c):
        async with a.chat(key="k") as call:
            await until(lambda: bool(a.engine.generations))
            a.engine.say("one ")
            await until(lambda: call.status == 200)
            await written(a)
            await a.die()
            id = call.headers["x-headrace-stream"]
        async with b.get(id) as on:
            await until(lambda: bool(b.engine.generations))
            b.engine.say("two ")
            await until(lambda: text(on.body) == "one two ")
            await written(b)
            assert b.app.resuming.shared is not None
            client = b.app.resuming.shared.store._shared.client
            await client.delete(f"headrace:stream-key:{key_hash(owner_of(ANYBODY), 'k')}")
            b.engine.say("three ")
            await until(lambda: text(on.body).endswith("three "))
            await written(b)
            async with c.chat(key="k") as third:
                await until(lambda: text(third.body) == "one two three ")
                b.engine.finish()
                await third.task
            await on.task
        assert c.engine.generations == []
