"""Bodies that go to another server, and how a begun answer goes on there."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from headrace.core.errors import EngineUnavailable
from headrace.core.request import BATCH, Ask, Sampling, Told
from headrace.protocol.continuation import (
    FLAVOURS,
    check_continuable,
    choices,
    encoded,
    going_on,
    outgoing,
    prompt_of,
    rendered,
    rendering,
    tokenizing,
)
from headrace.protocol.openai import common_options, read

MESSAGES = [{"role": "user", "content": "hi"}]


def ask(chat: bool = True, **fields: Any) -> Ask:
    """As the server makes it from these fields."""
    given = {"model": "alias", **({"messages": MESSAGES} if chat else {"prompt": "hi"}), **fields}
    return Ask(chat, "alias", given, 100, common_options(given), 1)


def test_a_request_goes_out_as_it_came() -> None:
    body = json.loads(outgoing(ask(temperature=0.5, tools=[{"x": 1}], unknown={"a": None}), "up", "vllm"))
    assert body == {
        "model": "up", "messages": MESSAGES, "temperature": 0.5, "tools": [{"x": 1}], "unknown": {"a": None},
    }  # fmt: skip


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_is_always_asked_for(options: Any) -> None:
    body = json.loads(outgoing(ask(stream=True, stream_options=options), "up", "openai"))
    assert body["stream_options"] == {"include_usage": True}
    extra = {"continuous_usage_stats": True, "include_obfuscation": False}
    body = json.loads(outgoing(ask(stream=True, stream_options=extra), "up", "openai"))
    assert body["stream_options"] == {"include_usage": True, "include_obfuscation": False}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_our_own_object_is_for_us(flavour: Any) -> None:
    ours = {"resume": True, "timings": True, "pace": "off", "pace_max_delay_ms": 5, "cache": False}
    body = json.loads(outgoing(ask(headrace=ours), "up", flavour))
    assert body.get("headrace") == ({"cache": False} if flavour == "headrace" else None)
    assert "headrace" not in json.loads(outgoing(ask(headrace={"resume": True}), "up", flavour))


def bodies(request: Ask, flavour: Any) -> list[Any]:
    """From the beginning, and going on."""
    return [json.loads(outgoing(request, "up", flavour)), json.loads(going_on(request, TOLD, "up", flavour, "x", 99))]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_tenants_do_not_see_each_others_prefixes(flavour: Any) -> None:
    """Nor does a caller choose whose it sees."""
    chosen = ask(cache_salt="bob's", extra_key="bob's", stream=True)
    for body in bodies(chosen, flavour):
        assert not {"cache_salt", "extra_key"} & set(body)
    alice, bob = (bodies(replace(chosen, salt=salt), flavour) for salt in ("key:alice", "key:bob"))
    for one, other in zip(alice, bob, strict=True):
        assert "extra_key" not in one
        assert "alice" not in str(one)
        if flavour in ("vllm", "sglang"):
            assert len(one["cache_salt"]) == 32
            assert one["cache_salt"] != other["cache_salt"]
        else:
            assert "cache_salt" not in one
    assert alice[0].get("cache_salt") == alice[1].get("cache_salt")


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_class_is_that_of_the_key(flavour: Any) -> None:
    """Whatever the caller says; its options are what came of both."""
    for ours in ({"priority": "interactive", "cache": False}, None):
        request = ask(priority=-5, headrace=ours)
        for body in bodies(replace(request, options=replace(request.options, priority=BATCH)), flavour):
            assert "priority" not in body
            kept = {"priority": "batch"} if ours is None else {"priority": "batch", "cache": False}
            assert body.get("headrace") == (kept if flavour == "headrace" else None)
        for body in bodies(request, flavour):
            assert "priority" not in body
            assert body.get("headrace") == ({"cache": False} if ours and flavour == "headrace" else None)


def test_a_key_that_stands_twice_goes_out_once() -> None:
    fields = read(b'{"model":"alias","top_p":1,"top_p":0.5,"messages":[]}')
    body = outgoing(Ask(True, "alias", fields, 1, common_options(fields), 1), "up", "openai")
    assert body.count(b"top_p") == 1
    assert json.loads(body)["top_p"] == 0.5


def test_large_numbers_go_out_as_they_came() -> None:
    assert encoded({"seed": 10**40}) == b'{"seed":1' + b"0" * 40 + b"}"


@pytest.mark.parametrize(
    ("prompt", "n", "number"),
    [("a", 1, 1), ("a", 3, 3), (["a"], 1, 1), (["a", "b"], 2, 4), ([1, 2], 1, 1), ([[1], [2]], 1, 2)],
)
def test_choices(prompt: Any, n: int, number: int) -> None:
    assert choices(ask(False, prompt=prompt, n=n)) == number
    assert choices(ask(n=n)) == n


# Continuing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"tools": [{}]},
        {"functions": [{}]},
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": "x"},
    ],
)
def test_what_cannot_be_continued(fields: dict[str, Any]) -> None:
    with pytest.raises(EngineUnavailable):
        check_continuable(ask(**fields))


def test_what_can_be_continued() -> None:
    check_continuable(ask(tools=[], logprobs=False, response_format={"type": "text"}, n=1))
    check_continuable(ask(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "x"}]))
    for fields in ({"echo": True}, {"suffix": "x"}, {"prompt": ["a", "b"]}):
        with pytest.raises(EngineUnavailable):
            check_continuable(ask(False, **fields))


def test_how_messages_become_a_prompt() -> None:
    path, body = rendering(ask(chat_template_kwargs={"x": 1}), "up", "vllm") or ("", b"")
    assert path == "/tokenize"
    assert json.loads(body) == {
        "model": "up", "messages": MESSAGES, "add_generation_prompt": True, "chat_template_kwargs": {"x": 1},
    }  # fmt: skip
    path, body = rendering(ask(), "up", "llama-server") or ("", b"")
    assert (path, json.loads(body)) == ("/apply-template", {"messages": MESSAGES})
    assert rendering(ask(), "up", "headrace") is not None
    for flavour in ("openai", "ollama", "sglang"):
        assert rendering(ask(), "up", flavour) is None
        assert tokenizing("x", "up", flavour) is None


def test_how_text_becomes_tokens() -> None:
    path, body = tokenizing("x", "up", "vllm") or ("", b"")
    assert (path, json.loads(body)) == ("/tokenize", {"model": "up", "prompt": "x", "add_special_tokens": False})
    path, body = tokenizing("x", "up", "llama-server") or ("", b"")
    assert (path, json.loads(body)) == ("/tokenize", {"content": "x", "add_special": False})


def test_what_a_server_renders() -> None:
    answer = rendered(b'{"count":2,"max_model_len":100,"tokens":[1,2]}')
    assert (answer.tokens, answer.max_model_len, answer.prompt) == ([1, 2], 100, None)
    assert rendered(b'{"prompt":"<s>hi"}').prompt == "<s>hi"
    for body in (b"", b"[]", b'{"tokens":["a"]}', b"<html>"):
        with pytest.raises(EngineUnavailable):
            rendered(body)


@pytest.mark.parametrize(("given", "prompt"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])])
def test_prompts(given: Any, prompt: Any) -> None:
    assert prompt_of(ask(False, prompt=given)) == prompt


@pytest.mark.parametrize("given", [None, ["a", "b"], [[1], [2]], [1, "a"], 7])
def test_prompts_of_other_kinds(given: Any) -> None:
    with pytest.raises(EngineUnavailable):
        prompt_of(ask(False, prompt=given))


TOLD = Told("abc", None, 3)


def test_the_request_that_goes_on() -> None:
    request = ask(
        stream=True, temperature=0, seed=7, max_tokens=10, tool_choice="none", user="u", headrace={"cache": True}
    )
    body = json.loads(going_on(request, TOLD, "up", "vllm", [1, 2, 3]))
    assert body == {
        "model": "up", "prompt": [1, 2, 3], "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0, "seed": 7, "max_tokens": 7, "user": "u",
    }  # fmt: skip
    body = json.loads(going_on(request, TOLD, "up", "headrace", "hiabc"))
    assert body["headrace"] == {"cache": True}


@pytest.mark.parametrize(
    ("chat", "fields", "flavour", "room", "most"),
    [
        (True, {"max_completion_tokens": 10}, "vllm", 50, 7),
        (True, {"max_tokens": None, "max_completion_tokens": 10}, "vllm", 50, 7),
        (True, {}, "vllm", 50, 50),
        (True, {}, "llama-server", None, None),
        (False, {}, "llama-server", None, None),
        (False, {}, "vllm", None, 13),
        (False, {"max_tokens": 4}, "ollama", None, 1),
    ],
)
def test_how_many_tokens_are_left(chat: bool, fields: Any, flavour: Any, room: int | None, most: int | None) -> None:
    body = json.loads(going_on(ask(chat, **fields), TOLD, "up", flavour, "x", room))
    assert body.get("max_tokens") == most


def test_none_are_left() -> None:
    with pytest.raises(EngineUnavailable, match="all its tokens"):
        going_on(ask(max_tokens=3), TOLD, "up", "vllm", "x", 100)
    with pytest.raises(EngineUnavailable, match="room"):
        going_on(ask(), TOLD, "up", "vllm", "x")


BEGUN = Sampling(temperature=0.2, top_p=0.9)


def test_what_an_engine_of_ours_began_is_drawn_on_as_it_began() -> None:
    request = replace(ask(temperature=None, top_p=0.5, max_tokens=9), sampling=BEGUN)
    for flavour, penalty in (("vllm", "repetition_penalty"), ("llama-server", "repeat_penalty")):
        body = json.loads(going_on(request, TOLD, "up", flavour, "x", 99))  # type: ignore[arg-type]
        drawn = {name: body[name] for name in ("temperature", "top_p", "top_k", "min_p", penalty)}
        assert drawn == {"temperature": 0.2, "top_p": 0.5, "top_k": -1, "min_p": 0.0, penalty: 1.0}


def test_another_server_has_defaults_of_its_own() -> None:
    sent = [outgoing(ask(max_tokens=9), "up", "vllm"), going_on(ask(max_tokens=9), TOLD, "up", "vllm", "x", 99)]
    for body in map(json.loads, sent):
        assert not {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"} & body.keys()
