"""Answers on the wire: the shape of every chunk, their order, and the same told whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.core.events import Delta, TokenLogprob
from headrace.core.request import Options, Sampling
from headrace.protocol.answer import Answer, ChatAnswer, Choice, CompletionAnswer, Usage

USAGE = Usage(prompt_tokens=7, completion_tokens=20, cached_tokens=4)
USAGE_REPORT = {
    "prompt_tokens": 7,
    "completion_tokens": 20,
    "total_tokens": 27,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
TIMELINE = {"receive": 0.12, "ttft": 3.5, "cached_tokens": 4}
LOGPROBS = Options(sampling=Sampling(logprobs=2))


def chat(options: Options = Options()) -> ChatAnswer:  # noqa: B008 - frozen
    return ChatAnswer("chatcmpl-1", 1700000000, "m", options=options)


def completion(options: Options = Options(), **more: Any) -> CompletionAnswer:  # noqa: B008 - frozen
    return CompletionAnswer("cmpl-1", 1700000000, "m", options=options, **more)


def delta(text: str, *logprobs: TokenLogprob) -> Delta:
    return Delta(rid=1, index=0, text=text, tokens=1, logprobs=logprobs)


def events(data: bytes) -> list[Any]:
    """The JSON of each event, checked for what a client of any kind may rely on; "[DONE]" as it is."""
    assert data.endswith(b"\n\n")
    blocks = data.decode().removesuffix("\n\n").split("\n\n")
    lines = [line for line in data.decode().splitlines() if line]
    assert lines == blocks
    assert all(line.startswith("data: ") for line in lines)
    return ["[DONE]" if line == "data: [DONE]" else json.loads(line[6:], parse_constant=pytest.fail) for line in lines]


def text_of(chunk: Any) -> str:
    choice = chunk["choices"][0]
    return str(choice["delta"].get("content", "") if "delta" in choice else choice["text"])


def stream(answer: Answer, texts: list[str], *, usage: Usage | None = None) -> list[Any]:
    data = b"".join(answer.delta(0, delta(text)) for text in texts)
    return events(data + answer.finish(0, "stop", None) + answer.end(usage))


# Streamed ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_chat_stream_to_the_byte() -> None:
    answer = chat()
    head = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":['
    assert answer.delta(0, delta("Hi")) == (
        head + b'{"index":0,"delta":{"role":"assistant","content":"Hi"},"finish_reason":null}]}\n\n'
    )
    assert answer.delta(0, delta(' "you"')) == (
        head + rb'{"index":0,"delta":{"content":" \"you\""},"finish_reason":null}]}' + b"\n\n"
    )
    assert answer.finish(0, "length", None) == head + b'{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
    assert answer.end(None) == b"data: [DONE]\n\n"


def test_a_completion_stream_to_the_byte() -> None:
    answer = completion()
    head = b'data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"m","choices":['
    for text in (b"Hi", b" you"):
        assert answer.delta(0, delta(text.decode())) == (
            head + b'{"index":0,"text":"' + text + b'","logprobs":null,"finish_reason":null}]}\n\n'
        )
    assert (
        answer.finish(0, "stop", None) == head + b'{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}]}\n\n'
    )


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("include_usage", [False, True])
def test_one_id_one_role_one_finish_one_terminator(make: Any, include_usage: bool) -> None:
    texts = [f" w{i}" for i in range(20)]
    got = stream(make(Options(include_usage=include_usage)), texts, usage=USAGE)
    assert got.pop() == "[DONE]"
    assert "[DONE]" not in got
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in got}) == 1
    if include_usage:
        last = got.pop()
        assert last["choices"] == []
        assert last["usage"] == USAGE_REPORT
        assert all(chunk["usage"] is None for chunk in got)
    assert not any(chunk.get("usage") for chunk in got)
    assert [chunk["choices"][0]["finish_reason"] for chunk in got] == [None] * 20 + ["stop"]
    assert [text_of(chunk) for chunk in got] == [*texts, ""]
    roles = [chunk["choices"][0].get("delta", {}).get("role") for chunk in got]
    assert roles == (["assistant"] if make is chat else [None]) + [None] * 20


@pytest.mark.parametrize("make", [chat, completion])
def test_usage_waits_for_both_the_wish_and_the_numbers(make: Any) -> None:
    asked = Options(include_usage=True)
    assert make(asked).end(None) == make().end(USAGE) == make().end(None) == b"data: [DONE]\n\n"


@pytest.mark.parametrize("make", [chat, completion])
def test_line_separators_never_leave_raw(make: Any) -> None:
    texts = ["a", "\u2028", "b", "\u0085", "c", "\u2029d", "\u000b\u000ce"]
    answer = make()
    data = b"".join(answer.delta(0, delta(text)) for text in texts) + answer.finish(0, "stop", None) + answer.end(None)
    for raw in (b"\xe2\x80\xa8", b"\xe2\x80\xa9", b"\xc2\x85", b"\x0b", b"\x0c"):
        assert raw not in data
    assert "".join(text_of(chunk) for chunk in events(data)[:-1]) == "a\u2028b\u0085c\u2029d\u000b\u000ce"


def test_a_choice_without_text_still_has_its_role() -> None:
    first, last = events(chat().finish(0, "stop", None))
    assert first["choices"] == [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]


@pytest.mark.parametrize("make", [chat, completion])
def test_a_delta_with_nothing_in_it_writes_nothing(make: Any) -> None:
    answer = make()
    unasked = TokenLogprob(5, b"x", -1.0)
    for _ in range(2):
        assert answer.delta(0, delta("")) == b""
        assert answer.delta(0, delta("", unasked)) == b""
        answer.delta(0, delta("begun"))
    assert b"logprobs" not in answer.delta(0, delta("x", unasked)).replace(b'"logprobs":null', b"")


def test_each_choice_has_its_own_beginning_and_end() -> None:
    answer = chat(Options(n=2))
    got = events(
        answer.delta(1, delta("b"))
        + answer.delta(0, delta("a"))
        + answer.delta(1, delta("b"))
        + answer.finish(1, "stop", None)
        + answer.finish(0, "length", None)
    )
    seen = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"]) for chunk in got]
    assert seen == [
        (1, {"role": "assistant", "content": "b"}),
        (0, {"role": "assistant", "content": "a"}),
        (1, {"content": "b"}),
        (1, {}),
        (0, {}),
    ]


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("include_usage", [False, True])
def test_the_timeline_rides_on_the_last_chunk(make: Any, include_usage: bool) -> None:
    answer = make(Options(include_usage=include_usage))
    plain, last = events(answer.delta(0, delta("x")) + answer.finish(0, "stop", TIMELINE))
    assert last["headrace"] == {"timeline": TIMELINE}
    assert ("usage" in last) is include_usage
    assert "headrace" not in plain


# Whole ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_chat_body() -> None:
    choices = [Choice(1, "zwei", "length"), Choice(0, "é\n", "stop")]
    assert json.loads(chat().body(choices, USAGE, None)) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, text, reason in [(0, "é\n", "stop"), (1, "zwei", "length")]
        ],
        "usage": USAGE_REPORT,
    }


def test_a_completion_body() -> None:
    body = json.loads(completion().body([Choice(0, "a", "stop")], USAGE, TIMELINE))
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"}]
    assert body["headrace"] == {"timeline": TIMELINE}


# Echo ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_echo_stands_before_every_choice_of_its_prompt() -> None:
    answer = completion(Options(n=2), echo=("P", "Q"))
    got = events(b"".join(answer.delta(i, delta("x")) + answer.delta(i, delta("y")) for i in range(4)))
    assert [text_of(chunk) for chunk in got] == ["Px", "y", "Px", "y", "Qx", "y", "Qx", "y"]
    body = json.loads(answer.body([Choice(i, "x", "stop") for i in range(4)], USAGE, None))
    assert [choice["text"] for choice in body["choices"]] == ["Px", "Px", "Qx", "Qx"]


def test_echo_with_no_token_drawn() -> None:
    answer = completion(Options(max_tokens=0), echo=("hi",))
    got = events(answer.finish(0, "length", None))
    assert [(text_of(chunk), chunk["choices"][0]["finish_reason"]) for chunk in got] == [("hi", None), ("", "length")]
    assert json.loads(answer.body([Choice(0, "", "length")], USAGE, None))["choices"][0]["text"] == "hi"


# Log probabilities ────────────────────────────────────────────────────────────────────────────────────────────────────

HALF = TokenLogprob(9, b"\xf0\x9f", -0.25, ((9, b"\xf0\x9f", -0.25), (8, b" b", -2.0)))
REST = TokenLogprob(7, b"\x94\xa5!", float("-inf"), ((8, b"b", 0.5), (7, b"\x94\xa5!", float("nan"))))


def test_chat_logprobs() -> None:
    answer = chat(LOGPROBS)
    first, then = events(answer.delta(0, delta("", HALF)) + answer.delta(0, delta("\U0001f525!", REST)))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    half = {"token": "\ufffd", "logprob": -0.25, "bytes": [0xF0, 0x9F]}
    assert first["choices"][0]["logprobs"] == {
        "content": [{**half, "top_logprobs": [half, {"token": " b", "logprob": -2.0, "bytes": [32, 98]}]}],
        "refusal": None,
    }
    assert then["choices"][0]["delta"] == {"content": "\U0001f525!"}
    (rest,) = then["choices"][0]["logprobs"]["content"]
    assert rest["bytes"] == [0x94, 0xA5, 0x21]
    assert [rest["logprob"], *(top["logprob"] for top in rest["top_logprobs"])] == [-9999.0, 0.0, -9999.0]
    body = json.loads(answer.body([Choice(0, "\U0001f525!", "stop", (HALF, REST))], USAGE, None))
    content = body["choices"][0]["logprobs"]["content"]
    assert content == [*first["choices"][0]["logprobs"]["content"], rest]


def test_completion_logprobs() -> None:
    answer = completion(LOGPROBS, echo=("¿é",))
    first, then = events(answer.delta(0, delta("", HALF)) + answer.delta(0, delta("\U0001f525!", REST, HALF)))
    assert text_of(first) == "¿é"
    assert first["choices"][0]["logprobs"] == {
        "tokens": ["\ufffd"],
        "token_logprobs": [-0.25],
        "top_logprobs": [{"\ufffd": -0.25, " b": -2.0}],
        "text_offset": [2],
    }
    assert then["choices"][0]["logprobs"]["text_offset"] == [3, 4]
    body = json.loads(answer.body([Choice(0, "\U0001f525!", "stop", (HALF, REST, HALF))], USAGE, None))
    assert body["choices"][0]["logprobs"]["text_offset"] == [2, 3, 4]
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-0.25, -9999.0, -0.25]


def test_the_drawn_token_is_among_the_likeliest_even_if_it_was_not() -> None:
    answer = completion(LOGPROBS)
    (chunk,) = events(answer.delta(0, delta("z", TokenLogprob(3, b"z", -7.0, ((1, b"a", -0.1), (2, b"b", -3.0))))))
    assert chunk["choices"][0]["logprobs"]["top_logprobs"] == [{"z": -7.0, "a": -0.1, "b": -3.0}]


@pytest.mark.parametrize("make", [chat, completion])
def test_text_without_logprobs_of_its_own_goes_out_plain(make: Any) -> None:
    # Text that was held back may come after its tokens were reported.
    answer = make(LOGPROBS)
    first, then = events(answer.delta(0, delta("a")) + answer.delta(0, delta("b")))
    assert not first["choices"][0].get("logprobs")
    assert not then["choices"][0].get("logprobs")
    whole = json.loads(answer.body([Choice(0, "", "stop")], USAGE, None))
    assert whole["choices"][0]["logprobs"] is not None
