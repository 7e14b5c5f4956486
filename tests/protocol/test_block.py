"""Blocks: what a log keeps of a write, and positions that do not depend on how an answer was cut."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from headrace.core.events import Delta
from headrace.core.request import Options
from headrace.protocol.answer import Answer, ChatAnswer, CompletionAnswer, Usage
from headrace.protocol.block import blocks_of, cut, ending_of, identity_of, parse_id, text_of, weight_of
from headrace.protocol.sse import COMMENT, DONE, event

ANSWERS: list[Callable[[], Answer]] = [
    lambda: ChatAnswer("x", 1, "m", options=Options(include_usage=True)),
    lambda: CompletionAnswer("x", 1, "m", options=Options()),
]


def said(answer: Answer, *texts: str) -> list[bytes]:
    return [answer.delta(0, Delta(0, 0, text, 1)) for text in texts]


@pytest.mark.parametrize("make", ANSWERS)
def test_a_write_falls_into_its_events(make: Callable[[], Answer]) -> None:
    blocks = said(make(), "a", "b\u2028\n\n", "c")
    assert blocks_of(b"".join(blocks)) == blocks
    assert blocks_of(COMMENT + blocks[0] + COMMENT + DONE) == [blocks[0], DONE]
    assert blocks_of(COMMENT) == []


def test_what_another_server_added_is_left_out_but_for_events_names() -> None:
    foreign = b": hi\r\n\r\nid: 7\r\nevent: x\r\ndata: {}\r\n\r\nretry: 3\n\nid: 9\n\n"
    assert blocks_of(foreign) == [b"event: x\ndata: {}\n\n"]


@pytest.mark.parametrize("make", ANSWERS)
def test_the_position_is_that_of_the_text_however_it_is_cut(make: Callable[[], Answer]) -> None:
    rng = random.Random(1)
    text = "".join(rng.choice("ab ü\u2028漢😀\n") for _ in range(200))
    for _ in range(20):
        cuts = sorted(rng.sample(range(1, len(text)), 30))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert sum(weight_of(block) for block in said(make(), *parts)) == len(text)


@pytest.mark.parametrize("make", ANSWERS)
def test_the_rest_of_a_block_is_the_same_but_for_its_text(make: Callable[[], Answer]) -> None:
    (block,) = said(make(), "ü\u2028漢😀x")
    for known in range(1, 5):
        rest = cut(block, known)
        assert text_of(rest) == "ü\u2028漢😀x"[known:]
        assert blocks_of(rest) == [rest]
        whole, part = (msgspec.json.decode(each[6:-2]) for each in (block, rest))
        choice = part["choices"][0]
        (choice if "text" in choice else choice["delta"])["text" if "text" in choice else "content"] = "ü\u2028漢😀x"
        assert whole == part


def test_events_without_text_count_as_one() -> None:
    answer = ANSWERS[0]()
    end = blocks_of(answer.finish(0, "stop", None) + answer.end(Usage(1, 2, 0)))
    assert [weight_of(block) for block in end] == [1] * 4
    assert weight_of(event(b'{"error":{"message":"x"}}')) == 1
    assert weight_of(b"data: nonsense\n\n") == weight_of(b"data: {nonsense\n\n") == weight_of(b"event: x\n\n") == 1
    assert weight_of(b'data: {"choices":[{"delta":{"content":7}}]}\n\n') == 1


def test_ids_are_read_as_they_are_written() -> None:
    assert parse_id("abc-17") == ("abc", 17)
    for wrong in ("", "abc", "-3", "abc-", "abc-x", "abc--", "abc-²", "abc-1_0", "abc- 1", "abc-" + "9" * 16):
        assert parse_id(wrong) is None, wrong


@pytest.mark.parametrize("make", ANSWERS)
def test_the_name_of_an_answer_stands_in_each_of_its_chunks(make: Callable[[], Answer]) -> None:
    (block,) = said(make(), "a")
    assert identity_of(block) == ("x", 1)
    assert identity_of(DONE) is None
    assert identity_of(event(b'{"error":{}}')) is None


def test_the_simple_event_stream_has_positions_too() -> None:
    block = event(b'{"tokens":["ab","c\xc3\xbc","d"]}')
    assert (text_of(block), weight_of(block)) == ("abcüd", 5)
    assert text_of(cut(block, 3)) == "üd"
    assert weight_of(event(b'{"event":"ttft","value":1.5}')) == 1


def test_the_last_event_says_how_an_answer_ended() -> None:
    stopped = event(b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"headrace":{"ended":"stopped"}}')
    quoted = event(b'{"choices":[{"index":0,"delta":{"content":"\\"ended\\":\\"stopped\\" [DONE]"}}]}')
    text, usage = event(b'{"choices":[{"index":0,"delta":{"content":"a"}}]}'), event(b'{"choices":[],"usage":{}}')
    assert ending_of([]) is ending_of([text]) is ending_of([text, usage]) is ending_of([stopped]) is None
    assert ending_of([event(b'{"error":null}')]) is ending_of([b"data: nonsense\n\n"]) is None
    assert ending_of([event(b'{"event":"ttft","value":1}'), event(b'{"tokens":["a"]}')]) is None
    assert ending_of([text, quoted, DONE]) == ending_of([event(b'{"event":"done"}')]) == "done"
    assert ending_of([text, stopped, usage, DONE]) == "stopped"
    assert ending_of([event(b'{"event":"done","headrace":{"ended":"stopped"}}')]) == "stopped"
    assert ending_of([event(b'{"error":{"code":"abandoned"}}')]) == "abandoned"
    assert ending_of([event(b'{"error":{"code":"engine_failed"}}')]) == "failed"
    assert (
        ending_of([event(b'{"event":"error","error":{"code":"x"}}')])
        == ending_of([event(b'{"error":"x"}')])
        == "failed"
    )
