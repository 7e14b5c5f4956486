"""The log: positions, bounds, and that a reader is pushed what it is owed."""

from __future__ import annotations

import asyncio

import pytest

from headrace.core.errors import Gone
from headrace.protocol.sse import DONE, event
from headrace.server.streamlog import OVERHEAD, Bell, StreamLog
from server.asgi_driver import on_loop, settle


def block(text: str) -> bytes:
    return event(b'{"choices":[{"index":0,"delta":{"content":"' + text.encode() + b'"}}]}')


def log_of(*texts: str, max_bytes: int = 1 << 20) -> tuple[StreamLog, list[int]]:
    grown: list[int] = []
    log = StreamLog("s", "o", max_bytes=max_bytes, grown=grown.append)
    for text in texts:
        log.append(block(text))
    return log, grown


class Following:
    def __init__(self) -> None:
        self.got: list[tuple[int, int, bytes]] = []
        self.woken = 0

    def push(self, start: int, end: int, frame: bytes) -> None:
        self.got.append((start, end, frame))

    def wake(self) -> None:
        self.woken += 1


def test_it_is_read_from_any_position() -> None:
    log, _ = log_of("ab", "c", "def")
    log.append(DONE)
    assert log.last == 7
    frames = [b"id: s-2\n" + block("ab"), b"id: s-3\n" + block("c"), b"id: s-6\n" + block("def"), b"id: s-7\n" + DONE]
    assert log.read(0, 10**6) == (b"".join(frames), 7)
    assert log.read(2, 10**6) == (b"".join(frames[1:]), 7)
    assert log.read(6, 10**6) == (frames[3], 7)
    assert log.read(7, 10**6) == (b"", 7)
    assert log.read(99, 10**6) == (b"", 99), "what is not there yet"
    assert log.read(5, 10**6) == (b"id: s-6\n" + block("f") + frames[3], 7), "the rest of a block"
    assert log.read(0, 1) == (frames[0], 2), "at least one block"
    assert log.since(3) == [(6, block("def")), (7, DONE)]


def test_readers_are_pushed_framed_blocks_and_woken_for_the_rest() -> None:
    log, _ = log_of()
    reader = Following()
    log.readers.add(reader)
    log.begin(((b"a", b"b"),))
    log.append(block("xy"))
    log.end("done")
    log.end("failed")
    assert reader.got == [(0, 2, b"id: s-2\n" + block("xy"))]
    assert reader.woken == 2
    assert (log.ended, log.begun, log.headers) == ("done", True, ((b"a", b"b"),))


def test_the_oldest_go_first_and_who_needs_them_is_told() -> None:
    size = len(block("a")) + OVERHEAD
    log, grown = log_of(*"abcdefghij", max_bytes=3 * size)
    assert log.bytes == sum(grown) == 3 * size
    assert (log.first, log.last) == (7, 10)
    assert log.read(7, 10**6)[0].count(b"id: ") == 3
    for after in (0, 6):
        with pytest.raises(Gone):
            log.read(after, 10**6)
        with pytest.raises(Gone):
            log.since(after)
    log.shrink(0)
    assert (log.first, log.bytes) == (9, size), "the last one stays"
    log.clear()
    assert log.bytes == sum(grown) == 0


def test_positions_can_be_given() -> None:
    log, _ = log_of()
    log.first = log.last = 40
    log.append(block("ab"), 42)
    assert log.read(41, 99) == (b"id: s-42\n" + block("b"), 42)
    with pytest.raises(Gone):
        log.read(39, 99)


@on_loop
async def test_a_bell_is_heard_before_and_while_one_waits() -> None:
    bell = Bell()
    bell.ring()
    await bell.wait()
    task = asyncio.get_running_loop().create_task(bell.wait())
    await settle()
    assert bell.waiting
    bell.ring()
    bell.ring()
    assert not bell.waiting
    await task
    task = asyncio.get_running_loop().create_task(bell.wait())
    await settle()
    task.cancel()
    await asyncio.wait((task,))
    assert not bell.waiting
