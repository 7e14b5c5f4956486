"""Request bodies: what is read out of them, and which field is named when they are refused."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest

from headrace.core.errors import InvalidRequest
from headrace.core.request import (
    BATCH,
    INTERACTIVE,
    ChatRequest,
    CompletionRequest,
    Decay,
    Message,
    Options,
    Pacing,
    Sampling,
)
from headrace.core.sampler import is_greedy, temperature_at
from headrace.protocol import openai
from headrace.protocol.openai import model_of, parse_chat, parse_completion, read

N_VOCAB = 1000
HI = [{"role": "user", "content": "hi"}]


def seed() -> int:
    return 77


def chat(**fields: Any) -> ChatRequest:
    """As it comes in: through bytes. Fields may be replaced; ... takes one out."""
    body = {"model": "m", "messages": HI, **fields}
    data = json.dumps({key: value for key, value in body.items() if value is not ...}).encode()
    return parse_chat(read(data), n_vocab=N_VOCAB, seed=seed)


def completion(**fields: Any) -> CompletionRequest:
    body = {"model": "m", "prompt": "hi", **fields}
    data = json.dumps({key: value for key, value in body.items() if value is not ...}).encode()
    return parse_completion(read(data), n_vocab=N_VOCAB, seed=seed)


def refusal(of: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        of(**fields)
    assert "\n" not in refused.value.message
    return refused.value


# read ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────

BODY = '{"model":"m","user":"é","messages":[{"role":"user","content":"hi"}]}'


def test_read_gives_the_object() -> None:
    assert read(BODY.encode())["user"] == "é"
    assert read(b"\xef\xbb\xbf" + BODY.encode())["user"] == "é"


NOT_OBJECTS = [b"", b" ", b"[]", b"null", b"1", b'"text"', b"\xef\xbb\xbf"]
NOT_UTF8 = [
    *[BODY.replace("é", "中文字").encode(encoding) for encoding in ("gbk", "utf-16", "utf-16-le", "utf-32")],
    BODY.encode("latin-1"),
    *[b'{"a":"\xc3"}', b'{"a":"\xe6\xbc', b'{"a":"\xed\xa0\x80"}', rb'{"a":"\ud800"}', rb'{"a":"\udc00"}'],
]
NOT_JSON = [
    *[BODY.encode() + b"x", BODY.encode() * 2, BODY.encode()[:-1], b"\xef\xbb\xbf\xef\xbb\xbf{}"],
    *[b'{"a":1,}', b"{'a':1}", b'{"a":"x\ny"}'],
]


@pytest.mark.parametrize("body", NOT_OBJECTS + NOT_UTF8 + NOT_JSON)
def test_read_refuses_what_is_not_one_object_in_utf8(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(body)
    assert refused.value.message.startswith("the body ")
    assert refused.value.param is None


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "nan", "+1", "0x10", "01"])
@pytest.mark.parametrize(
    "field",
    ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"],
)
def test_numbers_that_json_does_not_have(field: str, number: str) -> None:
    value = f'{{"5":{number}}}' if field == "logit_bias" else number
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        read(f'{{"{field}":{value}}}'.encode())


def nested(depth: int, *, objects: bool = False) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth if objects else b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    "body",
    [
        b'{"unknown":' + nested(20_000) + b"}",
        b'{"tools":' + nested(20_000) + b"}",
        b'{"response_format":{"json_schema":{"schema":' + nested(20_000) + b"}}}",
        b'{"messages":[{"role":"user","content":' + nested(20_000) + b"}]}",
        b'{"tools":[{"function":{"parameters":' + nested(1000, objects=True) + b"}}]}",
        b'{"unknown":' + nested(200) + b"}",
        b'{"unknown":' + nested(200, objects=True) + b"}",
        nested(100_000),
        nested(201, objects=True),
    ],
)
def test_deep_nesting_is_refused_wherever_it_stands(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="at most 200 levels"):
        read(body)


def test_nesting_up_to_the_limit_is_read() -> None:
    assert read(b'{"unknown":' + nested(199) + b"}")
    assert read(nested(200, objects=True))


def test_depth_is_the_same_from_a_deep_stack() -> None:
    # The decoder counts on the interpreter's stack, which is not empty in a server.
    def down(levels: int) -> None:
        if levels:
            down(levels - 1)
        else:
            with pytest.raises(InvalidRequest, match="at most 200 levels"):
                read(b'{"unknown":' + nested(900) + b"}")

    down(sys.getrecursionlimit() // 2)


def test_of_a_double_key_everybody_sees_the_last() -> None:
    fields = read(b'{"model":"a","max_tokens":5,"model":"b","max_tokens":50,"messages":[{"role":"user","content":""}]}')
    request = parse_chat(fields, n_vocab=N_VOCAB, seed=seed)
    assert model_of(fields) == request.model == "b"
    assert request.options.max_tokens == 50


# Options ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_defaults() -> None:
    assert chat() == ChatRequest("m", (Message("user", "hi"),), Options(sampling=Sampling(seed=77)))
    assert completion() == CompletionRequest(
        "m", ("hi",), False, False, Options(max_tokens=16, sampling=Sampling(seed=77))
    )


@pytest.mark.parametrize("of", [chat, completion])
def test_values_reach_the_engine_unchanged(of: Any) -> None:
    options = of(
        n=3,
        max_tokens=9,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        temperature=0,
        top_p=1e-9,
        top_k=1,
        min_p=1,
        repetition_penalty=0.01,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={"5": -100},
        seed=123,
        headrace={
            "timings": True,
            "cache": False,
            "priority": "batch",
            "ttft_deadline_ms": 800,
            "temperature_decay": {"every": 7, "factor": 0.5, "floor": 0.1},
            "later": 1,
        },
    ).options
    assert options == Options(
        max_tokens=9,
        n=3,
        stop=("a", "b"),
        stream=True,
        include_usage=True,
        timings=True,
        cache=False,
        priority=BATCH,
        deadline=0.8,
        sampling=Sampling(
            temperature=0.0,
            top_p=1e-9,
            top_k=1,
            min_p=1.0,
            repetition_penalty=0.01,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            logit_bias=((5, -100.0),),
            seed=123,
            decay=Decay(7, 0.5, 0.1),
        ),
    )


EDGES_ACCEPTED: dict[str, list[tuple[Any, Any]]] = {
    "temperature": [(0, 0.0), (2, 2.0)],
    "top_p": [(0, 0.0), (1, 1.0)],
    "top_k": [(0, 0), (-1, 0), (1, 1), (2.0, 2)],
    "min_p": [(0, 0.0), (1, 1.0)],
    "presence_penalty": [(0, 0.0)],
    "repetition_penalty": [(1, 1.0)],
    "seed": [(0, 0), (2**63 - 1, 2**63 - 1), (-1, 2**63 - 1), (-(2**63), 0)],
}


@pytest.mark.parametrize("of", [chat, completion])
@pytest.mark.parametrize("field", EDGES_ACCEPTED)
def test_range_edges_accepted(of: Any, field: str) -> None:
    for value, expected in EDGES_ACCEPTED[field]:
        assert getattr(of(**{field: value}).options.sampling, field) == expected


REFUSED_BY_BOTH: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.01, 999999, "1", True, [], {}],
    "top_p": [-1, 1.01],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1],
    "presence_penalty": [2.01, -2.01],
    "frequency_penalty": [2.01, -2.01],
    "top_k": [-2, 1.5, "1", 2**31],
    "n": [0, -1, 17, 1.5, "1", True],
    "seed": [2**63, -(2**63) - 1, 1.5, "1"],
    "stop": ["", ["zz", ""], ["a", "b", "c", "d", "e"], [1], {"a": 1}, 1, False],
    "logit_bias": [{"1000": 5}, {"-1": 5}, {"9" * 20: 1}, {"abc": 1}, {"5": 101}, {"5": "x"}, []],
    "max_tokens": [-1, 1.5, "10", 2147483648, 1e18, 10**30, True],
    "stream": [1, "true", []],
    "stream_options": [{"include_usage": True}, {}, [], True],
    "response_format": [{"type": "xml"}, {"type": "json_object"}, {}, "text", 1],
    "headrace": [True, [], "x"],
    "model": [..., None, "", 1, []],
}


@pytest.mark.parametrize("of", [chat, completion])
@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in REFUSED_BY_BOTH.items() for value in values]
)
def test_refused_with_the_field_named(of: Any, field: str, value: Any) -> None:
    error = refusal(of, **{field: value})
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize("of", [chat, completion])
def test_refusals_of_inner_fields(of: Any) -> None:
    assert refusal(of, headrace={"timings": 1}).param == "headrace.timings"
    assert refusal(of, headrace={"cache": "no"}).param == "headrace.cache"
    assert refusal(of, stream=True, stream_options={"include_usage": "yes"}).param == "stream_options.include_usage"


OURS_REFUSED: dict[str, list[Any]] = {
    "priority": ["", "Batch", "high", 0, 1, True, [], ["batch"], {}],
    "ttft_deadline_ms": [0, 0.99, -1, 600_000.5, 10**400, "800", True, [], {}],
    "pace": [
        "",
        "on",
        "window",
        "window:",
        "window:0",
        "window:257",
        "window:-1",
        "window:1.5",
        "window:٣",
        3,
        True,
        {},
    ],
    "pace_max_delay_ms": [0, 0.99, 10_000.5, -1, "400", True, [], {}],
    "temperature_decay": [0, 0.95, True, "on", [], [10, 0.95, 0.4], {"temperature": 1}, {"every": 1, "Factor": 0.5}],
}


@pytest.mark.parametrize("of", [chat, completion])
@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in OURS_REFUSED.items() for value in values]
)
def test_refusals_of_our_own_fields(of: Any, field: str, value: Any) -> None:
    error = refusal(of, headrace={field: value})
    assert error.param == f"headrace.{field}"
    assert error.message.startswith(f"headrace.{field} ")


@pytest.mark.parametrize("of", [chat, completion])
def test_our_own_fields(of: Any) -> None:
    def options(**ours: Any) -> Options:
        return of(headrace=ours).options  # type: ignore[no-any-return]

    assert (options().priority, options().deadline, options().sampling.decay) == (INTERACTIVE, None, None)
    assert options(priority="interactive").priority == INTERACTIVE
    assert options(priority="batch").priority == BATCH
    assert [options(ttft_deadline_ms=ms).deadline for ms in (1, 2.5, 600_000)] == [0.001, 0.0025, 600.0]
    assert options(temperature_decay={}).sampling.decay == Decay(10, 0.95, 0.4)
    assert options(temperature_decay={"floor": 0, "every": None}).sampling.decay == Decay(10, 0.95, 0.0)
    assert options().pacing == options(pace="off").pacing == options(pace="window:1").pacing == Pacing()
    assert options(pace="window:256").pacing == Pacing(window=256)
    assert options(pace="adaptive", pace_max_delay_ms=1).pacing == Pacing(adaptive=True, max_delay_s=0.001)
    assert options(pace_max_delay_ms=10_000).pacing == Pacing(max_delay_s=10.0)
    assert [options(pace=pace).pacing.off for pace in ("off", "window:2", "adaptive")] == [True, False, False]
    error = refusal(of, headrace={"pace": "window:300"})
    assert error.message == (
        'headrace.pace must be "off", "adaptive" or "window:N" with N from 1 to 256; got "window:300"'
    )
    assert refusal(of, headrace={"pace": "my secret"}).message.endswith("got a string")
    error = refusal(of, headrace={"pace_max_delay_ms": 20_000})
    assert error.message == "headrace.pace_max_delay_ms must be a number from 1 to 10000; got 20000"
    error = refusal(of, headrace={"temperature_decay": {"factor": 1.5}})
    assert error.param == "headrace.temperature_decay.factor"
    assert error.message == "headrace.temperature_decay.factor must be a number above 0 and at most 1; got 1.5"


def test_numbers_that_json_has_not_are_refused_in_our_own_fields_too() -> None:
    for ours in ('{"ttft_deadline_ms": NaN}', '{"temperature_decay": {"factor": Infinity}}'):
        with pytest.raises(InvalidRequest):
            read(b'{"model":"m","prompt":"hi","headrace":' + ours.encode() + b"}")


def test_a_refusal_names_both_numbers() -> None:
    assert refusal(chat, temperature=2.01).message == "temperature must be a number from 0 to 2; got 2.01"
    assert refusal(chat, n=0).message == "n must be an integer from 1 to 16; got 0"


NULLABLE = [
    *["temperature", "top_p", "top_k", "min_p", "n", "stop", "max_tokens", "seed", "stream", "stream_options"],
    *["logit_bias", "logprobs", "user", "presence_penalty", "frequency_penalty", "repetition_penalty", "headrace"],
    *["response_format", "max_completion_tokens"],
]
CHAT_NULLABLE = [*NULLABLE, "top_logprobs", "tools", "tool_choice", "functions", "function_call"]
COMPLETION_NULLABLE = [*NULLABLE, "echo", "suffix", "best_of", "parse_special"]


def test_null_is_absence() -> None:
    for field in CHAT_NULLABLE:
        assert chat(**{field: None}) == chat()
    assert chat(**dict.fromkeys(CHAT_NULLABLE)) == chat()
    for field in COMPLETION_NULLABLE:
        assert completion(**{field: None}) == completion()
    assert completion(**dict.fromkeys(COMPLETION_NULLABLE)) == completion()
    for field in ("timings", "cache", "priority", "ttft_deadline_ms", "temperature_decay"):
        assert chat(headrace={field: None}) == chat()
        assert completion(headrace={field: None}) == completion()
    assert refusal(chat, messages=None).param == "messages"
    assert refusal(completion, prompt=None).param == "prompt"


@pytest.mark.parametrize(
    "value", [None, {}, {"include_usage": False}, {"include_usage": None}, {"include_usage": True}]
)
def test_stream_options_while_streaming(value: Any) -> None:
    assert chat(stream=True, stream_options=value).options.include_usage is (value == {"include_usage": True})


@pytest.mark.parametrize(
    ("value", "expected"), [("zz", ("zz",)), (["zz"], ("zz",)), ([], ()), (list("abcd"), tuple("abcd"))]
)
def test_stop(value: Any, expected: tuple[str, ...]) -> None:
    assert chat(stop=value).options.stop == expected


def test_unknown_fields_are_ignored() -> None:
    extras = {
        "foo": 1,
        "metadata": {"a": "b"},
        "store": True,
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "user": "u",
    }
    assert chat(**extras) == chat()
    assert completion(**extras) == completion()


# Chat only ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_chat_max_tokens(field: str) -> None:
    for accepted in (1, 1.0, 100000, 2147483647):
        assert chat(**{field: accepted}).options.max_tokens == accepted
    for refused in (0, -1, 1.5, "10", 2147483648, 1e18, 10**30):
        assert refusal(chat, **{field: refused}).param == field


def test_both_limits_must_agree() -> None:
    assert chat(max_tokens=5, max_completion_tokens=5).options.max_tokens == 5
    assert chat(max_tokens=None, max_completion_tokens=5).options.max_tokens == 5
    error = refusal(chat, max_tokens=5, max_completion_tokens=6)
    assert error.param == "max_tokens"
    assert "5" in error.message
    assert "6" in error.message


def test_chat_logprobs() -> None:
    assert chat(logprobs=False).options.sampling.logprobs is None
    assert chat(logprobs=True).options.sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=0).options.sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).options.sampling.logprobs == 20
    for fields in (
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
        {"top_logprobs": 5},
        {"logprobs": False, "top_logprobs": 5},
    ):
        assert refusal(chat, **fields).param == "top_logprobs"
    assert refusal(chat, logprobs=5).param == "logprobs"


def test_what_asks_for_nothing_passes() -> None:
    nothing = {"tools": [], "tool_choice": "auto", "functions": [], "function_call": "none"}
    assert chat(**nothing, response_format={"type": "text"}) == chat()
    assert chat(tool_choice="none") == chat()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tools", {}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "frob"}}}),
    ],
)
def test_what_cannot_be_done_yet_is_refused(field: str, value: Any) -> None:
    error = refusal(chat, **{field: value})
    assert error.param == field
    assert "not supported yet" in error.message


# Completions only ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ("hi",)),
        ("", ("",)),
        ([""], ("",)),
        (["a", "b"], ("a", "b")),
        ([0, N_VOCAB - 1], ((0, N_VOCAB - 1),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    "prompt",
    [
        *[..., None, 1, {}, True, [], [[]], [[1], []], [None], [True], [{}]],
        *[[-1], [N_VOCAB], [4294967294], [9223372036854775808], [1.5], [1.0], [[1, 2], [-1]], [[1], "a"]],
        *[["a", 1], [1, "a"], [1, True], [[1], [[2]]], ["a"] * (openai.MAX_PROMPTS + 1)],
    ],
)
def test_prompts_refused(prompt: Any) -> None:
    error = refusal(completion, prompt=prompt)
    assert error.param == "prompt"
    assert error.message.startswith("prompt")


def test_a_refused_token_id_is_named_with_its_place_and_the_vocabulary() -> None:
    error = refusal(completion, prompt=[[1, 2], [3, N_VOCAB]])
    assert error.message == "prompt[1][1] must be a token id from 0 to 999; got 1000"


def test_completion_max_tokens() -> None:
    assert completion(max_tokens=1).options.max_tokens == 1
    assert completion(max_tokens=0, echo=True).options.max_tokens == 0
    assert refusal(completion, max_tokens=0).param == "max_tokens"
    assert refusal(completion, max_tokens=0, echo=False).param == "max_tokens"


def test_completion_switches() -> None:
    assert completion(echo=True).echo is True
    assert completion(parse_special=True).parse_special is True
    assert refusal(completion, echo=1).param == "echo"
    assert refusal(completion, parse_special="yes").param == "parse_special"
    assert completion(suffix="") == completion()
    assert refusal(completion, suffix="tail").param == "suffix"
    assert completion(best_of=1) == completion()
    assert completion(best_of=3, n=3) == completion(n=3)
    assert refusal(completion, best_of=2).param == "best_of"


def test_completion_logprobs() -> None:
    assert completion(logprobs=0).options.sampling.logprobs == 0
    assert completion(logprobs=20).options.sampling.logprobs == 20
    for value in (21, -1, True, "1"):
        assert refusal(completion, logprobs=value).param == "logprobs"


@pytest.mark.parametrize("value", [..., None, [], [{}], [{"role": "user"}]])
def test_messages_are_refused_by_their_name(value: Any) -> None:
    assert refusal(chat, messages=value).param == "messages"


# A model's own defaults ───────────────────────────────────────────────────────────────────────────────────────────────

OWN = Sampling(temperature=0.2, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1)


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_a_models_own_sampling_holds_where_the_request_is_silent(parse: Any) -> None:
    def sampled(**fields: Any) -> Sampling:
        body = {"model": "m", "messages": HI, "prompt": "hi", **fields}
        sampling: Sampling = parse(body, n_vocab=N_VOCAB, seed=seed, defaults=OWN).options.sampling
        return sampling

    silent = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"))
    assert sampled() == sampled(**silent) == msgspec.structs.replace(OWN, seed=77), "null is absence"
    for name, value in (("temperature", 0), ("top_p", 1), ("top_k", 0), ("min_p", 0), ("repetition_penalty", 1)):
        assert sampled(**{name: value}) == msgspec.structs.replace(OWN, seed=77, **{name: value}), "field by field"
    assert sampled(top_k=-1).top_k == 0, "off is said, so it is off"
    assert is_greedy(sampled(temperature=0))
    falling = sampled(headrace={"temperature_decay": {"every": 1, "factor": 0.5, "floor": 0.1}})
    assert [temperature_at(falling, i) for i in range(3)] == [0.2, 0.1, 0.1], "from the model's own temperature"
