from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.core.errors import EngineFailed, InvalidRequest
from headrace.core.events import Delta, Relayed
from headrace.protocol.answer import Usage
from headrace.protocol.plain_events import PlainEvents, chat_fields, query_fields

USER = {"role": "user", "content": "hi"}


def events(body: bytes) -> list[Any]:
    return [msgspec.json.decode(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: ")]


def encoder(*, report: Any = None, ids: bool = True) -> PlainEvents:
    return PlainEvents(ttft=lambda: 41.23456, report=report, ids=ids)


def delta(text: str) -> Delta:
    return Delta(1, 0, text, 1)


# Queries ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_query_is_read_with_its_numbers() -> None:
    query = b"prompt=Gr%C3%BC%C3%9Fe+42&model=m&system=&max_tokens=9&temperature=0.5&window=3&key=secret&top_p=1"
    assert query_fields(query) == {
        "prompt": "Grüße 42", "model": "m", "system": "", "max_tokens": 9, "temperature": 0.5, "window": 3,
    }  # fmt: skip
    assert query_fields(b"prompt=7&temperature=1&max_tokens=x&window=-1") == {
        "prompt": "7", "temperature": 1, "max_tokens": "x", "window": -1,
    }  # fmt: skip
    assert query_fields(b"resume=true") == {"resume": True}
    assert query_fields(b"resume=false") == {"resume": False}
    assert query_fields(b"resume=1") == {"resume": "1"}
    assert query_fields(b"") == {}


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (b"prompt=a&prompt=b", "twice"),
        (b"prompt=%ff", "UTF-8"),
        (b"prompt=\xc3\xbc", "percent-encoded"),
        (b"&".join([b"a=b"] * 65), "more than 64"),
    ],
)
def test_a_query_that_is_none(query: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        query_fields(query)


# Requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_becomes_a_chat() -> None:
    assert chat_fields({"prompt": "hi", "system": "be kind", "window": 3, "top_p": 0.5}, model="only") == {
        "model": "only",
        "messages": [{"role": "system", "content": "be kind"}, USER],
        "stream": True,
        "stream_options": {"include_usage": True},
        "headrace": {"pace": "window:3"},
        "top_p": 0.5,
    }


def test_resume_is_ours() -> None:
    fields = chat_fields({"prompt": "hi", "resume": True, "headrace": {"timings": True}}, model="only")
    assert fields["headrace"] == {"timings": True, "resume": True}
    assert "resume" not in fields


def test_messages_stay_as_they_are() -> None:
    fields = chat_fields({"messages": [USER], "model": "m", "headrace": {"cache": False}, "stream": True}, model="o")
    assert (fields["messages"], fields["model"], fields["headrace"]) == ([USER], "m", {"cache": False})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "hi", "messages": []}, "prompt"),
        ({"messages": [], "system": "x"}, "system"),
        ({"prompt": "hi", "system": 1}, "system"),
        ({"prompt": "hi", "window": 0}, "window"),
        ({"prompt": "hi", "window": 257}, "window"),
        ({"prompt": "hi", "window": "3"}, "window"),
        ({"prompt": "hi", "window": 2, "headrace": {"pace": "adaptive"}}, "window"),
        ({"prompt": "hi", "resume": "1"}, "resume"),
        ({"prompt": "hi", "resume": True, "headrace": {"resume": True}}, "resume"),
        ({"prompt": "hi", "headrace": []}, "headrace"),
        ({"prompt": "hi", "stream": False}, "stream"),
        ({"prompt": "hi", "stream": 1}, "stream"),
        ({"prompt": "hi", "n": 2}, "n"),
        ({"prompt": "hi", "n": True}, "n"),
        ({"prompt": "hi", "logprobs": True}, "logprobs"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_fields(fields, model="only")
    assert caught.value.param == param


def test_a_window_out_of_range_names_both_numbers() -> None:
    with pytest.raises(InvalidRequest, match="window must be an integer from 1 to 256; got 300"):
        chat_fields({"prompt": "hi", "window": 300}, model="m")


# Events ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_answer() -> None:
    one = encoder()
    assert one.delta(0, delta("")) == b""
    assert one.delta(0, delta("Once")) == b'data: {"event":"ttft","value":41.235}\n\ndata: {"tokens":["Once"]}\n\n'
    assert one.delta(0, delta(' "upon"\u2028\n')) == b'data: {"tokens":[" \\"upon\\"\\u2028\\n"]}\n\n'
    assert one.finish(0, "length", None) == b""
    end = one.end(Usage(5, 2, 1))
    assert end.startswith(b"id: done\ndata: ")
    assert end.count(b"\n\n") == 1
    (done,) = events(end)
    assert (done["event"], done["finish_reason"], done["usage"]["total_tokens"]) == ("done", "length", 7)
    assert "headrace" not in done


def test_what_goes_out_together_is_one_event() -> None:
    one = encoder()
    chunks = [one.delta(0, delta(text)) for text in ("a", "b", "c")] + [one.end(None)]
    joined = one.joined(chunks)
    assert [event.get("tokens") for event in events(joined)] == [None, ["a"], ["b", "c"], None]
    assert one.joined([]) == b""
    assert one.joined([b": hb\n\n"]) == b": hb\n\n"


def test_an_error_and_a_timeline() -> None:
    (error,) = events(encoder().error(EngineFailed("it broke")))
    assert error == {
        "event": "error",
        "error": {"message": "it broke", "type": "engine_error", "param": None, "code": "engine_failed"},
    }
    (done,) = events(encoder(report=lambda: {"ttft": 5.0}).end(None))
    assert done["headrace"] == {"timeline": {"ttft": 5.0}}


def test_ids_are_left_to_whoever_writes_the_others() -> None:
    one = encoder(ids=False)
    assert b"id:" not in one.end(None) + one.error(EngineFailed("x"))


def test_a_relayed_answer_is_told_in_these_events() -> None:
    one = encoder()
    role = Relayed(1, b'data: {"choices":[{"delta":{"role":"assistant"},"finish_reason":null}]}\n\n')
    assert one.relayed(role) == b""
    quoted = Relayed(1, b'data: {"delta":{"content":"\\"finish_reason\\":\\"x\\""}}\n\n', '"finish_reason":"x"')
    assert events(one.relayed(quoted))[1] == {"tokens": ['"finish_reason":"x"']}
    assert one.relayed(Relayed(1, b'data: {"choices":[{"delta":{},"finish_reason": "length"}]}\n\n', over=True)) == b""
    assert events(one.end(None))[0]["finish_reason"] == "length"


def test_only_the_content_of_a_relayed_answer_is_text_if_that_is_known() -> None:
    assert events(encoder().relayed(Relayed(1, b"", "thought content", "content")))[1] == {"tokens": ["content"]}


def test_a_continued_answer_has_had_its_first_text() -> None:
    one = encoder()
    one.begin(0)
    assert events(one.delta(0, delta("on"))) == [{"tokens": ["on"]}]
