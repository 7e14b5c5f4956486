"""The client's side of HTTP/1.1, on a transport made of lists."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.engines.http1 import MAX_HEAD, Head, Http1Connection, WireFault

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nTrailer: x\r\n\r\n"
)
SIZED = b"HTTP/1.1 404 No\r\nContent-Length: 4\r\nX-A: 1\r\nX-A: 2\r\n\r\ngone"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\nall of it"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + SIZED
ANSWERS = {"chunked": CHUNKED, "sized": SIZED, "interim": INTERIM}


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False
        self.reading = True
        self.unsent = 0

    def write(self, data: Any) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True


class Notes:
    """A reader that writes everything down."""

    def __init__(self) -> None:
        self.heads: list[Head] = []
        self.bodies: list[bytes] = []
        self.ends: list[WireFault | None] = []

    def head(self, head: Head) -> None:
        assert not self.bodies
        self.heads.append(head)

    def body(self, data: bytes) -> None:
        assert data
        assert self.heads
        assert not self.ends
        self.bodies.append(data)

    def end(self, fault: WireFault | None) -> None:
        self.ends.append(fault)


class Wire:
    """A connection with a request on its way."""

    def __init__(self, notes: Notes | None = None) -> None:
        self.freed: list[bool] = []
        self.transport = Transport()
        self.connection = Http1Connection(lambda _, usable: self.freed.append(usable))
        assert not self.connection.idle
        self.connection.connection_made(self.transport)
        assert self.connection.idle
        self.notes: Notes = self.send(notes)

    def send(self, notes: Notes | None = None) -> Notes:
        notes = notes or Notes()
        self.connection.send(b"GET / HTTP/1.1\r\n\r\n", notes)
        assert not self.connection.idle
        return notes


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_however_it_is_cut(name: str) -> None:
    answer = ANSWERS[name]
    cuts = [[answer], [answer[i : i + 1] for i in range(len(answer))]]
    cuts += [[answer[:cut], answer[cut:]] for cut in range(1, len(answer))]
    for reads in cuts:
        wire = Wire()
        for read in reads:
            wire.connection.data_received(read)
        (head,) = wire.notes.heads
        assert b"".join(wire.notes.bodies) == (b"hello world" if name == "chunked" else b"gone")
        assert head.status == (200 if name == "chunked" else 404)
        if name == "chunked":
            assert head.value("content-type") == "text/event-stream"
        else:
            assert (head.value("x-a"), head.value("link")) == ("2", "")
        assert wire.notes.ends == [None]
        assert wire.freed == [True]
        assert wire.connection.idle


def test_one_read_is_one_call() -> None:
    wire = Wire()
    wire.connection.data_received(CHUNKED)
    assert wire.notes.bodies == [b"hello world"]


def test_the_next_request_follows_on_the_same_connection() -> None:
    wire = Wire()
    wire.connection.data_received(SIZED)
    second = wire.send()
    assert not wire.connection.answered
    wire.connection.data_received(CHUNKED)
    assert (second.ends, wire.freed) == ([None], [True, True])
    assert wire.transport.written == b"GET / HTTP/1.1\r\n\r\n" * 2


def test_a_body_that_ends_with_its_connection() -> None:
    wire = Wire()
    wire.connection.data_received(UNTIL_CLOSE[:-3])
    wire.connection.data_received(UNTIL_CLOSE[-3:])
    assert wire.notes.ends == []
    wire.connection.eof_received()
    wire.connection.connection_lost(None)
    assert b"".join(wire.notes.bodies) == b"all of it"
    assert (wire.notes.ends, wire.freed) == ([None], [False])


@pytest.mark.parametrize("answer", [*ANSWERS.values(), UNTIL_CLOSE])
@pytest.mark.parametrize("error", [None, ConnectionResetError()])
def test_broken_off_at_every_byte(answer: bytes, error: Exception | None) -> None:
    for cut in range(len(answer) + (answer is UNTIL_CLOSE)):
        wire = Wire()
        if cut:
            wire.connection.data_received(answer[:cut])
        assert wire.connection.answered == (cut > 0)
        wire.connection.connection_lost(error)
        (fault,) = wire.notes.ends
        good = answer is UNTIL_CLOSE and error is None and wire.notes.heads
        assert (fault is None) == bool(good)
        assert wire.freed == [False]
        wire.connection.connection_lost(None)
        assert len(wire.notes.ends) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"\x16\x03\x01 this is TLS",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Go\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_nonsense_ends_the_connection(answer: bytes) -> None:
    wire = Wire()
    wire.connection.data_received(answer)
    (fault,) = wire.notes.ends
    assert fault is not None
    assert wire.freed == [False]
    assert wire.transport.aborted


def test_a_head_is_bounded() -> None:
    wire = Wire()
    wire.connection.data_received(b"HTTP/1.1 200 OK\r\n")
    line = b"x-a: " + b"y" * 1000 + b"\r\n"
    for _ in range(MAX_HEAD // len(line) + 1):
        wire.connection.data_received(line)
    (fault,) = wire.notes.ends
    assert str(MAX_HEAD) in str(fault)
    assert wire.transport.aborted


@pytest.mark.parametrize(
    ("beginning", "line"),
    [
        (b"5\r\nhello\r\n0\r\n", b"x-a: " + b"y" * 1000 + b"\r\n"),
        (b"5\r\nhello\r\n0\r\nx", b"y" * 1000),
        (b"5\r\nhello\r\n5;", b"y" * 1000),
    ],
)
def test_what_follows_a_head_is_bounded_too(beginning: bytes, line: bytes) -> None:
    """Trailers, many or one without an end; what stands beside the size of a chunk."""
    wire = Wire()
    wire.connection.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + beginning)
    for _ in range(MAX_HEAD // len(line) + 1):
        assert not wire.notes.ends
        wire.connection.data_received(line)
    (fault,) = wire.notes.ends
    assert str(MAX_HEAD) in str(fault)
    assert wire.transport.aborted


def test_trailers_are_no_headers() -> None:
    wire = Wire()
    wire.connection.data_received(CHUNKED[:-2])
    assert wire.notes.ends == []
    assert wire.notes.heads[0].value("trailer") == ""
    wire.connection.data_received(CHUNKED[-2:])
    assert wire.notes.heads[0].headers.keys() == {"content-type", "transfer-encoding"}


def test_a_long_body_in_small_reads_is_no_head() -> None:
    wire = Wire()
    wire.connection.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    size = b"1;" + b"x" * 1000 + b"\r\n"
    for _ in range(2 * MAX_HEAD // len(size)):
        wire.connection.data_received(size)
        wire.connection.data_received(b"y\r\n")
    assert wire.notes.ends == []


def test_what_cannot_be_used_again() -> None:
    def over(answer: bytes, unsent: int = 0) -> list[bool]:
        wire = Wire()
        wire.transport.unsent = unsent
        wire.connection.data_received(answer)
        assert wire.notes.ends == [None]
        assert b"".join(wire.notes.bodies) in (b"gone", b"")
        return wire.freed

    assert over(SIZED.replace(b"X-A: 1", b"Connection: close")) == [False]
    assert over(SIZED.replace(b"HTTP/1.1", b"HTTP/1.0")) == [False]
    assert over(SIZED + b"more") == [False]
    assert over(SIZED + SIZED) == [False]
    assert over(SIZED, unsent=1) == [False]
    assert over(b"HTTP/1.1 204 No\r\n\r\n") == [False]
    assert over(SIZED) == [True]


def test_nobody_asked() -> None:
    wire = Wire()
    wire.connection.data_received(SIZED)
    wire.connection.data_received(b"HTTP/1.1 408 Timeout\r\n\r\n")
    assert wire.freed == [True, False]
    assert wire.transport.aborted
    assert not wire.connection.idle
    closed = Wire()
    closed.connection.data_received(SIZED)
    closed.connection.connection_lost(None)
    assert closed.freed == [True, False]


def test_a_request_that_is_given_up_hears_nothing_more() -> None:
    wire = Wire()
    wire.connection.data_received(CHUNKED[:-20])
    wire.connection.cut()
    assert wire.transport.aborted
    bodies = list(wire.notes.bodies)
    wire.connection.connection_lost(None)
    assert (wire.notes.bodies, wire.notes.ends, wire.freed) == (bodies, [], [])


def test_a_reader_may_give_up_within_a_call() -> None:
    class Leaving(Notes):
        def head(self, head: Head) -> None:
            super().head(head)
            wire.connection.cut()

    wire = Wire(Leaving())
    wire.connection.data_received(CHUNKED)
    assert len(wire.notes.heads) == 1
    assert (wire.notes.bodies, wire.notes.ends) == ([], [])


def test_pausing() -> None:
    wire = Wire()
    wire.connection.pause()
    wire.connection.pause()
    assert not wire.transport.reading
    wire.connection.resume()
    wire.connection.resume()
    assert wire.transport.reading
    wire.connection.pause()
    wire.connection.data_received(SIZED)  # it was read already
    assert wire.freed == [True]
    assert wire.transport.reading, "the next request is not to wait"


@pytest.mark.parametrize(
    ("header", "seconds"), [(b"timeout=5, max=9", 5.0), (b"max=9", None), (b"timeout=x", None), (b"", None)]
)
def test_how_long_the_other_side_keeps_it(header: bytes, seconds: float | None) -> None:
    wire = Wire()
    wire.connection.data_received(SIZED.replace(b"X-A: 1", b"Keep-Alive: " + header))
    assert wire.connection.keep_s == seconds
