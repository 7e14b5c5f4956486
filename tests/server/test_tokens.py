from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import RateLimited
from server.asgi_driver import Client, on_loop
from server.hand_engine import HandEngine, model, server
from server.hand_fleet import HandFleet, fleet_server
from server.test_app_permits import Watching
from server.test_attempts import HandUpstream


@on_loop
async def test_the_tokens_of_a_chat_and_of_a_text_are_told() -> None:
    app = server(HandEngine())
    chat = [257, *b"user\nhi", 258, 257, *b"assistant"]
    for fields, tokens in (
        ({"messages": [{"role": "user", "content": "hi"}]}, chat),
        ({"prompt": "hi"}, [*b"hi"]),
        ({"prompt": "<s>hi"}, [256, *b"hi"]),
        ({"prompt": "<s>hi", "add_special_tokens": False}, [*b"<s>hi"]),
    ):
        async with Client(app).post("/tokenize", {"model": "m", **fields}) as call:
            await call.task
            assert call.json() == {"count": len(tokens), "max_model_len": 1000, "tokens": tokens}


@pytest.mark.parametrize("fields", [{}, {"prompt": [1]}, {"prompt": "a", "messages": []}, {"messages": [1]}])
@on_loop
async def test_what_has_no_tokens_is_refused(fields: dict[str, Any]) -> None:
    async with Client(server(HandEngine())).post("/tokenize", {"model": "m", **fields}) as call:
        await call.task
        assert call.status == 400


@on_loop
async def test_beside_another_server_ours_is_asked_and_none_is_tried() -> None:
    fleet = HandFleet({"other": HandUpstream(), "ours": model(HandEngine())})
    for _ in range(3):
        async with Client(fleet_server(fleet)).post("/tokenize", {"model": "m", "prompt": "hi"}) as call:
            await call.task
            assert (call.status, call.json()["tokens"]) == (200, [*b"hi"])
    assert fleet.leases == []


@on_loop
async def test_where_there_are_only_other_servers_it_cannot_be_told() -> None:
    fleet = HandFleet({"other": HandUpstream()})
    async with Client(fleet_server(fleet)).post("/tokenize", {"model": "m", "prompt": "hi"}) as call:
        await call.task
        assert (call.status, call.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(("prompt", "outcome"), [("hi", "ok"), (3, "invalid")])
@on_loop
async def test_it_is_a_request_of_its_key_that_costs_no_tokens(prompt: Any, outcome: str) -> None:
    guard = Watching()
    async with Client(server(HandEngine(), guard=guard)).post("/tokenize", {"model": "m", "prompt": prompt}) as call:
        await call.task
    assert guard.admitted == ["ann m salt"]
    assert guard.closed == [(0, 0, 0, outcome)]
    assert guard.sizes == [0]


@on_loop
async def test_a_key_over_its_limit_is_refused() -> None:
    guard = Watching()
    guard.refusal = RateLimited("too fast", retry_after=3)
    async with Client(server(HandEngine(), guard=guard)).post("/tokenize", {"model": "m", "prompt": "hi"}) as call:
        await call.task
        assert call.status == 429
    assert guard.closed == []
