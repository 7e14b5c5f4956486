from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import h2.config
import h2.connection

from bench_servers import HEAD, OPEN, sized
from headrace_bench.client.answer import Head
from headrace_bench.client.connection import Ask, Line, Plain, Shared
from headrace_bench.client.place import Place

ASK = Ask(Place("h", 1, False, "/p"), "POST", "/v1/x", "k")


class Transport(asyncio.Transport):
    """A socket whose kernel takes `room` bytes at once."""

    def __init__(self, room: int = 1 << 30) -> None:
        super().__init__()
        self.room = room
        self.wrote = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.wrote += bytes(data)

    def get_write_buffer_size(self) -> int:
        return max(0, len(self.wrote) - self.room)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def sent(self, at: float) -> None:
        self.calls.append(("sent", at))

    def head(self, head: Head, at: float) -> None:
        self.calls.append(("head", head.status, at))

    def body(self, data: bytes, at: float) -> None:
        self.calls.append(("body", data, at))

    def ended(self, at: float) -> None:
        self.calls.append(("ended", at))

    def broken(self, at: float, outcome: str, why: str, untouched: bool) -> None:
        self.calls.append(("broken", outcome, untouched, at))


def made(kind: type[Line], transport: Transport) -> tuple[Line, list[Line]]:
    """A line whose clock says 1, 2, 3 … as it is read, and where it goes when idle."""
    ticks, idle = itertools.count(1), list[Line]()
    line = kind(lambda: float(next(ticks)), idle.append)
    line.connection_made(transport)
    return line, idle


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    return lambda: asyncio.run(test())


@on_loop
async def test_one_stamp_a_read_whatever_is_in_it() -> None:
    transport, heard = Transport(), Heard()
    line, idle = made(Plain, transport)
    line.send(ASK, b"{}", heard)
    line.data_received(sized(b"data: x\n\n"))
    assert heard.calls == [("sent", 1.0), ("head", 200, 2.0), ("body", b"data: x\n\n", 2.0), ("ended", 2.0)]
    assert idle == [line]
    assert line.room
    assert transport.wrote.startswith(b"POST /p/v1/x HTTP/1.1\r\nHost: h:1\r\n")


@on_loop
async def test_sent_is_when_the_kernel_has_it_all() -> None:
    heard = Heard()
    line, _ = made(Plain, Transport(room=10))
    line.send(ASK, b"{}", heard)
    assert heard.calls == []
    line.resume_writing()
    assert heard.calls == [("sent", 1.0)]
    line.resume_writing()
    assert len(heard.calls) == 1


@on_loop
async def test_the_end_of_a_connection_ends_a_body_without_length() -> None:
    heard = Heard()
    line, idle = made(Plain, Transport())
    line.send(ASK, b"{}", heard)
    line.data_received(OPEN + b"data")
    line.eof_received()
    line.connection_lost(None)
    assert heard.calls[-1] == ("ended", 3.0)
    assert idle == []


@on_loop
async def test_a_lost_connection_does_not() -> None:
    heard = Heard()
    line, _ = made(Plain, Transport())
    line.send(ASK, b"{}", heard)
    line.data_received(OPEN + b"data")
    line.connection_lost(ConnectionResetError("reset"))
    assert heard.calls[-1] == ("broken", "truncated", False, 3.0)
    assert line.gone.done()


@on_loop
async def test_who_left_hears_nothing_more() -> None:
    transport, heard = Transport(), Heard()
    line, _ = made(Plain, transport)
    leave = line.send(ASK, b"{}", heard)
    leave()
    assert transport.closed
    line.connection_lost(None)
    assert heard.calls == [("sent", 1.0)]


@on_loop
async def test_bytes_that_nobody_asked_for_close_it() -> None:
    transport = Transport()
    line, _ = made(Plain, transport)
    line.data_received(HEAD)
    assert transport.closed
    assert not line.room


@on_loop
async def test_what_is_sent_on_a_closed_one_is_broken_at_once() -> None:
    heard, transport = Heard(), Transport()
    line, _ = made(Plain, transport)
    transport.closed = True
    line.send(ASK, b"{}", heard)()
    assert heard.calls == [("broken", "truncated", True, 1.0)]
    assert transport.wrote == b""


@on_loop
async def test_one_that_is_not_to_be_kept_is_not() -> None:
    transport, heard = Transport(), Heard()
    line, idle = made(Plain, transport)
    line.send(Ask(ASK.place, "POST", "/v1/x", keep_alive=False), b"{}", heard)
    line.data_received(sized(b""))
    assert heard.calls[-1][0] == "ended"
    assert transport.closed
    assert idle == []
    assert b"\r\nConnection: close\r\n" in transport.wrote


@on_loop
async def test_streams_of_one_read_have_one_stamp() -> None:
    transport = Transport()
    line, _ = made(Shared, transport)
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    server.initiate_connection()
    assert not line.ready.done()
    line.data_received(server.data_to_send())
    assert line.ready.done()
    one, two = Heard(), Heard()
    line.send(ASK, b"{}", one)
    line.send(ASK, b"{}", two)
    server.receive_data(transport.wrote)
    for stream in (1, 3):
        server.send_headers(stream, [(":status", "200")])
        server.send_data(stream, b"x", end_stream=True)
    line.data_received(server.data_to_send())
    assert [call[0] for call in one.calls] == ["sent", "head", "body", "ended"]
    assert len({call[-1] for heard in (one, two) for call in heard.calls if call[0] != "sent"}) == 1
    assert line.room
    line.connection_lost(None)
    assert line.gone.done()
