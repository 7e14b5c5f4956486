"""An upstream as a backend: start, warm, probe, prepare, limits; against scripted servers of every flavour."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from headrace.core.errors import EngineUnavailable, StartupError, UpstreamFailed
from headrace.core.events import Answered, Broken
from headrace.core.request import Ask, Call, Told
from headrace.engines.answering import Sending
from headrace.gateway.backend import Backend
from headrace.gateway.upstream import Upstream
from headrace.protocol.openai import common_options
from server.hand_engine import Hands
from server.socket_client import on_uvloop, until
from upstreams import Play, Request, Server, chat_events, models, stream, upstream, whole

MESSAGES = [{"role": "user", "content": "hi"}]


def make(url: str, **how: Any) -> Upstream:
    return Upstream("u", url, "up", Hands(), **how)


@contextlib.asynccontextmanager
async def started(
    answer: Callable[[Request], Play], owned_by: str = "vllm", **how: Any
) -> AsyncIterator[tuple[Server, Upstream]]:
    def all_of_it(request: Request) -> Play:
        return models(owned_by) if request.path == "/v1/models" else answer(request)

    async with upstream(all_of_it) as there:
        backend = make(there.url, **how)
        assert not backend.ready
        await backend.start()
        try:
            yield there, backend
        finally:
            await backend.close()
            assert not backend.ready
            assert backend.stats.running == 0


def ask(chat: bool = True, told: Told | None = None, **fields: Any) -> Ask:
    given = {"model": "alias", "stream": True, **({"messages": MESSAGES} if chat else {"prompt": "hi"}), **fields}
    return Ask(chat, "alias", given, 100, common_options(given), 1, told=told)


async def prepared(backend: Upstream, request: Ask) -> Sending:
    work = await backend.prepare(request, backend.parse(request), itertools.count(1))
    (part,) = work.parts
    assert isinstance(part, Sending)
    assert isinstance(part, Call)
    assert (work.choices, work.prompt_tokens, work.options, work.echo) == (part.n, 0, None, ())
    return part


@pytest.mark.parametrize(
    ("owned_by", "flavour", "probe"),
    [
        ("vllm", "vllm", "/health"),
        ("sglang", "sglang", "/health"),
        ("llamacpp", "llama-server", "/health"),
        ("library", "ollama", "/v1/models"),
        ("headrace", "headrace", "/readyz"),
        ("system", "openai", "/v1/models"),
    ],
)
def test_a_server_is_known_by_its_list_of_models(owned_by: str, flavour: str, probe: str) -> None:
    @on_uvloop
    async def play() -> None:
        async with started(lambda _: whole({}), owned_by) as (there, backend):
            kept: Backend = backend
            assert kept.kind == "openai"
            assert (backend.flavour, backend.created, backend.ready) == (flavour, 5, True)
            assert await backend.probe()
            assert there.requests[-1].path == probe

    play()


@on_uvloop
async def test_a_given_flavour_is_not_questioned() -> None:
    async with started(lambda _: whole({}), "vllm", flavour="openai") as (_, backend):
        assert backend.flavour == "openai"


@on_uvloop
async def test_a_list_that_says_nothing() -> None:
    plays = [whole({}, server="llama.cpp"), whole(b"<html>"), whole({"data": [{"id": "x", "owned_by": "sglang"}]})]
    plays.append(whole({}, 404))
    async with upstream(lambda _: plays.pop(0)) as there:
        found = []
        for _ in range(4):
            backend = make(there.url)
            await backend.start()
            found.append(backend.flavour)
            await backend.close()
        assert found == ["llama-server", "openai", "sglang", "openai"]


@pytest.mark.parametrize(
    "play", [whole({}, 401), whole({}, 503), whole({}, 308, location="https://x"), Play([], "close")]
)
def test_a_server_that_is_no_use(play: Play) -> None:
    @on_uvloop
    async def run() -> None:
        async with upstream(lambda _: play) as there:
            backend = make(there.url, key="sk-secret")
            with pytest.raises(StartupError, match="engine u: ") as caught:
                await backend.start()
            assert "sk-" not in caught.value.message
            assert not await backend.probe()
            assert not backend.ready
            await backend.close()

    run()


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(StartupError, match="flavour"):
        make("http://x", flavour="sloth")
    with pytest.raises(StartupError, match="url"):
        make("x")


@on_uvloop
async def test_warming_asks_for_one_token() -> None:
    async with started(lambda _: whole({"choices": []})) as (there, backend):
        await backend.warm()
        assert there.requests[-1].path == "/v1/chat/completions"
        assert there.requests[-1].json["max_tokens"] == 1


@on_uvloop
async def test_warming_a_model_that_cannot_chat() -> None:
    chat = whole({"error": {"message": "no template"}}, 400)
    async with started(lambda request: chat if "chat" in request.path else whole({})) as (there, backend):
        await backend.warm()
        assert there.requests[-1].path == "/v1/completions"
    async with started(lambda _: chat) as (_, backend):
        with pytest.raises(StartupError, match="no template"):
            await backend.warm()
    async with started(lambda _: whole({}, 500)) as (_, backend):
        with pytest.raises(StartupError, match="500"):
            await backend.warm()


@on_uvloop
async def test_a_request_from_the_beginning() -> None:
    async with started(lambda _: stream(chat_events(["a"]))) as (there, backend):
        sending = await prepared(backend, ask())
        told: list[Answered] = []
        backend.submit(sending, told.append)
        assert backend.stats.running == 1
        await until(lambda: backend.stats.running == 0)
        assert told[-1].over  # type: ignore[union-attr]
        assert there.requests[-1].json["model"] == "up"
        assert (await prepared(backend, ask(False, n=2))).path == "/v1/completions"


@on_uvloop
async def test_who_leaves_leaves_nothing_there() -> None:
    async with started(lambda _: Play([], "stall")) as (there, backend):
        first = await prepared(backend, ask())
        told: list[Answered] = []
        backend.submit(first, told.append)
        backend.pause(first.rid)
        backend.resume(first.rid)
        backend.cancel(first.rid)
        await until(lambda: there.open == 0)
        assert backend.predict(1000, 0.0, 0) == 0.0


@on_uvloop
async def test_after_closing_nothing_is_taken() -> None:
    async with started(lambda _: Play([], "stall")) as (_, backend):
        sending = await prepared(backend, ask())
        told: list[Answered] = []
        backend.submit(sending, told.append)
        await backend.close()
        assert isinstance(told[-1], Broken)
        assert isinstance(told[-1].error, UpstreamFailed)
        with pytest.raises(EngineUnavailable):
            backend.submit(sending, told.append)


# Continuing ───────────────────────────────────────────────────────────────────────────────────────────────────────────

TOLD = Told("ab", None, 2)


def vllm(request: Request) -> Play:
    """/tokenize of vLLM, a token a byte."""
    given = request.json
    if "messages" in given:
        assert given["add_generation_prompt"]
        return whole({"count": 3, "max_model_len": 50, "tokens": [7, 8, 9]})
    assert not given["add_special_tokens"]
    return whole({"count": 2, "max_model_len": 50, "tokens": list(given["prompt"].encode())})


@on_uvloop
async def test_vllm_goes_on_from_token_ids() -> None:
    async with started(vllm) as (there, backend):
        sending = await prepared(backend, ask(told=TOLD))
        assert sending.path == "/v1/completions"
        body = Request("", "", {}, sending.body).json
        assert body["prompt"] == [7, 8, 9, 97, 98]
        assert body["max_tokens"] == 45
        assert [request.path for request in there.requests[1:]] == ["/tokenize"] * 2
        known = await prepared(backend, ask(told=Told("ab", (1, 2), 2, exact=True), max_tokens=5))
        body = Request("", "", {}, known.body).json
        assert (body["prompt"], body["max_tokens"]) == ([7, 8, 9, 1, 2], 3)
        # The third token is the beginning of a stop string, or of a character: its reader has not seen it.
        behind = await prepared(backend, ask(told=Told("ab", (1, 2, 3), 3), max_tokens=5))
        assert Request("", "", {}, behind.body).json["prompt"] == [7, 8, 9, 97, 98]
        unseen = await prepared(backend, ask(told=Told("", (3,), 1)))
        assert Request("", "", {}, unseen.body).json["prompt"] == [7, 8, 9]
        nothing = await prepared(backend, ask(told=Told("", None, 0)))
        assert Request("", "", {}, nothing.body).json["prompt"] == [7, 8, 9]
        ids = await prepared(backend, ask(False, told=TOLD, prompt=[5, 6]))
        assert Request("", "", {}, ids.body).json["prompt"] == [5, 6, 97, 98]


@on_uvloop
async def test_llama_server_goes_on_from_text() -> None:
    def answer(request: Request) -> Play:
        return whole({"prompt": "<u>hi<a>"} if request.path == "/apply-template" else {"tokens": [3]})

    async with started(answer, "llamacpp") as (_, backend):
        sending = await prepared(backend, ask(told=TOLD))
        body = Request("", "", {}, sending.body).json
        assert body["prompt"] == "<u>hi<a>ab"
        assert "max_tokens" not in body
        ids = await prepared(backend, ask(False, told=TOLD, prompt=[5]))
        assert Request("", "", {}, ids.body).json["prompt"] == [5, 3]


@pytest.mark.parametrize("owned_by", ["vllm", "llamacpp", "library", "sglang", "headrace"])
def test_completions_go_on_nearly_everywhere(owned_by: str) -> None:
    @on_uvloop
    async def play() -> None:
        async with started(lambda _: Play([], "close"), owned_by) as (_, backend):
            sending = await prepared(backend, ask(False, told=TOLD))
            assert Request("", "", {}, sending.body).json["prompt"] == "hiab"

    play()


@pytest.mark.parametrize(
    ("owned_by", "request_", "play"),
    [
        ("openai", ask(False, told=TOLD), None),
        ("library", ask(told=TOLD), None),
        ("sglang", ask(told=TOLD), None),
        ("sglang", ask(False, told=TOLD, prompt=[1]), None),
        ("vllm", ask(told=TOLD, n=2), None),
        ("vllm", ask(told=TOLD), whole({}, 404)),
        ("vllm", ask(told=TOLD), whole({}, 500)),
        ("vllm", ask(told=TOLD), whole({"error": {"message": "x", "param": "y"}}, 400)),
        ("vllm", ask(told=TOLD), whole({"count": 1})),
        ("vllm", ask(told=TOLD), whole(b"<html>")),
        ("vllm", ask(told=TOLD), Play([], "close")),
        ("vllm", ask(told=TOLD, max_tokens=2), whole({"tokens": [1]})),
    ],
)
def test_where_it_cannot_go_on(owned_by: str, request_: Ask, play: Play | None) -> None:
    @on_uvloop
    async def run() -> None:
        async with started(lambda _: play or Play([], "close"), owned_by) as (_, backend):
            with pytest.raises(EngineUnavailable):
                await prepared(backend, request_)

    run()
