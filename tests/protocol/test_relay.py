"""The relay against recorded shapes of streams, in every fragmentation."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from typing import Any

import pytest

from headrace.core.errors import UpstreamFailed
from headrace.core.events import Tokens
from headrace.protocol.relay import MAX_EVENT, Portion, Relay, relay_whole
from upstreams import DONE, chat_events, completion_events, event

PIECES = ["Grün", "", " 🔥", "\u2028x\u0085", ' "q"\\', "日本"]
TEXT = "".join(PIECES)

# As these servers write them: order of fields, white space, extras.
VLLM = (
    b'data: {"id":"chatcmpl-7f","object":"chat.completion.chunk","created":1764460000,"model":"Qwen/Qwen2.5",'
    b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
    b'"prompt_token_ids":null}\n\n'
    b'data: {"id":"chatcmpl-7f","object":"chat.completion.chunk","created":1764460000,"model":"Qwen/Qwen2.5",'
    b'"choices":[{"index":0,"delta":{"content":"Hello \xe2\x80\xa8w\xc3\xb6rld"},"logprobs":null,'
    b'"finish_reason":null,"token_ids":null}]}\n\n'
    b'data: {"id":"chatcmpl-7f","object":"chat.completion.chunk","created":1764460000,"model":"Qwen/Qwen2.5",'
    b'"choices":[{"index":0,"delta":{"content":"!"},"logprobs":null,"finish_reason":"stop","stop_reason":null,'
    b'"token_ids":null}]}\n\n'
    b'data: {"id":"chatcmpl-7f","object":"chat.completion.chunk","created":1764460000,"model":"Qwen/Qwen2.5",'
    b'"choices":[],"usage":{"prompt_tokens":31,"total_tokens":34,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":16}}}\n\n'
    b"data: [DONE]\n\n"
)
LLAMA = (
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],'
    b'"created":1764460000,"id":"chatcmpl-Ab","model":"q8_0.gguf","system_fingerprint":"b7180","object":'
    b'"chat.completion.chunk"}\n\n'
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"Hello \xe2\x80\xa8w\xc3\xb6rld!"}}],'
    b'"created":1764460000,"id":"chatcmpl-Ab","model":"q8_0.gguf","system_fingerprint":"b7180","object":'
    b'"chat.completion.chunk"}\n\n'
    b'data: {"choices":[{"finish_reason":"stop","index":0,"delta":{}}],"created":1764460000,"id":"chatcmpl-Ab",'
    b'"model":"q8_0.gguf","system_fingerprint":"b7180","object":"chat.completion.chunk"}\n\n'
    b'data: {"choices":[],"created":1764460000,"id":"chatcmpl-Ab","model":"q8_0.gguf","system_fingerprint":"b7180",'
    b'"object":"chat.completion.chunk","usage":{"completion_tokens":3,"prompt_tokens":31,"total_tokens":34,'
    b'"prompt_tokens_details":{"cached_tokens":16}},"timings":{"prompt_n":31,"predicted_per_second":40.5}}\n\n'
    b"data: [DONE]\n\n"
)
CLOUD = (
    b"\xef\xbb\xbf: open\r\n\r\nid: 1\r\nretry: 10\r\nevent: message\r\n"
    b'data: {"id": "chatcmpl-Cd", "object": "chat.completion.chunk", "created": 1764460000, "model": "gpt-4o",\r\n'
    b'data:  "choices": [{"index": 0, "delta": {"role": "assistant", "content": "", "refusal": null},\r\n'
    b'data: "logprobs": null, "finish_reason": null}], "usage": null}\r\n\r\n\r\n'
    b'data:{"id": "chatcmpl-Cd", "object": "chat.completion.chunk", "created": 1764460000, "model": "gpt-4o", '
    b'"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hello \\u2028w\xc3\xb6rld!"}, '
    b'"logprobs": null, "finish_reason": null}], "usage": null, "obfuscation": "3Xk"}\r\n\r\n: ping\r\n\r\n'
    b'data: {"id": "chatcmpl-Cd", "object": "chat.completion.chunk", "created": 1764460000, "model": "gpt-4o", '
    b'"choices": [{"index": 0, "delta": {}, "logprobs": null, "finish_reason": "stop"}], "usage": '
    b'{"prompt_tokens": 31, "completion_tokens": 3, "total_tokens": 34, '
    b'"prompt_tokens_details": {"cached_tokens": 16}}}\r\n\r\n'
    b"data: [DONE]\r\n\r\n"
)
STREAMS = {"vllm": VLLM, "llama-server": LLAMA, "cloud": CLOUD, "cloud, CR": CLOUD.replace(b"\r\n", b"\r")}


def relayed(reads: Iterable[bytes], *, end: bool = False, **how: Any) -> list[Portion]:
    relay = Relay(**{"model": "alias", **how})
    portions = [relay.feed(read) for read in reads]
    return [*portions, relay.end()] if end else portions


def joined(portions: list[Portion]) -> tuple[bytes, str, str | None, int, list[Any]]:
    """What all of it comes to, however it was cut."""
    contents = [portion.content for portion in portions]
    return (
        b"".join(portion.raw for portion in portions),
        "".join(portion.text for portion in portions),
        None if None in contents else "".join(content or "" for content in contents),
        sum(portion.tokens for portion in portions),
        [
            value
            for name in ("identity", "usage", "reason", "error")
            for portion in portions
            if (value := getattr(portion, name)) is not None
        ]
        + [sum(portion.over for portion in portions)],
    )


def by_event(stream: bytes) -> list[bytes]:
    """One read an event, as most servers send them: the relay has a shorter way for the plainest of these."""
    return [one + b"\n\n" for one in stream.split(b"\n\n")[:-1]] + [stream.rpartition(b"\n\n")[2]]


PLAIN = event({"id": "i", "model": "up", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]})


CHOICES: list[dict[str, Any]] = [
    {"index": 1},
    {"finish_reason": "stop"},
    {"finish_reason": "abort"},
    {"logprobs": {"content": []}},
    {"logprobs": None},
    {"delta": None},
    {"delta": {}},
    {"delta": {"content": ""}},
    {"delta": {"content": ["x"]}},
    {"delta": {"content": "x", "role": "assistant"}},
    {"delta": {"content": "x", "reasoning": "y"}},
    {"delta": {"content": "x", "tool_calls": [{"function": {"arguments": "y"}}]}},
    {"text": "x", "delta": None},
    {"text": "", "delta": None},
    {"text": "y"},
]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"usage": {"prompt_tokens": 1, "completion_tokens": 1}},
        {"usage": None, "error": None, "object": "x"},
        {"object": "error"},
        {"error": {"message": "m"}},
        {"model": "alias"},
        {"model": None},
        {"model": 7},
        {"choices": []},
        {"choices": None},
        *({"choices": [{"index": 0, "delta": {"content": "x"}, **choice}]} for choice in CHOICES),
        {"choices": [{"delta": {"content": "x"}}, {"index": 1, "delta": {"content": "y"}}]},
    ],
)
def test_the_shorter_way_leads_to_the_same(change: dict[str, Any]) -> None:
    one = event({**json.loads(PLAIN[6:]), **change})
    for usage in (False, True):
        apart = joined(relayed([PLAIN, one, PLAIN], usage=usage))
        together = joined(relayed([PLAIN + one + PLAIN], usage=usage))
        assert plain_errors(apart) == plain_errors(together)


def plain_errors(all_of_it: tuple[Any, ...]) -> tuple[Any, ...]:
    *rest, values = all_of_it
    return *rest, [str(value) for value in values]


def data(raw: bytes) -> list[Any]:
    """The JSON of each event, which are in our one form."""
    assert raw == b"" or raw.endswith(b"\n\n")
    assert b"\r" not in raw
    events = raw.split(b"\n\n")[:-1]
    assert all(one.startswith(b"data: {") and b"\n" not in one for one in events), raw
    return [json.loads(one[6:]) for one in events]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("flavour", STREAMS)
def test_a_stream_means_the_same_however_it_is_cut(flavour: str, usage: bool) -> None:
    stream = STREAMS[flavour] + b"data: and this is the tail"
    whole = joined(relayed([stream], usage=usage))
    raw, text, content, _, rest = whole
    assert text == content == "Hello \u2028w\u00f6rld!"
    assert rest[1:] == [Tokens(31, 3, 16), "stop", 1]
    events = data(raw)
    assert {one["model"] for one in events} == {"alias"}
    assert len({one["id"] for one in events}) == 1
    assert rest[0] == (events[0]["id"], 1764460000)
    assert ["role" in c["delta"] for one in events for c in one["choices"]] == [True] + [False] * (
        len(events) - 1 - usage
    )
    assert [one["usage"]["completion_tokens"] for one in events if one.get("usage")] == [3] * usage
    assert [one["choices"] for one in events][-1:] == ([[]] if usage else [events[-1]["choices"]])
    for separator in (b"\xe2\x80\xa8", b"\xe2\x80\xa9", b"\xc2\x85"):
        assert separator not in raw
    for cut in range(len(stream) + 1):
        assert joined(relayed([stream[:cut], stream[cut:]], usage=usage)) == whole, cut
    assert joined(relayed([stream[i : i + 1] for i in range(len(stream))], usage=usage)) == whole
    assert joined(relayed(stream.splitlines(keepends=True), usage=usage)) == whole
    assert joined(relayed(by_event(stream), usage=usage)) == whole


NEWLINES = {"LF": b"\n", "CRLF": b"\r\n", "CR": b"\r"}


def dressed(stream: bytes, draw: random.Random) -> bytes:
    """The same events, with lines of no meaning before, between and after those of their data."""
    lines = []
    for line in stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").split(b"\n")[:-1]:
        some = [b"id: 5", b"event: message", b": hb", b"retry: 10", b":", b"x"]
        around = [draw.sample(some, draw.choice((0, 0, 1, 2))) if line else [] for _ in range(2)]
        lines += [*around[0], line, *around[1]]
    return b"\n".join([*lines, b""])


@pytest.mark.parametrize("newline", NEWLINES)
@pytest.mark.parametrize("flavour", ["vllm", "llama-server", "cloud"])
def test_reads_that_begin_and_end_anywhere(flavour: str, newline: str) -> None:
    """Cut at the end of each event, as most servers send them, and at one place more: where the shorter way could take
    an event for whole that is not."""
    draw, end = random.Random(f"{flavour} {newline}"), NEWLINES[newline]
    recorded = STREAMS[flavour]
    # In ASCII, so that the shorter way is taken.
    plain = recorded.replace(b"\xe2\x80\xa8", b"").replace(b"\\u2028", b"").replace(b"\xc3\xb6", b"o")
    for given, usage in itertools.product((recorded, plain), (False, True)):
        stream = dressed(given, draw).replace(b"\n", end)
        whole = joined(relayed([stream], usage=usage))
        assert whole[1] == ("Hello world!" if given is plain else "Hello \u2028w\u00f6rld!")
        ends = [at + 2 * len(end) for at in range(len(stream)) if stream.startswith(2 * end, at)]
        for second in range(len(stream)):
            cuts = sorted({0, second, *ends, len(stream)})
            # Not at the end of every event: some come together.
            some = [0, *(cut for cut in cuts[1:-1] if cut == second or draw.random() < 0.8), len(stream)]
            for places in (cuts, some):
                reads = [stream[a:b] for a, b in itertools.pairwise(places)]
                assert joined(relayed(reads, usage=usage)) == whole, (second, reads)


def test_a_line_after_the_data_may_be_cut_anywhere() -> None:
    one, other = (PLAIN.replace(b'"x"', text) for text in (b'"y"', b'"z"'))
    raw, text, *_ = joined(relayed([PLAIN, one[:-1] + b"i", b"d: 5\n\n", other[:-1] + b"id: 6\n\n"]))
    assert text == "xyz"
    assert [chunk["choices"][0]["delta"]["content"] for chunk in data(raw)] == ["x", "y", "z"]


def test_what_need_not_be_changed_passes_as_the_same_bytes() -> None:
    for one in chat_events(["a", "b"], model="alias", usage=False)[:-1]:
        (portion,) = relayed([one])
        assert portion.raw is one


def test_only_the_name_is_changed() -> None:
    stream = b"".join(chat_events(['the "model":"up" is', '"model":"up"'], spaces=True)[:3])
    raw, text, *_ = joined(relayed([stream], model='al"ias'))
    assert text == 'the "model":"up" is"model":"up"'
    assert raw == stream.replace(b'"model": "up"', b'"model":"al\\"ias"')


@pytest.mark.parametrize(
    "extra",
    [
        b'{"meta":{"model":"up"},"model":"up","choices":[{"delta":{"content":"x"}}]}',
        b'{"meta":{"model":"up"},"model" : "up","choices":[{"delta":{"content":"x"}}]}',
        b'{"choices":[{"delta":{"content":"model"}}],"model":"up"}',
        b'{"\\"model":"up","model":"up","choices":[{"delta":{"content":"x"}}]}',
        b'{"model":"u\\u0070","choices":[{"delta":{"content":"x"}}]}',
        b'{"choices":[{"delta":{"content":"x"}}],"model"\n:"up"}'.replace(b"\n", b" "),
    ],
)
def test_a_name_in_doubt_is_replaced_by_way_of_the_json(extra: bytes) -> None:
    (portion,) = relayed([b"data: " + extra + b"\n\n"])
    given, made = json.loads(extra), data(portion.raw)[0]
    assert made == {**given, "model": "alias"}


def test_the_name_may_change_and_may_be_missing() -> None:
    events = [event({"model": name, "choices": [{"delta": {"content": "x"}}]}) for name in ("", "a", "b", "alias")]
    events.append(event({"choices": [{"delta": {"content": "x"}}]}))
    raw, *_ = joined(relayed(events))
    assert [one.get("model") for one in data(raw)] == ["alias"] * 4 + [None]


def test_completions() -> None:
    raw, text, content, tokens, rest = joined(relayed(completion_events(PIECES)))
    assert text == content == TEXT
    assert tokens == len([piece for piece in PIECES if piece])
    assert rest == [("cmpl-up1", 11), Tokens(9, len(PIECES), 0), "stop", 1]
    assert "".join(choice["text"] for one in data(raw) for choice in one["choices"]) == TEXT


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"delta": {"reasoning_content": "hm"}}, "hm"),
        ({"delta": {"reasoning": "hm", "reasoning_content": "hm"}}, "hm"),
        ({"delta": {"content": "a", "refusal": "no"}}, "ano"),
        ({"delta": {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": '{"'}}]}}, '{"'),
        ({"delta": {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": ""}}]}}, ""),
        ({"delta": {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]}}, "hm"),
        ({"delta": {"thinking": "hm"}}, "hm"),
        ({"delta": {"content": "a", "audio": {"id": "x", "transcript": "hm", "expires_at": 7}}}, "ahm"),
        ({"delta": {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}], "content": None}}, "hm"),
        ({"delta": {"content": "a"}, "logprobs": {"content": [{"token": "a"}]}}, "a"),
        ({"delta": {"content": "a"}, "index": 1}, "a"),
    ],
)
def test_what_is_more_than_text_passes_and_is_told(choice: dict[str, Any], text: str) -> None:
    one = event({"id": "i", "created": 1, "model": "alias", "choices": [{"index": 0, "finish_reason": None, **choice}]})
    (portion,) = relayed([one])
    assert (portion.raw, portion.text, portion.content) == (one, text, None)


def test_nothing_special_is_still_plain() -> None:
    delta: dict[str, Any] = {
        "content": "a",
        "reasoning": None,
        "tool_calls": [],
        "refusal": None,
        "function_call": None,
        "thinking": "",
        "audio": None,
        "annotations": [],
        "id": "x",
        "name": "y",
        "number": 7,
    }
    (portion,) = relayed([event({"choices": [{"delta": delta, "logprobs": None}]})])
    assert portion.content == "a"


def test_a_role_is_said_once_whatever_else_is_in_the_chunk() -> None:
    delta = {"role": "assistant", "content": "a", "thinking": "b"}
    raw, text, *_ = joined(relayed([event({"choices": [{"index": 0, "delta": delta}]})] * 2))
    assert text == "abab"
    assert ["role" in chunk["choices"][0]["delta"] for chunk in data(raw)] == [True, False]


@pytest.mark.parametrize(
    ("figures", "tokens"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": []}, Tokens(5, 1, 0)),
        ({"prompt_tokens": 5.0, "completion_tokens": "1"}, Tokens(5, 0, 0)),
        ({"prompt_tokens": -5, "completion_tokens": 10**30}, Tokens(0, 2**31, 0)),
    ],
)
def test_usage_of_a_surprising_kind_is_not_lost(figures: dict[str, Any], tokens: Tokens) -> None:
    last = {"id": "i", "created": 1, "model": "alias", "object": "x"}
    apart = event({**last, "choices": [], "usage": figures})
    (portion,) = relayed([apart], usage=True)
    assert (portion.raw, portion.usage, portion.content) == (apart, tokens, "")
    assert relayed([apart])[0].raw == b""
    there = [
        event({**last, "choices": [{"index": 0, "delta": {"content": "x"}}], "usage": figures}),
        b"data: [DONE]\n\n",
    ]
    raw, _, content, _, rest = joined(relayed(there, usage=True))
    assert (content, rest[1], data(raw)[-1]["usage"]) == ("x", tokens, figures)


@pytest.mark.parametrize("figures", [7, "many", [1]])
def test_usage_that_is_none(figures: Any) -> None:
    there = [
        event({"choices": [{"delta": {"content": "x"}}], "usage": figures}),
        event({"choices": [], "usage": figures}),
    ]
    raw, _, content, _, rest = joined(relayed([*there, b"data: [DONE]\n\n"], usage=True))
    assert (content, rest, data(raw)) == ("x", [1], [{"choices": [{"delta": {"content": "x"}}]}])


def test_several_choices_are_over_when_all_are() -> None:
    def finish(index: int) -> bytes:
        return event({"choices": [{"index": index, "delta": {}, "finish_reason": "length"}]})

    assert relayed([finish(0)], n=2, end=True)[-1].error is not None
    both = relayed([finish(1), finish(0)], n=2, end=True)
    assert both[-1].over
    assert both[-1].error is None


# Ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stream_without_its_last_word() -> None:
    events = chat_events(["a", "b"])
    assert [portion.over for portion in relayed(events[:-1], end=True)] == [False] * 5 + [True]
    *_, last = relayed(events[:3], end=True)
    assert isinstance(last.error, UpstreamFailed)
    assert not last.over


def test_it_is_known_when_only_the_last_word_is_missing() -> None:
    relay, seen = Relay(model="alias", n=2), []
    for one in ((0, None), (0, "stop"), (0, "stop"), (1, None), (1, "length")):
        relay.feed(event({"choices": [{"index": one[0], "delta": {}, "finish_reason": one[1]}]}))
        seen.append(relay.finished)
    assert seen == [False, False, False, False, True]
    assert not relay.over


def test_after_the_end_nothing_counts() -> None:
    relay = Relay(model="alias")
    portion = relay.feed(b"".join(chat_events(["a"])) + event({"error": {"message": "late"}}))
    assert portion.over
    assert portion.error is None
    assert relay.over
    assert relay.feed(event({"choices": [{"delta": {"content": "more"}}]})).empty
    assert relay.end().empty


ERRORS = [
    event({"error": {"message": "out of memory", "code": 500}}),
    b'error: {"code":500,"message":"out of memory","error":{"message":"x"}}\n\n',
    event({"object": "error", "message": "out of memory", "code": 400}),
    event({"choices": [{"index": 0, "delta": {"content": "more"}, "finish_reason": "abort"}]}),
    b"event: error\n" + event({"error": "out of memory"}),
    b"data: <html>\n\n",
    b"data: {\n\n",
    b"data: [1]\n\n",
    b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n',
    b'data: {"unread":"\xff","choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"a\x0bb"}}]}\n\n',
    b"data: " + b"[" * 5000 + b"\n\n",
]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_is_never_passed_on(error: bytes) -> None:
    good = chat_events(["a", "b"], model="alias")
    for reads in ([*good[:2], error], [b"".join(good[:2]) + error + good[2]]):
        portions = relayed(reads)
        assert b"".join(portion.raw for portion in portions) == b"".join(good[:2])
        assert "".join(portion.content or "" for portion in portions) == "a"
        assert isinstance(portions[-1].error, UpstreamFailed)
        assert "memory" not in portions[-1].error.message
        assert not portions[-1].over


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_behind_the_last_finish_reason_is_the_end(error: bytes) -> None:
    good = chat_events(["a", "b"], model="alias")[:-2]
    for reads in ([*good, error], [b"".join(good) + error]):
        portions = relayed(reads)
        assert b"".join(portion.raw for portion in portions) == b"".join(good)
        assert [portion.error for portion in portions] == [None] * len(portions)
        assert portions[-1].over


def test_an_error_with_the_last_finish_reason_is_a_break() -> None:
    finish = b'data: {"unread":1e999,"usage":{},"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    *_, last = relayed([*chat_events(["a"])[:2], finish])
    assert (last.over, last.content, last.raw) == (False, None, b"")
    assert isinstance(last.error, UpstreamFailed)


def test_events_are_bounded() -> None:
    relay = Relay(model="alias")
    step = b"data: " + b" " * 65_530
    portions = [relay.feed(step) for _ in range(MAX_EVENT // len(step) + 2)]
    assert [portion.error for portion in portions if portion.error is not None]
    assert relay.over


def test_comments_and_empty_chunks_say_nothing() -> None:
    for read in (b": hb\n\n", b"\n\n", b"id: 7\n\n", b"retry: 1\n\n", b"data: \n\n", event({"choices": [], "id": ""})):
        (portion,) = relayed([read])
        assert portion.empty, read


# Whole answers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_whole_answer() -> None:
    body = b'{ "id":"i", "model" : "up", "created":3, "choices":[{"index":0,"message":{"role":"assistant",'
    body += b'"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":2,"completion_tokens":1}}'
    portion = relay_whole(body, model="alias")
    assert portion.raw == body.replace(b'"model" : "up"', b'"model":"alias"')
    assert (portion.text, portion.over, portion.usage, portion.identity) == ("hi", True, Tokens(2, 1), ("i", 3))
    text = relay_whole(b'{"choices":[{"text":"a"},{"text":"b"}]}', model="alias")
    assert text.text == "ab"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"choices":[]}',
        b'{"error":{"message":"x"}}',
        b'{"choices":[{"text":"a","finish_reason":"error"}]}',
        b'{"choices":[{"text":"\xff"}]}',
    ],
)
def test_what_is_no_answer(body: bytes) -> None:
    portion = relay_whole(body, model="alias")
    assert isinstance(portion.error, UpstreamFailed)
    assert portion.raw == b""
    assert DONE not in portion.raw
