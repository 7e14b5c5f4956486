from __future__ import annotations

import itertools
import threading
from typing import Any

import msgspec
import pytest

from headrace.core.errors import ContextExceeded, InvalidRequest
from headrace.core.request import (
    BATCH,
    INTERACTIVE,
    ChatRequest,
    CompletionRequest,
    Decay,
    Message,
    Options,
    Sampling,
)
from headrace.server.model import LONG_TEXT, ServedModel
from server.asgi_driver import on_loop
from server.hand_engine import CONTROL, INFO, HandEngine, model


def served(**info: Any) -> ServedModel:
    return model(HandEngine(info=msgspec.structs.replace(INFO, **info)))


def chat(content: str, **options: Any) -> ChatRequest:
    return ChatRequest("m", (Message("user", content),), Options(**options))


def complete(*prompts: str | tuple[int, ...], echo: bool = False, special: bool = False, **options: Any) -> Any:
    return CompletionRequest("m", prompts, echo, special, Options(**options))


HI = [257, *b"user\nhi", 258, 257, *b"assistant"]


@on_loop
async def test_a_chat_is_rendered_and_becomes_one_generation() -> None:
    job = await served().chat(chat("hi", max_tokens=5, n=3, stop=("x",), cache=False), itertools.count(8))
    assert job.choices == 3
    assert job.prompt_tokens == len(HI)
    (generation,) = job.generations
    assert (generation.rid, generation.prompt, generation.max_tokens) == (8, HI, 5)
    assert (generation.n, generation.stop, generation.cache) == (3, ("x",), False)


@on_loop
async def test_priority_and_deadline_reach_every_generation() -> None:
    plain = await served().chat(chat("hi"), itertools.count())
    assert [(g.priority, g.deadline) for g in plain.generations] == [(INTERACTIVE, None)]
    asked = await served().completion(complete("ab", "cd", priority=BATCH, deadline=0.8), itertools.count())
    assert [(g.priority, g.deadline) for g in asked.generations] == [(BATCH, 0.8)] * 2
    sampling = Sampling(decay=Decay(10, 0.95, 0.4))
    falling = await served().chat(chat("hi", sampling=sampling), itertools.count())
    assert falling.generations[0].sampling == sampling


@on_loop
async def test_each_prompt_is_a_generation() -> None:
    job = await served().completion(complete("ab", (1, 2, 3), n=2), itertools.count(1))
    assert [generation.prompt for generation in job.generations] == [[*b"ab"], [1, 2, 3]]
    assert [generation.rid for generation in job.generations] == [1, 2]
    assert (job.choices, job.prompt_tokens) == (4, 5)


@on_loop
async def test_the_answer_may_have_what_the_context_leaves() -> None:
    one = served(n_ctx=len(HI) + 10)
    for asked, given in ((None, 10), (3, 3), (10, 10), (11, 10), (2**31 - 1, 10)):
        job = await one.chat(chat("hi", max_tokens=asked), itertools.count())
        assert job.generations[0].max_tokens == given


@pytest.mark.parametrize("n_ctx", [len(HI), len(HI) - 1, 4])
@on_loop
async def test_a_prompt_without_room_for_an_answer_names_both_numbers(n_ctx: int) -> None:
    with pytest.raises(ContextExceeded) as caught:
        await served(n_ctx=n_ctx).chat(chat("hi"), itertools.count())
    assert str(len(HI)) in caught.value.message
    assert str(n_ctx) in caught.value.message
    assert caught.value.param == "messages"
    with pytest.raises(ContextExceeded) as caught:
        await served(n_ctx=n_ctx).completion(complete("a" * n_ctx), itertools.count())
    assert caught.value.param == "prompt"


@on_loop
async def test_the_last_fit_leaves_one_token() -> None:
    job = await served(n_ctx=len(HI) + 1).chat(chat("hi"), itertools.count())
    assert job.generations[0].max_tokens == 1


@on_loop
async def test_one_prompt_too_long_refuses_all() -> None:
    rids = itertools.count(1)
    with pytest.raises(ContextExceeded):
        await served(n_ctx=10).completion(complete("ok", "x" * 20), rids)
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
        job = await one.completion(request, itertools.count())
        assert job.generations[0].prompt == prompt


@on_loop
async def test_no_tokens_at_all_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        await served().completion(complete(""), itertools.count())
    assert caught.value.param == "prompt"


@on_loop
async def test_echo_without_an_answer_asks_nothing_of_the_engine() -> None:
    request = complete("hi", (104, 256, 258), echo=True, n=2, max_tokens=0)
    job = await served(n_ctx=3).completion(request, itertools.count())
    assert job.generations == ()
    assert (job.choices, job.prompt_tokens) == (4, 5)
    assert job.echo == ("hi", "h<s><|im_end|>")


@on_loop
async def test_a_model_without_a_template_cannot_chat() -> None:
    one = model(HandEngine(), template=None)
    with pytest.raises(InvalidRequest) as caught:
        await one.chat(chat("hi"), itertools.count())
    assert caught.value.param == "messages"
    assert "/v1/completions" in caught.value.message


@on_loop
async def test_user_text_does_not_become_control_tokens() -> None:
    job = await served(n_ctx=1000).chat(chat("A<|im_end|>B"), itertools.count())
    assert sum(token in CONTROL.values() for token in job.generations[0].prompt) == 3


@on_loop
async def test_only_long_texts_go_to_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    one = served(n_ctx=10**6)
    threads: list[bool] = []
    prepare = one.prepare_chat

    def spy(request: ChatRequest) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return prepare(request)

    monkeypatch.setattr(one, "prepare_chat", spy)
    await one.chat(chat("x" * LONG_TEXT), itertools.count())
    await one.chat(chat("x" * (LONG_TEXT + 1)), itertools.count())
    assert threads == [True, False]
    one.close()


@on_loop
async def test_what_is_wrong_with_a_long_text_is_still_raised() -> None:
    one = served(n_ctx=10)
    with pytest.raises(ContextExceeded):
        await one.completion(complete("x" * (LONG_TEXT + 1)), itertools.count())
    one.close()
