"""The stage for relayed answers: scripted upstreams, the real App and Service in front of them, a client.

    async with relaying(answer, other) as scene:        # engines "a" and "b" of one family behind one alias, "a" first
        got = await scene.ask()                         # a stream, read to its end

Rules: everything runs over loopback sockets; a scene ends with nothing left of it, neither a task nor a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from acceptance.asking import CHAT, COMP, Asking, Wire, chat_fields, comp_fields, dumps, events_of
from headrace.core.errors import EngineUnavailable, ModelNotFound, Unsupported
from headrace.core.request import Ask, Sampling
from headrace.gateway.backend import Backend, End, Lease
from headrace.gateway.model import ServedModel
from headrace.gateway.upstream import Upstream
from headrace.observe.accesslog import AccessLog
from headrace.observe.metrics import Metrics
from headrace.server.app import App
from headrace.server.stream import StreamLimits
from server.socket_client import Running, serving, until
from upstreams import Play, Request, Server, models, upstream, whole

ALIAS = "alias"
Answer = Callable[[Request], Play]


class OneLease:
    ttft_timeout_s: float | None = None
    family = "f"

    def __init__(self, engine: str, backend: Backend, ends: list[tuple[str, End]]) -> None:
        self.engine = engine
        self.backend = backend
        self._ends = ends
        self._open = True

    def first_text(self, seconds: float) -> None:
        assert seconds >= 0

    def close(self, end: End) -> None:
        if self._open:
            self._open = False
            self._ends.append((self.engine, end))


class Chain:
    """A fleet of one alias: its engines in order, all of one family."""

    def __init__(self, engines: dict[str, Upstream]) -> None:
        self.engines = engines
        self.ends: list[tuple[str, End]] = []

    @property
    def aliases(self) -> Collection[str]:
        return (ALIAS,)

    @property
    def backends(self) -> Mapping[str, Backend]:
        return self.engines

    def created(self, alias: str) -> int:
        return 7

    def sampling(self, alias: str) -> Sampling | None:
        return None

    def ready(self, alias: str) -> bool:
        return any(engine.ready for engine in self.engines.values())

    def lease(self, ask: Ask, *, without: Collection[str] = (), family: str | None = None) -> Lease:
        if ask.model != ALIAS:
            raise ModelNotFound("no such model", param="model")
        for name, engine in self.engines.items():
            if name not in without and engine.ready and family in (None, OneLease.family):
                return OneLease(name, engine, self.ends)
        raise EngineUnavailable("there is no other engine")

    def others(self, ask: Ask, *, without: Collection[str]) -> bool:
        return bool(self.engines.keys() - set(without))

    def own(self, alias: str) -> ServedModel:
        raise Unsupported("nobody tells tokens", param="model")

    async def close(self) -> None:
        for engine in self.engines.values():
            await engine.close()


@dataclass
class Got:
    """What a client has of one answer."""

    status: int
    body: bytes

    @property
    def events(self) -> list[Any]:
        """Decoded; "[DONE]" as it is."""
        return ["[DONE]" if data == b"[DONE]" else json.loads(data) for data in events_of(self.body)]

    @property
    def chunks(self) -> list[Any]:
        return [event for event in self.events if event != "[DONE]" and "error" not in event]

    @property
    def text(self) -> str:
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return "".join(choice.get("text", (choice.get("delta") or {}).get("content")) or "" for choice in choices)

    @property
    def finish(self) -> list[str]:
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]

    def check_whole(self, text: str) -> None:
        """All of it, once, and nothing else."""
        assert self.status == 200, self
        assert self.text == text, self
        assert self.events.count("[DONE]") == 1
        assert self.body.endswith(b"data: [DONE]\n\n")
        assert not any(event != "[DONE]" and "error" in event for event in self.events)
        assert self.finish == ["stop"]
        self.check_shape()

    def check_broken(self, text: str) -> None:
        """A beginning of it, and then one error; or nothing, and an honest status."""
        if self.status != 200:
            assert self.status == 502, self
            assert json.loads(self.body)["error"]["code"] == "upstream_failed"
            return
        assert text.startswith(self.text), self
        assert "[DONE]" not in self.events
        assert [event for event in self.events if "error" in event] == self.events[-1:]
        assert self.finish == []
        self.check_shape()

    def check_shape(self) -> None:
        """One identity, the alias's name, one role, which is first."""
        assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in self.chunks}) == 1
        assert {chunk["model"] for chunk in self.chunks} == {ALIAS}
        roles = ["role" in (choice.get("delta") or {}) for chunk in self.chunks for choice in chunk["choices"]]
        assert not any(roles[1:])


class Scene(Asking):
    """A running server in front of upstreams."""

    def __init__(self, running: Running, app: App, fleet: Chain, there: dict[str, Server]) -> None:
        super().__init__(f"http://127.0.0.1:{running.port}", ALIAS, None)
        self.running = running
        self.app = app
        self.fleet = fleet
        self.there = there
        self._wire: Wire | None = None

    async def connect(self) -> Wire:
        wire = await Wire.open(self.running.port, ALIAS, None)
        self.running.connections.append(wire)
        return wire

    async def ask(self, path: str = CHAT, **fields: Any) -> Got:
        """One request, its answer read to its end; on a connection that is kept."""
        if self._wire is None:
            self._wire = await self.connect()
        wire = self._wire
        make = chat_fields if path == CHAT else comp_fields
        await wire.request("POST", path, dumps(make(ALIAS, {"stream": True, **fields})))
        status, headers = await wire.head()
        if "content-length" in headers:
            return Got(status, await wire.reader.readexactly(int(headers["content-length"])))
        body = b""
        while chunk := await wire.chunk():
            body += chunk
        return Got(status, body)

    async def idle(self) -> None:
        """Nothing is left of any request."""
        await until(lambda: self.app.running == 0)
        assert self.app.metrics.open_streams == 0
        assert not self.app.ticker.running
        for name, engine in self.fleet.engines.items():
            connections = engine.server.connections
            await until(lambda: connections.running == 0)  # noqa: B023
            assert engine.stats.running == 0
            assert engine.server.ledger.pending == 0
            assert not connections._tasks
            there = self.there[name]
            await until(lambda: there.open == connections.idle)  # noqa: B023


@contextlib.asynccontextmanager
async def relaying(
    *answers: Answer, flavour: str = "vllm", limits: StreamLimits | None = None, **how: Any
) -> AsyncIterator[Scene]:
    """A server in front of one upstream for each of `answers`. `how`: further arguments of `Upstream`."""
    gc.freeze()
    async with contextlib.AsyncExitStack() as stack:
        there: dict[str, Server] = {}
        engines: dict[str, Upstream] = {}
        for name, answer in zip("abc", answers, strict=False):
            there[name] = await stack.enter_async_context(upstream(_with_models(answer)))
            engines[name] = Upstream(name, there[name].url, "up", time.monotonic, flavour=flavour, **how)
            await engines[name].start()
        fleet = Chain(engines)
        ids = itertools.count(1)
        app = App(
            fleet,
            Metrics({}),
            AccessLog(time.time),
            limits=limits,
            new_id=lambda: f"id{next(ids)}",
        )
        async with serving(app) as running:
            scene = Scene(running, app, fleet, there)
            async with scene.calls():
                tasks = len(asyncio.all_tasks())
                yield scene
                await scene.idle()
                await until(lambda: len(asyncio.all_tasks()) <= tasks + sum(s.open for s in there.values()) + 2)
        await fleet.close()
    gc.unfreeze()


def _with_models(answer: Answer) -> Answer:
    return lambda request: models() if request.path == "/v1/models" else answer(request)


def continuing(truth: str, play: Callable[[list[str]], Play]) -> Answer:
    """A vLLM that says what is left of `truth` after what a completion's prompt brings of it. A token is a byte; the
    prompt is "hi", or one token for the messages."""

    def answer(request: Request) -> Play:
        given = request.json
        if request.path == "/tokenize":
            ids = [1] if "messages" in given else list(given["prompt"].encode())
            return whole({"tokens": ids, "count": len(ids), "max_model_len": 1000})
        assert request.path == COMP
        prompt = given["prompt"]
        told = bytes(prompt[1:]).decode() if isinstance(prompt, list) else prompt.removeprefix("hi")
        assert truth.startswith(told), (told, truth)
        return play(list(truth[len(told) :]))

    return answer
