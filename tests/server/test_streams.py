"""Whose streams are found by whom, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import Abandoned, Gone, HeadraceError
from headrace.gateway.guard import Caller
from headrace.observe.stream_metrics import StreamFigures
from headrace.server.streamlog import StreamLog
from headrace.server.streams import LogLimits, Streams, owner_of
from headrace.testing import ManualClock
from server.asgi_driver import on_loop
from server.test_streamlog import Following, block


class Writer:
    def __init__(self) -> None:
        self.failed: list[HeadraceError] = []

    def fail(self, error: HeadraceError) -> None:
        self.failed.append(error)

    def leave(self) -> None:
        raise AssertionError("nobody left before the head")


def streams(**limits: float) -> tuple[Streams, ManualClock]:
    clock = ManualClock()
    return Streams(LogLimits(**limits), clock, StreamFigures()), clock  # type: ignore[arg-type]


def ended(them: Streams, name: str, size: int = 1) -> StreamLog:
    log = them.open("o", id=name)
    log.begin(())
    log.append(block("x" * size))
    log.end("done")
    them.end(log)
    return log


def test_owners_differ_by_tenant_and_by_name() -> None:
    callers = [Caller(), Caller(name="a"), Caller(salt="a"), Caller(name="b", salt="a"), Caller(name="a", salt="b")]
    callers.append(Caller(name="a", owner="another of that name"))
    assert len({owner_of(caller) for caller in callers}) == 6
    assert "a" * 8 not in owner_of(Caller(name="a" * 8))


@on_loop
async def test_only_the_owner_finds_it() -> None:
    them, _ = streams()
    log = them.open("ann", key="k")
    assert them.find(log.id, "ann") is log
    assert them.find(log.id, "bob") is None
    assert them.find("x", "ann") is None
    assert them.with_key("ann", "k") is log
    assert them.with_key("bob", "k") is None
    them.register("p", "ann", lambda error: None)
    assert them.plain("p", "ann") is not None
    assert them.plain("p", "bob") is None
    assert len({them.new_id() for _ in range(100)}) == 100
    assert len(them.new_id()) >= 24
    them.close()


@on_loop
async def test_it_is_kept_for_a_while_after_its_end_and_then_nothing_is_left() -> None:
    them, clock = streams(keep_s=10)
    log = them.open("o", id="x", key="k")
    log.append(block("x"))
    log.end("done")
    them.end(log)
    clock.advance(9)
    them.sweep(clock.now)
    assert them.with_key("o", "k") is log
    clock.advance(1)
    them.sweep(clock.now)
    assert (len(them), them.with_key("o", "k"), them.figures.bytes) == (0, None, 0)
    assert (them.figures.open, them.figures.kept) == (0, 0)
    them.close()


@on_loop
async def test_what_nobody_reads_is_stopped_after_the_grace_and_not_before() -> None:
    them, clock = streams(grace_s=5)
    log, writer, reader = them.open("o"), Writer(), Following()
    log.writer = writer
    them.join(log, reader)
    clock.advance(100)
    them.sweep(clock.now)
    them.leave(log, reader)
    clock.advance(4)
    them.sweep(clock.now)
    assert writer.failed == []
    them.join(log, reader)
    clock.advance(100)
    them.sweep(clock.now)
    them.leave(log, reader)
    clock.advance(5)
    them.sweep(clock.now)
    assert [type(error) for error in writer.failed] == [Abandoned]
    them.close()


@on_loop
async def test_what_nobody_waits_for_before_it_begins_is_stopped_with_its_beginning() -> None:
    them, clock = streams(grace_s=5)
    log, reader = them.open("o", key="k"), Following()
    them.join(log, reader)
    them.leave(log, reader)
    clock.advance(5)
    them.sweep(clock.now)
    assert isinstance(log.stopping, Abandoned)
    them.close()


@on_loop
async def test_all_together_stay_within_their_bytes() -> None:
    them, clock = streams(total_bytes=100_000)
    for number in range(300):
        clock.advance(1)
        ended(them, f"s{number}", 1000)
        assert them.figures.bytes <= 100_000
    assert them.find("s299", "o") is not None
    assert them.find("s0", "o") is None
    live = them.open("o", id="live")
    for _ in range(300):
        live.append(block("x" * 1000))
        assert them.figures.bytes <= 100_000
    assert live.first > 0
    assert sum(log.bytes for log in them) == them.figures.bytes
    them.close()


@on_loop
async def test_who_still_reads_keeps_what_is_forgotten() -> None:
    them, clock = streams(keep_s=1)
    log, reader = ended(them, "x"), Following()
    them.join(log, reader)
    clock.advance(2)
    them.sweep(clock.now)
    assert them.find("x", "o") is None
    assert log.bytes > 0
    them.leave(log, reader)
    assert them.figures.bytes == 0
    them.close()


class Unwalked(dict[str, StreamLog]):
    """Nobody looks at all of them."""

    def values(self) -> Any:
        raise AssertionError("all of them were looked at")


@on_loop
async def test_what_is_not_due_is_not_looked_at() -> None:
    them, clock = streams(keep_s=10, grace_s=5)
    for number in range(3):
        ended(them, f"s{number}")
        clock.advance(4)
    log, reader = them.open("o", id="live"), Following()
    them._logs = Unwalked(them._logs)
    log.writer = writer = Writer()
    for _ in range(2):
        them.join(log, reader)
        them.leave(log, reader)
    them._fire()
    assert (them.find("s0", "o"), them.find("s1", "o") is None) == (None, False)
    assert them._timer is not None
    clock.advance(5)
    them._fire()
    assert len(writer.failed) == 1
    assert them.find("s1", "o") is None
    assert them.find("s2", "o") is not None
    them.close()


@on_loop
async def test_a_slow_reader_of_what_has_ended_costs_nobody_else_anything() -> None:
    them, clock = streams(total_bytes=40_000, keep_s=1)
    slow = []
    for number in range(20):
        clock.advance(0.1)
        log, reader = ended(them, f"s{number}", 5000), Following()
        them.join(log, reader)
        slow.append((log, reader))
        clock.advance(0.1)
        them.sweep(clock.now)
    assert them.figures.bytes <= 40_000
    live = them.open("o", id="live")
    for _ in range(100):
        live.append(block("x" * 100))
    assert live.first == 0
    assert them.figures.bytes <= 40_000
    with pytest.raises(Gone):
        slow[0][0].read(0, 100)
    for log, reader in slow:
        them.leave(log, reader)
    them.forget(live)
    clock.advance(2)
    them.sweep(clock.now)
    assert them.figures.bytes == 0
    assert not them._lingering
    them.close()


@on_loop
async def test_a_log_that_is_forgotten_takes_no_other_of_its_name_along() -> None:
    them, _ = streams()
    old, reader = them.open("o", id="x"), Following()
    old.kept = False
    old.append(block("x"))
    them.join(old, reader)
    old.end("lost")
    them.end(old)
    new = them.open("o", id="x")
    them.leave(old, reader)
    them.forget(old)
    assert them.find("x", "o") is new
    assert them.figures.bytes == 0
    them.close()
