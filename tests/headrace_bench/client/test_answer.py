from __future__ import annotations

from headrace_bench.client.answer import Answer, Head
from headrace_bench.client.script import DONE, delta, ending, event, role
from headrace_bench.load.schedule import Planned
from headrace_bench.record import Chunk, Record

PLANNED = Planned(index=3, at=1.0, messages=(), max_tokens=9, prompt_tokens=2, tag="t", session=4, turn=5)
STREAM = {"content-type": "text/event-stream", "x-request-id": "r-1"}


def asked(headrace: bool = False, keep_text: bool = True) -> Answer:
    return Answer(PLANNED, 1.5, keep_text=keep_text, headrace=headrace)


def told(*reads: bytes, status: int = 200, headers: dict[str, str] = STREAM, headrace: bool = False) -> Record:
    """Reads at 3, 4, 5 …, the head at 2; the message ends one later."""
    answer = asked(headrace)
    answer.head(Head(status, headers), 2.0)
    at = 3.0
    for data in reads:
        answer.body(data, at)
        at += 1.0
    answer.ended(at)
    return answer.record()


def test_a_whole_life() -> None:
    text = delta(content="é"), delta(reasoning="hm"), delta(tool_calls=[{"function": {"name": "f"}}])
    record = told(b": hi\n\n", role(), text[0] + text[1], text[2][:5], text[2][5:], delta(None, "stop"), ending(3))
    assert record == Record(
        index=3, scheduled=1.0, dispatched=1.5, outcome="ok", tag="t", session=4, turn=5, max_tokens=9,
        headers=2.0, first_byte=3.0, first_event=4.0,
        chunks=(Chunk(5.0, "text", 2), Chunk(5.0, "reasoning", 2), Chunk(7.0, "tool", 1)),
        done=9.0, closed=10.0, status=200, finish="stop", prompt_tokens=8, completion_tokens=3, request_id="r-1",
        text="é",
    )  # fmt: skip


def test_tokens_where_each_chunk_is_counted() -> None:
    record = told(delta(1, content="a"), delta(5, content="b"), delta(5, content="c"), ending(6))
    assert [chunk.tokens for chunk in record.chunks] == [1, 4, 0]
    assert record.completion_tokens == 6


def test_a_usage_that_only_the_last_text_carries_is_not_its_own() -> None:
    record = told(delta(content="a"), delta(6, content="b"), DONE)
    assert [chunk.tokens for chunk in record.chunks] == [None, None]
    assert record.completion_tokens == 6


def test_tokens_of_an_event_of_two_kinds_are_counted_once() -> None:
    record = told(delta(3, reasoning="a", content="b"), delta(4, content="c"), DONE)
    assert [chunk.tokens for chunk in record.chunks] == [3, 0, 1]


def test_how_it_can_end() -> None:
    error = event({"error": {"message": "broke"}})
    assert told(role(), DONE).outcome == "ok"
    assert told(delta(content="x")).outcome == "truncated"
    assert told(delta(content="x"), b"data: [DONE]").outcome == "ok"  # its blank line never came
    failed = told(delta(content="x"), error, DONE)
    assert (failed.outcome, failed.error, len(failed.chunks)) == ("stream_error", "broke", 1)
    refused = told(b'{"error":{"mess', b'age":"no"}}', status=429, headers={})
    assert (refused.outcome, refused.status, refused.error) == ("http", 429, "no")
    assert refused.first_event is None
    assert told(b"data: what\n\n", DONE).outcome == "protocol"
    assert told(b"", status=302, headers={"location": "/"}).outcome == "protocol"
    page = told(b"<html>", headers={"content-type": "text/html"})
    assert (page.outcome, page.error) == ("protocol", "status 200, text/html: no event stream: <html>")
    assert told().outcome == "truncated"


def test_nothing_after_done_counts() -> None:
    assert told(delta(content="x"), DONE, delta(content="y")).text == "x"


def test_broken() -> None:
    answer = asked()
    answer.broken(2.0, "connect", "refused")
    record = answer.record()
    assert (record.outcome, record.error, record.closed, record.headers) == ("connect", "refused", 2.0, None)

    answer = asked()
    answer.broken(2.0, "truncated", "it closed")
    assert (answer.record().outcome, answer.record().error) == ("truncated", "it closed")

    answer = asked()
    answer.head(Head(200, STREAM), 2.0)
    answer.body(delta(content="x"), 3.0)
    answer.broken(4.0, "timeout", "silent")
    answer.broken(5.0, "truncated", "late")  # it is over
    record = answer.record()
    assert (record.outcome, record.error, record.closed, len(record.chunks)) == ("timeout", "silent", 4.0, 1)


def test_what_was_done_stays_done() -> None:
    for outcome in ("timeout", "truncated", "hung_up", "unfinished"):
        answer = asked()
        answer.head(Head(200, STREAM), 2.0)
        answer.body(delta(content="x") + DONE, 3.0)
        answer.broken(4.0, outcome, "why")
        assert (answer.record().outcome, answer.record().error) == ("ok", None)


def test_an_error_event_is_not_taken_for_a_silence() -> None:
    answer = asked()
    answer.head(Head(200, STREAM), 2.0)
    answer.body(event({"error": "broke"}), 3.0)
    answer.broken(60.0, "timeout", "silent")
    assert (answer.record().outcome, answer.record().error) == ("stream_error", "broke")


def test_a_refusal_cut_short_is_a_refusal() -> None:
    answer = asked()
    answer.head(Head(503, {}), 2.0)
    answer.broken(3.0, "truncated", "it closed")
    assert (answer.record().outcome, answer.record().status) == ("http", 503)


def test_a_message_that_stays_open_has_no_end() -> None:
    answer = asked()
    answer.head(Head(200, STREAM), 2.0)
    answer.body(DONE, 3.0)
    answer.stood_open()
    assert (answer.record().outcome, answer.record().closed) == ("ok", None)


def test_who_is_not_over_is_unfinished() -> None:
    assert asked().record().outcome == "unfinished"


def test_the_timeline_of_a_headrace() -> None:
    last = event({"choices": [], "headrace": {"timeline": {"queue": 1, "ttft": None, "x": "y", "z": True}}})
    timing = {**STREAM, "server-timing": "queue;dur=2.5"}
    assert told(last, DONE, headers=timing, headrace=True).server == {"queue": 1.0, "ttft": None}
    assert told(DONE, headers=timing, headrace=True).server == {"queue": 2.5}
    assert told(DONE, headers=timing).server is None


def test_text_is_kept_where_it_is_asked_for() -> None:
    assert asked(keep_text=False).record().text is None
