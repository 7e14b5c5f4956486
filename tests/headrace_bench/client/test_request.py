from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import h2.errors
import pytest
import uvloop

from bench_servers import HEAD, OPEN, H2Server, H2Stream, Reader, Writer, by_hand, request, sized
from headrace_bench.client import request as module
from headrace_bench.client.request import Client
from headrace_bench.client.script import DONE, delta, ending
from headrace_bench.client.target import Target
from headrace_bench.load.schedule import Planned
from headrace_bench.record import Record

SAID = [{"role": "user", "content": "hi"}]
GOOD = sized(delta(content="x") + ending(1))
LOOPS = [uvloop.new_event_loop, asyncio.new_event_loop]


def planned(**fields: Any) -> Planned:
    return Planned(index=0, at=None, messages=(), max_tokens=4, prompt_tokens=1, **fields)


def on(loop: Callable[[], asyncio.AbstractEventLoop], test: Coroutine[Any, Any, None]) -> None:
    """Runs `test`; a task that it leaves behind is a failure."""

    async def watched() -> None:
        await asyncio.wait_for(test, 20)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"still there: {left}"

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(watched())


async def once(play: Callable[[Reader, Writer], Awaitable[None]], plan: Planned | None = None, **target: Any) -> Record:
    async with by_hand(play) as url:
        client = Client(Target(url, "m", **target), time.monotonic)
        try:
            return await client.send(plan or planned(), SAID, keep_text=True)
        finally:
            await client.close()


def answers(*writes: bytes, closes: bool = True) -> Callable[[Reader, Writer], Awaitable[None]]:
    """Every request gets these writes, apart."""

    async def play(reader: Reader, writer: Writer) -> None:
        while await request(reader):
            for data in writes:
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(0.001)
            if closes:
                return

    return play


@pytest.mark.parametrize("loop", LOOPS)
def test_a_request_as_it_is_sent_and_its_record(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    seen: list[bytes] = []

    async def play(reader: Reader, writer: Writer) -> None:
        seen.append(await request(reader))
        writer.write(HEAD + b"X-Request-Id: r7\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in (delta(content="é"), ending(1)):
            await asyncio.sleep(0.005)
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        writer.write(b"0\r\n\r\n")
        await reader.read()

    async def test() -> None:
        plan = planned(extra={"temperature": 0, "stream_options": {"continuous_usage_stats": True}})
        record = await once(play, plan, key="secret")
        assert record.outcome == "ok"
        assert (record.text, record.request_id, record.finish, record.completion_tokens) == ("é", "r7", None, 1)
        stamps = [
            record.dispatched, record.connected, record.sent, record.headers, record.first_byte, record.first_event,
            record.chunks[0].at, record.done, record.closed,
        ]  # fmt: skip
        assert None not in stamps
        assert stamps == sorted(stamps, key=lambda stamp: stamp or 0.0)
        assert record.first_byte == record.first_event == record.chunks[0].at
        assert record.headers is not None
        assert record.chunks[0].at - record.headers >= 0.004
        assert record.done == record.closed
        assert not record.reused

    on(loop, test())
    head, _, body = seen[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer secret" in head
    assert json.loads(body) == {
        "model": "m", "messages": SAID, "max_tokens": 4, "stream": True, "temperature": 0,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip


def test_only_a_headrace_is_asked_for_its_timeline() -> None:
    bodies: list[Any] = []

    async def play(reader: Reader, writer: Writer) -> None:
        bodies.append(json.loads((await request(reader)).partition(b"\r\n\r\n")[2]))
        writer.write(GOOD)

    async def test() -> None:
        await once(play, headrace=True)
        await once(play, headrace=True, timings=False)
        await once(play)

    on(uvloop.new_event_loop, test())
    assert [body.get("headrace") for body in bodies] == [{"timings": True}, None, None]


@pytest.mark.parametrize("loop", LOOPS)
def test_every_byte_in_a_read_of_its_own(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    stream = HEAD + b"Content-Length: %d\r\n\r\n" % len(body := delta(content="漢🔥") + ending(1)) + body

    async def play(reader: Reader, writer: Writer) -> None:
        await request(reader)
        for byte in stream:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        await reader.read()

    async def test() -> None:
        record = await once(play)
        assert (record.outcome, record.text) == ("ok", "漢🔥")

    on(loop, test())


def test_an_event_of_a_megabyte() -> None:
    text = "y" * (1 << 20)

    async def test() -> None:
        record = await once(answers(sized(delta(content=text) + ending(1))))
        assert (record.outcome, record.text) == ("ok", text)

    on(uvloop.new_event_loop, test())


@pytest.mark.parametrize(
    ("writes", "outcome", "error"),
    [
        ((sized(b'{"error":{"message":"no key"}}', b"HTTP/1.1 401 No\r\n"),), "http", "no key"),
        ((b"HTTP/1.1 503 No\r\n\r\nbusy",), "http", "busy"),
        ((OPEN + delta(content="x") + DONE,), "ok", None),
        ((OPEN + delta(content="x") + b"data: [DONE]\n",), "ok", None),
        ((OPEN + delta(content="x"),), "truncated", None),
        ((HEAD + b"Content-Length: 999\r\n\r\n" + delta(content="x"),), "truncated", "it closed the connection"),
        ((HEAD + b"Content-Length: 999\r\n\r\n" + delta(content="x") + DONE,), "ok", None),
        ((OPEN, b'data: {"error":{"message":"broke"}}\n\n', DONE), "stream_error", "broke"),
        ((b"SSH-2.0-hello\r\n",), "protocol", "not HTTP/1.1"),
        ((sized(b"<html>", b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"),), "protocol", "no event stream"),
        ((), "truncated", "it closed the connection"),
    ],
)
def test_whatever_a_server_does_is_an_outcome(writes: tuple[bytes, ...], outcome: str, error: str | None) -> None:
    async def test() -> None:
        record = await once(answers(*writes))
        assert record.outcome == outcome
        assert record.error is None if error is None else error in (record.error or "")
        assert record.closed is not None

    on(uvloop.new_event_loop, test())


def test_no_server() -> None:
    async def test() -> None:
        async with by_hand(answers()) as url:
            pass
        client = Client(Target(url, "m"), time.monotonic)
        record = await client.send(planned(), SAID)
        assert record.outcome == "connect"
        assert "refused" in (record.error or "").lower()
        assert (record.connected, record.sent, record.status) == (None, None, None)
        await client.close()

    on(uvloop.new_event_loop, test())


@pytest.mark.parametrize("loop", LOOPS)
def test_connections_are_kept_and_said_to_be(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def test() -> None:
        for keep, wanted in ((True, [False, True, True]), (False, [False] * 3)):
            async with by_hand(answers(GOOD, closes=False)) as url:
                client = Client(Target(url, "m", keep_alive=keep), time.monotonic)
                records = [await client.send(planned(), SAID) for _ in range(3)]
                await client.close()
            assert [record.outcome for record in records] == ["ok"] * 3
            assert [record.reused for record in records] == wanted
            assert [record.connected is None for record in records] == wanted

    on(loop, test())


def test_a_kept_connection_that_is_closed_is_replaced_once() -> None:
    requests: list[int] = []

    async def play(reader: Reader, writer: Writer) -> None:
        mine = len(requests)
        requests.append(0)
        while await request(reader):
            requests[mine] += 1
            if requests[mine] > 1:
                return  # not a byte
            writer.write(GOOD)

    async def test() -> None:
        async with by_hand(play) as url:
            client = Client(Target(url, "m"), time.monotonic)
            first, second = [await client.send(planned(), SAID) for _ in range(2)]
            await client.close()
        assert (first.outcome, second.outcome) == ("ok", "ok")
        assert (second.reused, second.resent, first.resent) == (False, True, False)
        assert second.connected is not None
        assert second.sent is not None
        assert second.sent >= second.connected

    on(uvloop.new_event_loop, test())
    assert requests == [2, 1]


def test_a_kept_connection_that_is_closed_late_had_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALE_S", -1.0)  # whatever it took, it is too late
    requests: list[int] = []

    async def play(reader: Reader, writer: Writer) -> None:
        while await request(reader):
            requests.append(1)
            if len(requests) > 1:
                return  # it was taken, and dropped
            writer.write(GOOD)

    async def test() -> None:
        async with by_hand(play) as url:
            client = Client(Target(url, "m"), time.monotonic)
            first, second = [await client.send(planned(), SAID) for _ in range(2)]
            await client.close()
        assert (first.outcome, second.outcome, second.error) == ("ok", "truncated", "it closed the connection")
        assert (second.reused, second.resent) == (True, False)

    on(uvloop.new_event_loop, test())
    assert len(requests) == 2


@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 200"])
def test_nothing_else_is_sent_twice(before: bytes) -> None:
    requests: list[bytes] = []

    async def play(reader: Reader, writer: Writer) -> None:
        while data := await request(reader):
            requests.append(data)
            if len(requests) > 1 or not before:
                writer.write(before)
                await writer.drain()
                return
            writer.write(GOOD)

    async def test() -> None:
        async with by_hand(play) as url:
            client = Client(Target(url, "m"), time.monotonic)
            records = [await client.send(planned(), SAID) for _ in range(2 if before else 1)]
            await client.close()
        assert records[-1].outcome == "truncated"

    on(uvloop.new_event_loop, test())
    assert len(requests) == (2 if before else 1)


def test_who_hangs_up_is_gone_at_once() -> None:
    left: list[float] = []

    async def play(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(OPEN + delta(content="x"))
        try:
            await reader.read()
        finally:
            left.append(time.monotonic())

    async def test() -> None:
        record = await once(play, planned(hang_up=0.05))
        assert record.outcome == "hung_up"
        assert record.text == "x"
        assert record.sent is not None
        assert record.closed is not None
        assert record.closed - record.sent >= 0.049
        assert left[0] - record.closed < 1.0

    on(uvloop.new_event_loop, test())


def test_silence_ends_it() -> None:
    async def play(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(OPEN)
        for _ in range(4):
            await asyncio.sleep(0.05)
            writer.write(delta(content="x"))
        await reader.read()

    async def test() -> None:
        record = await once(play, timeout_s=0.15)
        assert (record.outcome, record.text) == ("timeout", "xxxx")
        assert record.error == "not a byte for 0.15 s"
        assert record.closed is not None
        assert record.closed - record.chunks[-1].at >= 0.148

    on(uvloop.new_event_loop, test())


def test_a_message_that_has_no_end_after_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.02)

    async def play(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(OPEN + delta(content="x") + DONE)
        await reader.read()

    async def test() -> None:
        record = await once(play)
        assert (record.outcome, record.closed) == ("ok", None)

    on(uvloop.new_event_loop, test())


def test_abandon_keeps_what_there_is() -> None:
    async def play(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(OPEN + delta(content="x"))
        await reader.read()

    async def test() -> None:
        async with by_hand(play) as url:
            client = Client(Target(url, "m"), time.monotonic)
            sends = [asyncio.create_task(client.send(planned(), SAID)) for _ in range(3)]
            await asyncio.sleep(0.05)
            sends.append(asyncio.create_task(client.send(planned(), SAID)))
            await asyncio.sleep(0)  # this one has no connection yet
            client.abandon()
            records = await asyncio.gather(*sends)
            assert [record.outcome for record in records] == ["unfinished"] * 4
            assert [len(record.chunks) for record in records] == [1, 1, 1, 0]
            await client.close()

    on(uvloop.new_event_loop, test())


def test_a_cancelled_send_leaves_nothing_behind() -> None:
    left: list[bool] = []

    async def play(reader: Reader, writer: Writer) -> None:
        await request(reader)
        await reader.read()
        left.append(True)

    async def test() -> None:
        async with by_hand(play) as url:
            client = Client(Target(url, "m"), time.monotonic)
            send = asyncio.create_task(client.send(planned(), SAID))
            await asyncio.sleep(0.05)
            send.cancel()
            with pytest.raises(asyncio.CancelledError):
                await send
            await asyncio.sleep(0.02)
            await client.close()

    on(uvloop.new_event_loop, test())
    assert left in ([True], [])  # reset or closed, as the kernel has it


def whole(stream: H2Stream) -> None:
    stream.head(content_type="text/event-stream", x_request_id="r")
    stream.data(delta(content="x"))
    stream.data(ending(1), end=True)


@pytest.mark.parametrize("loop", LOOPS)
def test_http2_shares_one_connection(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    server = H2Server(whole)

    async def test() -> None:
        async with server as url:
            client = Client(Target(url, "m", key="k", http2=True), time.monotonic)
            records = await asyncio.gather(*(client.send(planned(), SAID, True) for _ in range(20)))
            records.append(await client.send(planned(), [{"role": "user", "content": "x" * 300_000}], True))
            await client.close()
        assert [(record.outcome, record.text) for record in records] == [("ok", "x")] * 21
        assert [record.reused for record in records] == [False] * 20 + [True]
        assert all(record.sent is not None for record in records)

    on(loop, test())
    assert len(server.connections) == 1
    stream = server.connections[0].streams[1]
    assert stream.headers["authorization"] == "Bearer k"
    assert json.loads(stream.body)["model"] == "m"


def test_http2_opens_another_connection_where_one_is_full() -> None:
    waiting: list[H2Stream] = []

    def answer(stream: H2Stream) -> None:
        waiting.append(stream)
        if len(waiting) == 5:
            for one in waiting:
                whole(one)

    server = H2Server(answer, room=2)

    async def test() -> None:
        async with server as url:
            client = Client(Target(url, "m", http2=True), time.monotonic)
            records = await asyncio.gather(*(client.send(planned(), SAID) for _ in range(5)))
            await client.close()
        assert {record.outcome for record in records} == {"ok"}

    on(uvloop.new_event_loop, test())
    assert len(server.connections) == 3


def test_http2_ends() -> None:
    def answer(stream: H2Stream) -> None:
        asked = json.loads(stream.body)["messages"][0]["content"]
        if asked == "401":
            stream.head(401)
            stream.data(b'{"error":{"message":"no key"}}', end=True)
            return
        stream.head(content_type="text/event-stream")
        stream.data(delta(content="x"))
        if asked == "reset":
            stream.reset(h2.errors.ErrorCodes.INTERNAL_ERROR)
        elif asked == "gone" and stream.connection.transport is not None:
            stream.connection.transport.abort()
        elif asked == "cut":
            stream.data(b"", end=True)

    server = H2Server(answer)

    async def test() -> None:
        async with server as url:
            client = Client(Target(url, "m", http2=True, timeout_s=5.0), time.monotonic)

            async def ask(what: str, **fields: Any) -> Record:
                return await client.send(planned(**fields), [{"role": "user", "content": what}])

            records = [await ask(what) for what in ("401", "reset", "cut")]
            records.append(await ask("wait", hang_up=0.02))
            records.append(await ask("gone"))
            await client.close()
        assert [record.outcome for record in records] == ["http", "truncated", "truncated", "hung_up", "truncated"]
        assert records[0].error == "no key"
        assert records[1].error == "stream reset: INTERNAL_ERROR"

    on(uvloop.new_event_loop, test())
    assert len(server.resets) == 1
    assert len(server.connections) == 1


def test_http2_replaces_a_connection_that_was_said_goodbye_to() -> None:
    seen: list[H2Stream] = []

    def answer(stream: H2Stream) -> None:
        seen.append(stream)
        if len(seen) == 2:
            stream.connection.goodbye(last=1)
        else:
            whole(stream)

    server = H2Server(answer)

    async def test() -> None:
        async with server as url:
            client = Client(Target(url, "m", http2=True), time.monotonic)
            records = [await client.send(planned(), SAID) for _ in range(2)]
            await client.close()
        assert [record.outcome for record in records] == ["ok", "ok"]
        assert [record.reused for record in records] == [False, False]
        assert [record.resent for record in records] == [False, True]

    on(uvloop.new_event_loop, test())
    assert len(server.connections) == 2


def test_http2_of_a_server_that_speaks_http1() -> None:
    async def test() -> None:
        async def play(reader: Reader, writer: Writer) -> None:
            await reader.read(10)
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            await reader.read()

        record = await once(play, http2=True)
        assert record.outcome == "connect"
        assert "does not speak HTTP/2" in (record.error or "")

    on(uvloop.new_event_loop, test())


def test_new_connections_for_http2() -> None:
    server = H2Server(whole)

    async def test() -> None:
        async with server as url:
            client = Client(Target(url, "m", http2=True, keep_alive=False), time.monotonic)
            records = [await client.send(planned(), SAID) for _ in range(3)]
            await client.close()
        assert [record.reused for record in records] == [False] * 3

    on(uvloop.new_event_loop, test())
    assert len(server.connections) == 3
