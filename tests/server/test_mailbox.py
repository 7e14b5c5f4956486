from __future__ import annotations

import asyncio

from headrace.core.events import Admitted, Delta
from headrace.server.mailbox import Mailbox
from server.asgi_driver import on_loop, settle


class Engine:
    def __init__(self) -> None:
        self.told: list[str] = []

    def pause(self) -> None:
        self.told.append("pause")

    def resume(self) -> None:
        self.told.append("resume")


def mailbox(engine: Engine, *, events: int = 8, text: int = 1000) -> Mailbox:
    return Mailbox(max_events=events, max_text=text, pause=engine.pause, resume=engine.resume)


def delta(text: str = "x") -> Delta:
    return Delta(1, 0, text, 1)


def test_takes_everything_at_once_in_order() -> None:
    box = mailbox(Engine())
    box.put(Admitted(1, 0, 0))
    box.put(delta("a"))
    box.put(delta("b"))
    assert box.take() == [Admitted(1, 0, 0), delta("a"), delta("b")]
    assert box.take() == []


def test_pauses_once_over_the_limit_and_resumes_when_it_was_written() -> None:
    engine = Engine()
    box = mailbox(engine, events=8)
    for _ in range(8):
        box.put(delta())
    assert engine.told == []
    box.put(delta())
    box.put(delta())
    assert engine.told == ["pause"]
    box.take()
    assert engine.told == ["pause"], "taken is not yet gone"
    box.written()
    assert engine.told == ["pause", "resume"]
    assert not box.paused


def test_what_is_taken_but_unwritten_counts() -> None:
    engine = Engine()
    box = mailbox(engine, events=8)
    for _ in range(6):
        box.put(delta())
    box.take()
    for _ in range(3):
        box.put(delta())
    assert engine.told == ["pause"]
    box.written()
    assert engine.told == ["pause"], "three of eight are waiting: more than a quarter"
    box.take()
    box.written()
    assert engine.told == ["pause", "resume"]


def test_text_is_bounded_too() -> None:
    engine = Engine()
    box = mailbox(engine, events=1000, text=1000)
    box.put(delta("x" * 1000))
    assert engine.told == []
    box.put(delta("x"))
    assert engine.told == ["pause"]


def test_a_reader_that_takes_nothing_is_kept_within_the_limit() -> None:
    """The engine stops when told; the mailbox holds no more than the limit and what came with the last step."""
    engine = Engine()
    box = mailbox(engine, events=256)
    sent = 0
    while not engine.told:
        for _ in range(4):  # a burst
            box.put(delta())
            sent += 1
    assert sent <= 256 + 4


def test_what_stays_held_after_a_write_counts_on() -> None:
    engine = Engine()
    box = mailbox(engine, events=8)
    for _ in range(9):
        box.put(delta())
    box.take()
    box.written(2)
    assert engine.told == ["pause"], "a quarter is still held"
    box.written(1)
    assert engine.told == ["pause", "resume"]
    for _ in range(7):
        box.put(delta())
    assert engine.told == ["pause", "resume"]
    box.put(delta())
    assert engine.told == ["pause", "resume", "pause"]


@on_loop
async def test_wakes_the_waiter_for_an_event_and_for_a_wake() -> None:
    box = mailbox(Engine())
    waiting = asyncio.create_task(box.wait())
    await settle()
    assert not waiting.done()
    box.put(delta())
    await waiting
    waiting = asyncio.create_task(box.wait())
    await settle()
    assert not waiting.done(), "one wake is used up by one wait"
    box.wake()
    await waiting


@on_loop
async def test_a_wake_before_the_wait_is_not_lost() -> None:
    box = mailbox(Engine())
    box.wake()
    await box.wait()


@on_loop
async def test_a_cancelled_waiter_can_be_followed_by_another() -> None:
    box = mailbox(Engine())
    waiting = asyncio.create_task(box.wait())
    await settle()
    waiting.cancel()
    await asyncio.wait((waiting,))
    box.put(delta())
    await box.wait()
    assert box.take() == [delta()]


def test_a_closed_one_tells_nobody_and_holds_nobody() -> None:
    engine = Engine()
    box = mailbox(engine, events=2)
    box.direct = lambda event: True
    box.close()
    assert box.direct is None
    for _ in range(5):
        box.put(delta())
    box.take()
    box.written()
    assert engine.told == []
