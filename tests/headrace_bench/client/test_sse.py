from __future__ import annotations

import json
import random
from typing import Any

import pytest

from headrace_bench.client.sse import DONE, Event, Said, Splitter, Usage, read, refusal, server_timing

STREAM = (
    '\ufeff: hello\n\ndata: {"a":"é漢🔥"}\n\nevent: note\ndata:no space\ndata:  two\n\n'
    "id: 7\nretry: 10\n\ndata\n\n: beat\ndata: x\n\n: end\n\nevent: nothing\n\ndata: [DONE]\n\n"
).encode()
EVENTS = [
    Event('{"a":"é漢🔥"}'.encode()),
    Event(b"no space\n two", b"note"),
    Event(b""),
    Event(b"x"),
    Event(b"[DONE]"),
]


def split(*reads: bytes) -> list[Event]:
    splitter = Splitter()
    return [event for data in reads for event in splitter.feed(data)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_however_lines_end_and_reads_fall(end: bytes) -> None:
    stream = STREAM.replace(b"\n", end)
    assert split(stream) == EVENTS
    assert split(*(stream[i : i + 1] for i in range(len(stream)))) == EVENTS
    draw = random.Random(4)
    for _ in range(50):
        cuts = sorted(draw.sample(range(len(stream)), 6))
        assert split(*(stream[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True))) == EVENTS


def test_an_event_is_there_with_its_blank_line_and_not_before() -> None:
    splitter = Splitter()
    assert splitter.feed(b"data: x\r\n") == []
    assert splitter.feed(b"\r") == [Event(b"x")]
    assert splitter.feed(b"\n") == []  # the rest of that line's end
    assert splitter.feed(b"data: y\n\n") == [Event(b"y")]


def test_a_carriage_return_at_the_end_of_a_read_ends_its_line_once() -> None:
    assert split(b"data: x\r", b"\ndata: y\r", b"\n\r", b"\n") == [Event(b"x\ny")]


def test_a_name_does_not_outlive_its_event() -> None:
    assert split(b"event: a\n\ndata: x\n\n") == [Event(b"x")]


def test_a_megabyte_in_one_event() -> None:
    data = b"y" * (1 << 20)
    stream = b"data: " + data + b"\n\n"
    assert split(*(stream[i : i + 1000] for i in range(0, len(stream), 1000))) == [Event(data)]


@pytest.mark.parametrize(
    ("rest", "found"),
    [
        (b"data: [DONE]", [Event(b"[DONE]")]),
        (b"data: [DONE]\n", [Event(b"[DONE]")]),
        (b'data: {"half":', []),
        (b'data: {"whole":1}\n', []),
        (b"", []),
    ],
)
def test_the_end_of_the_stream_completes_nothing_but_done(rest: bytes, found: list[Event]) -> None:
    splitter = Splitter()
    splitter.feed(b"data: x\n\n" + rest)
    assert splitter.end() == found


def chunk(delta: Any, **more: Any) -> Said:
    return read(Event(json.dumps({"choices": [{"index": 0, "delta": delta}], **more}).encode()))


def test_kinds_of_text() -> None:
    assert chunk({"content": "a"}) == Said(text="a")
    assert chunk({"reasoning_content": "a"}) == chunk({"reasoning": "a"}) == Said(reasoning="a")
    call = {"index": 0, "function": {"name": "f", "arguments": '{"x":'}}
    assert chunk({"tool_calls": [call]}) == Said(tool='f{"x":')
    assert chunk({"reasoning": "r", "content": "c"}) == Said(reasoning="r", text="c")
    assert read(Event(b'{"choices":[{"text":"a","finish_reason":"length"}]}')) == Said(text="a", finish="length")


@pytest.mark.parametrize(
    "delta",
    [
        {"role": "assistant"}, {"role": "assistant", "content": ""}, {"content": None}, {}, None,
        {"tool_calls": None}, {"tool_calls": [{"function": None}]}, {"tool_calls": {"a": 1}}, {"content": 7},
    ],
)  # fmt: skip
def test_what_is_no_text(delta: Any) -> None:
    assert chunk(delta) == Said()


@pytest.mark.parametrize(
    "value",
    [{}, {"choices": None}, {"choices": []}, {"choices": [None, 3]}, {"choices": {"a": 1}}, {"error": None},
     {"usage": None}, {"headrace": None}, {"headrace": {"timeline": 4}}],
)  # fmt: skip
def test_what_says_nothing(value: Any) -> None:
    assert read(Event(json.dumps(value).encode())) == Said()


def test_usage() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
    assert chunk({}, usage=usage).usage == Usage(7, 3, 5)
    assert chunk({}, usage={"completion_tokens": True, "prompt_tokens": -1}).usage == Usage(None, None, None)
    assert chunk({}, headrace={"timeline": {"ttft": 1.5}}).timeline == {"ttft": 1.5}


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Event(b'{"error":{"message":"it\\nbroke","type":"t"}}'), "it broke"),
        (Event(b'{"error":"broke"}'), "broke"),
        (Event(b'{"object":"error","message":"broke","code":400}'), "broke"),
        (Event(b'{"message":"broke"}', b"error"), "broke"),
        (Event(b"broke", b"error"), "broke"),
        (Event(b'"broke"', b"error"), "broke"),
        (Event(b'{"error":{"code":7}}'), "{'code': 7}"),
    ],
)
def test_errors(event: Event, words: str) -> None:
    assert read(event) == Said(error=words)


@pytest.mark.parametrize("data", [b"{", b"7", b"hello", b"\xff", b"[" * 100_000])
def test_what_is_no_json_object(data: bytes) -> None:
    assert read(Event(data)).malformed


def test_done() -> None:
    assert read(Event(b" [DONE] ")) == DONE


def test_refusals_and_timings() -> None:
    assert refusal(b'{"error":{"message":"no"}}') == "no"
    assert refusal(b'{"detail":"Not Found"}') == "Not Found"
    assert refusal(b"<h1>no</h1>\n" + b"x" * 900) == ("<h1>no</h1> " + "x" * 900)[:200]
    assert refusal(b"[1]") == "[1]"
    assert server_timing('queue;dur=1.5, prefill;desc="a";dur="2", bad;dur=x, plain') == {
        "queue": 1.5,
        "prefill": 2.0,
        "bad": None,
    }
