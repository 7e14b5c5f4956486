"""What a scripted server's answers become: events, refusals, breaks."""

from __future__ import annotations

import asyncio

import pytest

from engines.upstream_case import EVENTS, asking
from headrace.core.errors import Overloaded, UpstreamFailed, UpstreamRefused
from headrace.core.events import Admitted, Broken, Delta, Finished, Relayed, Tokens
from headrace.core.request import Told
from headrace.engines import answering
from headrace.engines.answering import MAX_ERROR
from headrace.engines.openai import SWEEP_S
from server.socket_client import on_uvloop, until
from upstreams import Play, chat_events, completion_events, event, stream, whole


@on_uvloop
async def test_a_stream_is_relayed() -> None:
    async with asking(lambda _: stream(EVENTS), key="sk-secret") as case:
        rid = case.submit()
        taken, admitted, *rest = await case.ended()
        assert taken == Relayed(rid, b"", content="")
        assert admitted == Admitted(rid, 0, 0)
        assert case.raw == b"".join(EVENTS[:-2]).replace(b'"model":"up"', b'"model":"alias"')
        relayed = [event for event in rest if isinstance(event, Relayed)]
        assert relayed[0].identity == ("chatcmpl-up1", 11)
        assert [event.over for event in relayed] == [False] * (len(relayed) - 1) + [True]
        assert sum(event.tokens for event in relayed) == 3
        assert next(event.marks is not None for event in relayed if event.text)
        assert sum(event.marks is not None for event in relayed) == 1
        (request,) = case.there.requests
        assert (request.method, request.path, request.body) == ("POST", "/v1/chat/completions", b'{"x":1}')
        assert request.headers["authorization"] == "Bearer sk-secret"
        assert request.headers["x-request-id"] == "req-1"
        assert request.headers["accept"] == "text/event-stream"
        assert request.headers["accept-encoding"] == "identity"
        assert "sk-secret" not in repr(case.server)
        await until(lambda: case.server.connections.idle == 1)
        case.submit()
        await case.ended()
        assert case.there.connections == 1
        stats = case.server.stats
        assert (stats.running, stats.prompt_tokens, stats.completion_tokens) == (0, 18, 6)


@on_uvloop
async def test_a_whole_answer_is_relayed() -> None:
    body = {"id": "i", "created": 3, "model": "up", "choices": [{"index": 0, "message": {"content": "hi"}}]}
    body["usage"] = {"prompt_tokens": 4, "completion_tokens": 2}
    async with asking(lambda _: whole(body)) as case:
        rid = case.submit(stream=False)
        *_, last = await case.ended()
        assert isinstance(last, Relayed)
        assert (last.rid, last.text, last.over, last.usage, last.identity) == (rid, "hi", True, Tokens(4, 2), ("i", 3))
        assert last.raw.replace(b'"model":"alias"', b'"model": "up"') == whole(body).pieces[0].partition(b"\r\n\r\n")[2]
        assert case.there.requests[0].headers["accept"] == "application/json"


TOLD = Told("be", None, 2)


@pytest.mark.parametrize("usage", [False, True])
def test_a_continued_answer_gives_our_own_events(usage: bool) -> None:
    events = completion_events(["a", "b"], finish="length", usage=usage)

    @on_uvloop
    async def play() -> None:
        async with asking(lambda _: stream(events)) as case:
            rid = case.submit(told=TOLD)
            told = await case.ended()
            assert told[:2] == [Admitted(rid, 0, 0)] * 2
            deltas = [event for event in told if isinstance(event, Delta)]
            assert "".join(delta.text for delta in deltas) == "ab"
            assert sum(delta.tokens for delta in deltas) == 2
            assert [delta.marks is not None for delta in deltas][:1] == [True]
            # The prompt over there is ours and the two tokens that were told.
            assert told[-1] == Finished(rid, 0, "length", 4, 7 if usage else 0)
            assert not any(isinstance(event, Relayed) for event in told)

    play()


@on_uvloop
async def test_a_continuation_that_is_more_than_text_is_broken() -> None:
    bad = event({"choices": [{"index": 0, "text": "x", "logprobs": {"tokens": ["x"]}}]})
    async with asking(lambda _: stream([bad], end="stall")) as case:
        case.submit(told=TOLD)
        await case.ended()
        assert isinstance(case.last().error, UpstreamFailed)
        await until(lambda: case.there.cut == 1)


# Refusals and breaks ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("play", "kind"),
    [
        (whole({"error": {"message": "no", "param": "top_p"}}, 400), UpstreamRefused),
        (whole({}, 429, retry_after="9"), Overloaded),
        (whole({}, 500), UpstreamFailed),
        (whole(b"x" * (MAX_ERROR + 1000), 500), UpstreamFailed),
        (whole({"error": {"message": "inside"}}), UpstreamFailed),
        (whole({}, 301, location="http://x/"), UpstreamFailed),
        (whole({}, content_encoding="gzip"), UpstreamFailed),
        (whole(b"\x1f\x8b\x08\x00", 400, content_encoding="gzip"), UpstreamRefused),
        (whole(b"\x1f\x8b\x08\x00", 429, content_encoding="gzip", retry_after="9"), Overloaded),
        (Play([b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>"]), UpstreamFailed),
        (Play([b"nonsense\r\n\r\n"], "close"), UpstreamFailed),
        (Play([], "close"), UpstreamFailed),
        (Play([], "reset"), UpstreamFailed),
        (Play([b"HTTP/1.1 429 X\r\n\r\n"], "reset"), Overloaded),
    ],
)
def test_what_is_no_answer_breaks(play: Play, kind: type[Exception], streamed: bool) -> None:
    @on_uvloop
    async def run() -> None:
        async with asking(lambda _: play) as case:
            rid = case.submit(stream=streamed)
            *rest, last = await case.ended()
            assert isinstance(last, Broken)
            assert last.rid == rid
            assert type(last.error) is kind
            assert case.raw == b""
            assert not any(isinstance(event, Broken) for event in rest)
            if kind is Overloaded and b"retry" in play.pieces[0]:
                assert last.error.retry_after == 9  # type: ignore[attr-defined]

    run()


@on_uvloop
async def test_a_server_that_does_not_stream_is_no_use_for_a_stream() -> None:
    async with asking(lambda _: whole({"choices": [{"message": {"content": "x"}}]})) as case:
        case.submit()
        await case.ended()
        assert isinstance(case.last().error, UpstreamFailed)


@on_uvloop
async def test_good_events_before_an_error_are_told() -> None:
    async with asking(
        lambda _: stream([b"".join(EVENTS[:2]) + event({"error": {"message": "x"}})], end="stall")
    ) as case:
        case.submit()
        await case.ended()
        assert [event.text for event in case.told if isinstance(event, Relayed)][-1] == "a"
        assert isinstance(case.last(), Broken)
        await until(lambda: case.there.cut == 1)  # it is not to go on with what nobody reads


def test_after_the_last_event_the_connection_has_a_moment_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "LINGER_S", 0.05)

    @on_uvloop
    async def play() -> None:
        async with asking(lambda _: stream(EVENTS, end="stall")) as case:
            case.submit()
            await case.ended()
            assert case.last().over
            assert case.server.connections.running == 1
            assert case.there.cut == 0
            await until(lambda: case.there.cut == 1)
            assert case.server.connections.running == 0

    play()


@pytest.mark.parametrize("late", [event({"error": {"message": "x"}}), None])
def test_what_fails_behind_the_finish_reason_is_over(late: bytes | None) -> None:
    @on_uvloop
    async def play() -> None:
        events = EVENTS[:-2] if late is None else [*EVENTS[:-2], late]
        async with asking(lambda _: stream(events, end="stall"), silence_s=SWEEP_S) as case:
            case.submit()
            await until(lambda: case.raw.count(b"stop") == 1)
            if late is None:
                case.clock.now += SWEEP_S
                case.server._sweep()
            await case.ended()
            assert case.last().over
            assert not any(isinstance(event, Broken) for event in case.told)
            if late is None:
                await until(lambda: case.there.cut == 1)  # at once


@pytest.mark.parametrize("missing", [1, 2])
@pytest.mark.parametrize("told", [None, TOLD])
def test_a_last_word_that_does_not_come_is_waited_for_shortly(
    told: Told | None, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every choice has its finish reason; the usage may be missing too."""
    monkeypatch.setattr(answering, "CLOSE_S", 0.05)
    events = chat_events(["a", "b"]) if told is None else completion_events(["a", "b"])

    @on_uvloop
    async def play() -> None:
        async with asking(lambda _: stream(events[:-missing], end="stall")) as case:
            case.submit(told=told)
            await case.ended()
            last = case.last()
            assert last.over if told is None else isinstance(last, Finished)
            usage = [event.usage for event in case.told if isinstance(event, Relayed) and event.usage]
            assert bool(usage) == (told is None and missing == 1)
            assert not any(isinstance(event, Broken) for event in case.told)
            await until(lambda: case.there.cut == 1)
            assert case.server.connections.running == 0

    play()


def test_a_last_word_that_nobody_reads_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "CLOSE_S", 0.01)
    gate = asyncio.Event()
    pieces = stream(EVENTS).pieces

    @on_uvloop
    async def play() -> None:
        async with asking(lambda _: Play(pieces, gate=gate, gated=len(pieces) - 3)) as case:
            rid = case.submit(include_usage=True)
            await until(lambda: case.raw.count(b'"stop"') == 1)
            case.server.pause(rid)
            gate.set()
            fired = asyncio.get_running_loop().time() + 0.05
            await until(lambda: asyncio.get_running_loop().time() > fired)
            assert case.server.running == 1
            monkeypatch.setattr(answering, "CLOSE_S", 60.0)
            case.server.resume(rid)
            await case.ended()
            assert case.last().over
            assert [event.usage for event in case.told if isinstance(event, Relayed) and event.usage] == [Tokens(9, 3)]

    play()
