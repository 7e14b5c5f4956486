from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from headrace.core.errors import ContextExceeded, EngineUnavailable, InvalidRequest, Unsupported
from headrace.core.request import (
    BATCH,
    INTERACTIVE,
    Ask,
    ChatRequest,
    CompletionRequest,
    Decay,
    Message,
    Options,
    Sampling,
    Told,
)
from headrace.gateway.model import LONG_TEXT, ServedModel
from server.asgi_driver import on_loop
from server.hand_engine import CONTROL, INFO, HandEngine, model


def served(**info: Any) -> ServedModel:
    return model(HandEngine(info=msgspec.structs.replace(INFO, **info)))


async def prepared(one: ServedModel, request: ChatRequest | CompletionRequest, rids: Iterator[int]) -> Any:
    ask = Ask(isinstance(request, ChatRequest), "m", {}, 0, request.options, 42)
    return await one.prepare(ask, request, rids)


def chat(content: str, **options: Any) -> ChatRequest:
    return ChatRequest("m", (Message("user", content),), Options(**options))


def complete(*prompts: str | tuple[int, ...], echo: bool = False, special: bool = False, **options: Any) -> Any:
    return CompletionRequest("m", prompts, echo, special, Options(**options))


HI = [257, *b"user\nhi", 258, 257, *b"assistant"]


@on_loop
async def test_a_chat_is_rendered_and_becomes_one_generation() -> None:
    job = await prepared(served(), chat("hi", max_tokens=5, n=3, stop=("x",), cache=False), itertools.count(8))
    assert job.choices == 3
    assert job.prompt_tokens == len(HI)
    (generation,) = job.parts
    assert (generation.rid, generation.prompt, generation.max_tokens) == (8, HI, 5)
    assert (generation.n, generation.stop, generation.cache) == (3, ("x",), False)


@on_loop
async def test_priority_and_deadline_reach_every_generation() -> None:
    plain = await prepared(served(), chat("hi"), itertools.count())
    assert [(g.priority, g.deadline) for g in plain.parts] == [(INTERACTIVE, None)]
    asked = await prepared(served(), complete("ab", "cd", priority=BATCH, deadline=0.8), itertools.count())
    assert [(g.priority, g.deadline) for g in asked.parts] == [(BATCH, 0.8)] * 2
    sampling = Sampling(decay=Decay(10, 0.95, 0.4))
    falling = await prepared(served(), chat("hi", sampling=sampling), itertools.count())
    assert falling.parts[0].sampling == sampling


@on_loop
async def test_each_prompt_is_a_generation() -> None:
    job = await prepared(served(), complete("ab", (1, 2, 3), n=2), itertools.count(1))
    assert [generation.prompt for generation in job.parts] == [[*b"ab"], [1, 2, 3]]
    assert [generation.rid for generation in job.parts] == [1, 2]
    assert (job.choices, job.prompt_tokens) == (4, 5)


@on_loop
async def test_the_answer_may_have_what_the_context_leaves() -> None:
    one = served(n_ctx=len(HI) + 10)
    for asked, given in ((None, 10), (3, 3), (10, 10), (11, 10), (2**31 - 1, 10)):
        job = await prepared(one, chat("hi", max_tokens=asked), itertools.count())
        assert job.parts[0].max_tokens == given


@pytest.mark.parametrize("n_ctx", [len(HI), len(HI) - 1, 4])
@on_loop
async def test_a_prompt_without_room_for_an_answer_names_both_numbers(n_ctx: int) -> None:
    with pytest.raises(ContextExceeded) as caught:
        await prepared(served(n_ctx=n_ctx), chat("hi"), itertools.count())
    assert str(len(HI)) in caught.value.message
    assert str(n_ctx) in caught.value.message
    assert caught.value.param == "messages"
    with pytest.raises(ContextExceeded) as caught:
        await prepared(served(n_ctx=n_ctx), complete("a" * n_ctx), itertools.count())
    assert caught.value.param == "prompt"


@on_loop
async def test_the_last_fit_leaves_one_token() -> None:
    job = await prepared(served(n_ctx=len(HI) + 1), chat("hi"), itertools.count())
    assert job.parts[0].max_tokens == 1


@on_loop
async def test_one_prompt_too_long_refuses_all() -> None:
    rids = itertools.count(1)
    with pytest.raises(ContextExceeded):
        await prepared(served(n_ctx=10), complete("ok", "x" * 20), rids)
    assert next(rids) == 1, "no generation was made"


@on_loop
async def test_bos_is_put_before_raw_text_once() -> None:
    one = served(add_bos=True)
    for request, prompt in (
        (complete("hi"), [256, *b"hi"]),
        (complete("<s>hi"), [256, *b"hi"]),
        (complete(""), [256]),
        (complete((104, 105)), [104, 105]),
    ):
        job = await prepared(one, request, itertools.count())
        assert job.parts[0].prompt == prompt


@on_loop
async def test_no_tokens_at_all_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        await prepared(served(), complete(""), itertools.count())
    assert caught.value.param == "prompt"


@on_loop
async def test_echo_without_an_answer_asks_nothing_of_the_engine() -> None:
    request = complete("hi", (104, 256, 258), echo=True, n=2, max_tokens=0)
    job = await prepared(served(n_ctx=3), request, itertools.count())
    assert job.parts == ()
    assert (job.choices, job.prompt_tokens) == (4, 5)
    assert job.echo == ("hi", "h<s><|im_end|>")


@on_loop
async def test_a_model_without_a_template_cannot_chat() -> None:
    one = model(HandEngine(), template=None)
    with pytest.raises(Unsupported) as caught:
        await prepared(one, chat("hi"), itertools.count())
    assert caught.value.param == "messages"
    assert "/v1/completions" in caught.value.message


@on_loop
async def test_user_text_does_not_become_control_tokens() -> None:
    job = await prepared(served(n_ctx=1000), chat("A<|im_end|>B"), itertools.count())
    assert sum(token in CONTROL.values() for token in job.parts[0].prompt) == 3


@on_loop
async def test_only_long_texts_go_to_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    one = served(n_ctx=10**6)
    threads: list[bool] = []
    prepare = one.prepare_chat

    def spy(request: ChatRequest) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return prepare(request)

    monkeypatch.setattr(one, "prepare_chat", spy)
    await prepared(one, chat("x" * LONG_TEXT), itertools.count())
    await prepared(one, chat("x" * (LONG_TEXT + 1)), itertools.count())
    assert threads == [True, False]
    await one.close()


@on_loop
async def test_what_is_wrong_with_a_long_text_is_still_raised() -> None:
    one = served(n_ctx=10)
    with pytest.raises(ContextExceeded):
        await prepared(one, complete("x" * (LONG_TEXT + 1)), itertools.count())
    await one.close()


# Going on ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def continued(told: Told, **options: Any) -> Any:
    request = chat("hi", **options)
    ask = Ask(True, "m", {}, 0, request.options, 42, told=told)
    return await served().prepare(ask, request, itertools.count())


@on_loop
async def test_an_answer_is_continued_from_its_tokens_or_from_its_text() -> None:
    for ids in ((97, 98), None):
        work = await continued(Told("ab", ids, 2), max_tokens=5)
        assert work.parts[0].resume == ((97, 98),)
        assert work.hidden == 0


@on_loop
async def test_an_answer_that_has_all_its_tokens_is_complete() -> None:
    work = await continued(Told("ab", (97, 98), 2), max_tokens=2)
    assert (work.parts, work.reason) == ((), "length")
    work = await continued(Told("a", tuple(b"a<end>"), 6), stop=("<end>",))
    assert (work.parts, work.reason) == ((), "stop")


@on_loop
async def test_what_was_not_shown_of_a_complete_answer_cannot_be_made_up() -> None:
    with pytest.raises(EngineUnavailable):
        await continued(Told("a", tuple(b"a<"), 2), stop=("<end>",), max_tokens=2)
    with pytest.raises(EngineUnavailable):
        await continued(Told("x", (97,), 1))


# Sampling ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chat", [True, False])
def test_the_models_own_sampling_holds_unless_the_answer_was_begun_with_another(chat: bool) -> None:
    one = model(HandEngine(), sampling=Sampling(temperature=0.2, top_k=40))
    fields = {"model": "m", "top_p": 0.5, "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    ask = Ask(chat, "m", fields, 0, Options(), 42)
    assert one.parse(ask).options.sampling == Sampling(0.2, 0.5, 40, seed=42)
    begun = replace(ask, told=Told("a", (97,), 1), sampling=Sampling(0.7, 0.5, seed=42))
    assert one.parse(begun).options.sampling == Sampling(0.7, 0.5, seed=42)
