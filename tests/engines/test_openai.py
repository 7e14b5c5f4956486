"""Requests to a scripted server: how they go out, how they are given up, and who never answers."""

from __future__ import annotations

import asyncio

import pytest

from engines.upstream_case import EVENTS, asking
from headrace.core.errors import StartupError, UpstreamFailed
from headrace.core.events import Answered, Broken, Relayed
from headrace.core.request import Ask, Options
from headrace.engines.answering import Sending
from headrace.engines.connections import Connections
from headrace.engines.openai import SWEEP_S, OpenAIServer, parse_url
from server.hand_engine import Hands
from server.socket_client import on_uvloop, until
from upstreams import Play, Request, chat_events, stream, whole


@on_uvloop
async def test_nobody_is_there() -> None:
    async with asking(lambda _: whole({})) as case:
        origin = case.server.connections.origin
    server = OpenAIServer(origin, "/v1", Hands())
    told: list[Answered] = []
    ask = Ask(True, "alias", {}, 1, Options(stream=True), 1)
    server.submit(Sending(1, ask, 1, "/v1/x", b""), told.append)
    await until(lambda: server.running == 0)
    assert isinstance(told[-1], Broken)
    assert "127.0.0.1" not in told[-1].error.message
    await server.close()
    with pytest.raises(UpstreamFailed, match="closed"):
        server.submit(Sending(2, ask, 1, "/v1/x", b""), told.append)
    assert server.running == server.ledger.pending == 0


@on_uvloop
async def test_a_silent_server_has_failed() -> None:
    async with asking(lambda _: stream(EVENTS[:2], end="stall"), silence_s=SWEEP_S) as case:
        case.submit()
        case.submit()
        await until(lambda: sum(isinstance(event, Relayed) and event.text == "a" for event in case.told) == 2)
        paused = next(iter(case.server.ledger.answers))
        case.server.pause(paused)
        case.clock.now += SWEEP_S
        case.server._sweep()
        assert case.server.running == 1
        assert isinstance(case.last(), Broken)
        case.server.resume(paused)  # the silence was ours
        case.server._sweep()
        assert case.server.running == 1
        case.clock.now += SWEEP_S
        case.server._sweep()
        await until(lambda: case.there.cut == 2)


@on_uvloop
async def test_a_client_that_leaves_cuts_the_connection() -> None:
    async with asking(lambda _: stream(EVENTS[:3], end="stall")) as case:
        rid = case.submit()
        await until(lambda: any(isinstance(event, Relayed) and event.text for event in case.told))
        told = len(case.told)
        case.server.cancel(rid)
        case.server.cancel(rid)
        assert case.server.running == 0
        await until(lambda: case.there.cut == 1 and case.there.open == 0)
        assert len(case.told) == told


@on_uvloop
async def test_it_leaves_before_the_answer_begins() -> None:
    async with asking(lambda _: Play([], "stall")) as case:
        rid = case.submit()
        await until(lambda: len(case.there.requests) == 1)
        case.server.cancel(rid)
        await until(lambda: case.there.cut == 1)
        assert [type(event) for event in case.told] == [Relayed]


@on_uvloop
async def test_closing_breaks_what_runs() -> None:
    async with asking(lambda _: stream(EVENTS[:2], end="stall")) as case:
        case.submit()
        await until(lambda: any(isinstance(event, Relayed) and event.text for event in case.told))
        await case.server.close()
        assert isinstance(case.last(), Broken)
        assert case.server.running == 0


@on_uvloop
async def test_a_slow_reader_holds_the_other_server() -> None:
    big = chat_events(["x" * 60_000] * 300)
    async with asking(lambda _: stream(big)) as case:
        rid = case.submit()
        case.server.pause(rid)
        for _ in range(300):
            await asyncio.sleep(0)
        assert not any(isinstance(event, Relayed) and event.text for event in case.told)
        case.server.resume(rid)
        await case.ended()
        assert sum(len(event.text) for event in case.told if isinstance(event, Relayed)) == 300 * 60_000


@on_uvloop
async def test_the_first_text_is_learned() -> None:
    async with asking(lambda _: stream(EVENTS)) as case:
        assert case.server.ledger.predict(100) == 0.0
        case.clock.step = 0.1
        case.submit()
        assert case.server.ledger.pending == 100
        await case.ended()
        assert case.server.ledger.pending == 0
        assert case.server.ledger.predict(100) > 0.0


# Small requests ───────────────────────────────────────────────────────────────────────────────────────────────────────


@on_uvloop
async def test_small_requests() -> None:
    def answer(request: Request) -> Play:
        return {"/v1/models": whole({"a": 1}, server="llama.cpp"), "/slow": Play([], "stall")}.get(
            request.path, Play([], "close")
        )

    async with asking(answer) as case:
        reply = await case.server.ask("GET", "/v1/models", timeout_s=20)
        assert (reply.status, reply.body, reply.server) == (200, b'{"a": 1}', "llama.cpp")
        with pytest.raises(UpstreamFailed, match=r"within 0\.01 s"):
            await case.server.ask("POST", "/slow", b"{}", timeout_s=0.01)
        with pytest.raises(UpstreamFailed, match="without an answer"):
            await case.server.ask("GET", "/x", timeout_s=20)
        await until(lambda: case.server.connections.running == 0)


# URLs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        ("http://a:8000/v1", "a:8000", "/v1"),
        ("http://a:8000", "a:8000", "/v1"),
        ("http://a/", "a", "/v1"),
        ("http://a/openai", "a", "/openai/v1"),
        ("http://a/v1beta/openai/", "a", "/v1beta/openai"),
        ("http://[::1]:80/v1/", "[::1]", "/v1"),
        ("https://a/v1", "a", "/v1"),
        ("https://a:8443/v1", "a:8443", "/v1"),
    ],
)
def test_urls(url: str, authority: str, path: str) -> None:
    origin, prefix = parse_url(url)
    assert (origin.authority, prefix) == (authority, path)
    assert (origin.tls is not None) == url.startswith("https")


@pytest.mark.parametrize(
    "url",
    [
        "", "a:80", "ftp://a", "http://", "http://u:p@a/v1", "http://:p@a/v1", "http://@a/v1", "http://a/v1?k=v",
        "http://a/v1?", "http://a/v1#x", "http://a/v1#", "http://a:x", "http://a\r\nb", "http://ä",
    ],
)  # fmt: skip
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(StartupError, match="url: should read") as caught:
        parse_url(url)
    assert ":p@" not in str(caught.value)


@pytest.mark.parametrize("key", ["a\r\nx: y", "a b", "ä"])
def test_a_key_that_is_no_header(key: str) -> None:
    origin, prefix = parse_url("http://a")
    with pytest.raises(StartupError) as caught:
        OpenAIServer(origin, prefix, Hands(), key=key)
    assert key not in caught.value.message
    assert isinstance(Connections(origin, Hands()), Connections)
