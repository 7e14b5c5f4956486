"""Other servers in the pool that a server has: loaded, probed, passed over when they are down."""

from __future__ import annotations

import asyncio
import time

from acceptance.asking import CHAT, Asking, on_loop
from acceptance.relay_scene import ALIAS
from headrace.gateway.health import FAILURES
from headrace.gateway.member import Starting
from headrace.gateway.pool import Pool
from headrace.gateway.spec import AliasSpec, EngineSpec
from headrace.gateway.states import State
from headrace.gateway.upstream import Upstream
from headrace.observe.accesslog import AccessLog
from headrace.observe.metrics import Metrics
from headrace.server.app import App
from server.socket_client import serving, until
from upstreams import Play, Request, chat_events, models, stream, upstream, whole


def build(spec: EngineSpec) -> Starting:
    return Upstream(spec.name, spec.url, spec.model, time.monotonic, flavour=spec.flavour)


@on_loop
async def test_an_alias_of_two_servers() -> None:
    broken = False

    def one(request: Request) -> Play:
        if request.path == "/v1/models":
            return models()
        if request.path == CHAT and not request.json["stream"]:
            return whole({"choices": []})  # the warming
        return Play([], "close") if broken else stream(chat_events(["a", "b"]))

    async with upstream(one) as a, upstream(lambda r: one(r) if r.path != CHAT or not broken else _other(r)) as b:
        pool = Pool(build, time.monotonic)
        for name, there in (("a", a), ("b", b)):
            pool.declare(EngineSpec(name, "openai", "up", "up", url=there.url, flavour="vllm"))
        pool.lead(AliasSpec(ALIAS, {"a": 1.0, "b": 1.0}))
        for name in ("a", "b"):
            await pool.load(name)
            assert pool.members[name].state is State.READY
        app = App(pool, Metrics({}), AccessLog(time.time))
        async with serving(app) as running, Asking(f"http://127.0.0.1:{running.port}", ALIAS, None).calls() as client:
            for _ in range(4):
                assert (await client.chat(stream=True)).text == "ab"
            assert (len(a.asked(CHAT)) > 1, len(b.asked(CHAT)) > 1) == (True, True)
            broken, before = True, len(a.asked(CHAT))
            for _ in range(20):
                answer = await client.chat(stream=True)
                assert answer.text == "other"
                assert answer.done
            tried = len(a.asked(CHAT)) - before
            assert 1 <= tried <= FAILURES + 1, "it is left alone after it failed, but for a trial"
        await pool.close()


@on_loop
async def test_a_full_engine_is_passed_over() -> None:
    gate = asyncio.Event()

    def held(request: Request) -> Play:
        if request.path == "/v1/models":
            return models()
        if not request.json["stream"]:
            return whole({"choices": []})  # the warming
        return stream(chat_events(["x", "y"]), gate=gate, gated=3)

    async with upstream(held) as a, upstream(held) as b:
        pool = Pool(build, time.monotonic)
        for name, there in (("a", a), ("b", b)):
            pool.declare(EngineSpec(name, "openai", "up", "up", url=there.url, flavour="vllm", max_concurrency=1))
        pool.lead(AliasSpec(ALIAS, {"a": 1.0, "b": 1.0}))
        for name in ("a", "b"):
            await pool.load(name)
        app = App(pool, Metrics({}), AccessLog(time.time))
        async with serving(app) as running, Asking(f"http://127.0.0.1:{running.port}", ALIAS, None).calls() as client:
            begun = [asyncio.create_task(client.chat(stream=True)) for _ in range(2)]
            await until(lambda: all(len(there.asked(CHAT)) == 2 for there in (a, b)))
            assert (await client.chat(stream=True)).status == 503, "both have all that they may"
            gate.set()
            assert [(await one).text for one in begun] == ["xy", "xy"]
            assert (await client.chat(stream=True)).text == "xy"
        await pool.close()


def _other(request: Request) -> Play:
    return stream(chat_events(["other"]))
