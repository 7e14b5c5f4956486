from __future__ import annotations

import msgspec
import pytest

from headrace_bench.client import sse
from headrace_bench.client.answer import Head
from headrace_bench.client.http1 import End, Responses
from headrace_bench.client.script import (
    Script,
    answer,
    delta,
    ending,
    even,
    inscribed,
    named,
    refused,
    role,
    stamped,
    stream,
    whole,
)


def played(script: Script) -> tuple[Head, bytes, bool]:
    """The response as a client reads it: head, body, whether it was whole."""
    responses = Responses()
    parts = [part for _, data in script.pieces for part in responses.feed(data)]
    head = next(part for part in parts if isinstance(part, Head))
    body = b"".join(part for part in parts if isinstance(part, bytes))
    return head, body, any(isinstance(part, End) for part in parts)


def test_a_stream_has_its_head_first_and_a_piece_a_write() -> None:
    script = stream((0.1, role()), (0.2, b""), (0.3, ending(2)))
    assert [at for at, _ in script.pieces] == [0.0, 0.1, 0.2, 0.3]
    assert script.pieces[2][1] == b""
    head, body, is_whole = played(script)
    assert head.headers["content-type"] == "text/event-stream"
    assert body == role() + ending(2)
    assert is_whole
    assert not played(stream((0.1, role()), whole=False))[2]


def test_events_say_what_they_should() -> None:
    def said(data: bytes) -> list[sse.Said]:
        return [sse.read(event) for event in sse.Splitter().feed(data)]

    assert said(role()) == [sse.Said()]
    assert said(delta(4, content="x")) == [sse.Said(text="x", usage=sse.Usage(8, 4))]
    assert said(delta(None, "stop")) == [sse.Said(finish="stop")]
    assert said(ending(3)) == [sse.Said(usage=sse.Usage(8, 3)), sse.DONE]


def test_answers_that_are_no_streams() -> None:
    head, body, whole = played(refused(429, "slowly"))
    assert (head.status, sse.refusal(body), whole) == (429, "slowly", True)
    assert msgspec.json.decode(played(answer(200, {"a": 1}))[1]) == {"a": 1}


def test_a_whole_answer() -> None:
    body = msgspec.json.decode(played(whole("hi"))[1])
    assert body["choices"][0]["message"]["content"] == "hi"
    assert body["usage"]["completion_tokens"] == 1


def test_even_tokens() -> None:
    script = even(0.02, 0.01, 3)
    assert [at for at, _ in script.pieces] == pytest.approx([0.0, 0.02, 0.03, 0.04])
    assert played(script)[1].count(b"word") == 3
    assert not script.logged
    assert len(even(0.0, 0.0, 4).pieces) == 1  # all at once is one write
    assert played(even(0.0, 0.0, 0))[2]


def test_named() -> None:
    assert named("even:20:10:3") == even(0.02, 0.01, 3)
    for name in ("", "even", "even:1:2", "even:x:1:1", "even:-1:1:1", "even:nan:1:1", "even:1:1:1e9", "odd:1:1:1"):
        assert named(name) is None


def test_a_stall_stands_in_the_middle() -> None:
    script = named("even:100:10:4:200")
    assert script is not None
    times = [at for at, _ in script.pieces][1:]
    assert times == [pytest.approx(at) for at in (0.1, 0.11, 0.31, 0.32)]
    assert named("even:1:2:3:4:5") is None


def test_a_stamped_script_says_when_it_was_written() -> None:
    script = named("stamped:20:10:3")
    assert script == stamped(0.02, 0.01, 3)
    assert script is not None
    assert script.stamped
    assert not script.logged
    assert [at for at, _ in script.pieces] == pytest.approx([0.0, 0.02, 0.03, 0.04])
    written = [inscribed(data, 123.4567891 + n, 120.5) for n, (_, data) in enumerate(script.pieces)]
    assert [len(data) for data in written] == [len(data) for _, data in script.pieces], "a frame's length holds"
    _, body, is_whole = played(Script(tuple((0.0, data) for data in written)))
    assert is_whole
    texts = [sse.read(event).text for event in sse.Splitter().feed(body)]
    assert texts[:3] == [
        "00000:0000000124.456789:0000000120.500000 ", "00001:0000000125.456789 ", "00002:0000000126.456789 ",
    ]  # fmt: skip
    assert played(stamped(0.0, 0.0, 0))[2]
    assert named("stamped:1:1:1:1") is None


def test_a_script_may_be_silent_for_a_day() -> None:
    script = named("stamped:86400000:0:1")
    assert script is not None
    assert script.pieces[1][0] == 86400.0
