"""Whoever was admitted closes its permit, and says how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.core.errors import Overloaded, RateLimited
from headrace.core.request import Ask
from headrace.gateway.guard import Caller, OpenGuard, Permit
from headrace.gateway.keyring_guard import estimate
from headrace.observe.record import Outcome
from server.asgi_driver import Client, on_loop, settle
from server.hand_engine import HandEngine, server


class Watching(OpenGuard):
    """Keeps what it was told; its own permit."""

    def __init__(self) -> None:
        self.admitted: list[str] = []
        self.sizes: list[int] = []
        """What was put by for each, in tokens."""
        self.closed: list[tuple[int, int, int, Outcome]] = []
        self.refusal: Exception | None = None

    async def identify(self, authorization: Sequence[bytes]) -> Caller:
        return Caller("ann", "salt", models=frozenset(("m", "gone")))

    async def admit(self, caller: Caller, ask: Ask) -> Permit:
        if self.refusal is not None:
            raise self.refusal
        self.admitted.append(f"{caller.name} {ask.model} {ask.salt}")
        self.sizes.append(estimate(ask))
        return self

    def close(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int, outcome: Outcome) -> None:
        self.closed.append((prompt_tokens, cached_tokens, completion_tokens, outcome))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("finish", (2, "ok")),
        ("leave", (1, "cancelled")),
        ("break", (1, "error")),
        ("refuse", (0, "rejected")),
        ("too long", (0, "invalid")),
        ("fault", (0, "error")),
        ("cancel", (1, "cancelled")),
    ],
)
@on_loop
async def test_however_it_ends(way: str, told: tuple[int, str], stream: bool) -> None:
    engine, guard = HandEngine(), Watching()
    app = server(engine, guard=guard)
    fields: dict[str, Any] = {"stream": stream}
    if way == "too long":
        fields["messages"] = [{"role": "user", "content": "x" * 2000}]
    if way in ("refuse", "fault"):
        engine.refusal = Overloaded("full") if way == "refuse" else RuntimeError("a fault")
    async with Client(app).chat(**fields) as call:
        if engine.generations:
            engine.admit(cached=1)
            engine.say("a")
            await settle()
        if way == "finish":
            engine.finish(tokens=2)
        elif way == "leave":
            call.hang_up()
        elif way == "break":
            engine.fail()
        elif way == "cancel":
            call.task.cancel()
        await asyncio.wait((call.task,))
    assert guard.admitted == ["ann m salt"]
    ((prompt, cached, completion, outcome),) = guard.closed
    assert (completion, outcome) == told
    assert cached == (1 if engine.generations else 0)
    assert (prompt > 0) == (way != "too long")


@on_loop
async def test_what_is_not_admitted_is_not_closed_and_reaches_no_engine() -> None:
    engine, guard = HandEngine(), Watching()
    app = server(engine, guard=guard)
    guard.refusal = RateLimited("slow down", retry_after=7, limit="tokens")
    async with Client(app).chat(stream=True) as call:
        await call.task
        assert (call.status, call.headers["retry-after"]) == (429, "7")
        assert call.json()["error"]["code"] == "rate_limit_exceeded"
    assert (guard.closed, engine.generations) == ([], [])
    assert b'headrace_limited_total{reason="tokens"} 1.0' in app.metrics.render()


@on_loop
async def test_a_model_that_is_another_key_s_is_forbidden_and_not_listed() -> None:
    engine, guard = HandEngine(), Watching()
    app = server(engine, guard=guard)
    async with Client(app).chat() as call:
        engine.finish()
        await asyncio.wait((call.task,))
        assert call.status == 200
    guard.identify = lambda authorization: _caller("other")  # type: ignore[method-assign]
    for call in (Client(app).chat(), Client(app).get("/v1/models/m")):
        async with call:
            await call.task
            assert call.status == 403
            error = call.json()["error"]
            assert (error["code"], error["param"]) == ("model_not_allowed", "model")
            assert error["message"] == "this key may not use that model; it may use: none that is served here"
    async with Client(app).get("/v1/models") as call:
        assert call.json()["data"] == []


async def _caller(model: str) -> Caller:
    return Caller("bob", models=frozenset((model,)))
