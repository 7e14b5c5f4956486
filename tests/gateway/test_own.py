from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.core.errors import EngineUnavailable, Overloaded, StartupError
from headrace.core.kv import Pin
from headrace.core.request import Ask, Generation, Options
from headrace.engines.base import Sink, StreamEngine
from headrace.gateway.model import ServedModel
from headrace.gateway.own import OwnEngine
from server.asgi_driver import on_loop, settle
from server.hand_engine import HandEngine, model

PINS = [Pin("t", (1, 2, 3))]


class Noticed(HandEngine):
    """A test can wait for what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: asyncio.Queue[Generation] = asyncio.Queue()

    def submit(self, generation: Generation, sink: Sink) -> None:
        super().submit(generation, sink)
        self.given.put_nowait(generation)


class Kit:
    def __init__(self) -> None:
        self.hand = Noticed()
        self.threads: list[bool] = []
        self.pinned: list[Any] = []
        self.hand.pin = self.pinned.append  # type: ignore[method-assign,assignment]

    def engine(self) -> StreamEngine:
        return self.hand

    def model(self, engine: StreamEngine) -> ServedModel:
        self.threads.append(threading.current_thread() is threading.main_thread())
        return model(engine)

    def pins(self, model: ServedModel) -> Sequence[Pin]:
        self.threads.append(threading.current_thread() is threading.main_thread())
        return PINS


@on_loop
async def test_it_is_nothing_until_it_is_started() -> None:
    kit = Kit()
    one = OwnEngine(lambda: kit, exercise=False)
    assert (one.ready, one.restarting, one.created) == (False, False, 0)
    assert (one.stats.steps, one.lives.restarts, one.clock_offset, one.predict(9, 0.0, 0)) == (0, 0, 0.0, 0.0)
    one.cancel(1)
    one.pause(1)
    one.resume(1)
    with pytest.raises(EngineUnavailable):
        one.parse(Ask(True, "m", {}, 2, Options(), 1))
    await one.start()
    await one.warm()
    assert (one.ready, one.created) == (True, 7)
    assert kit.pinned == [PINS]
    assert kit.threads == [False, False], "what may take long is not done on the loop"
    assert kit.hand.generations == []
    await one.close()
    assert kit.hand.closed


@on_loop
async def test_a_request_goes_to_its_model() -> None:
    kit = Kit()
    one = OwnEngine(lambda: kit, exercise=False)
    await one.start()
    ask = Ask(False, "m", {"model": "m", "prompt": "hi"}, 30, Options(), 1)
    work = await one.prepare(ask, one.parse(ask), itertools.count(5))
    heard: list[Any] = []
    one.submit(work.parts[0], heard.append)
    one.pause(5)
    one.resume(5)
    kit.hand.say("x")
    one.cancel(5)
    assert [event.text for event in heard] == ["x"]
    assert kit.hand.told == [("pause", 5), ("resume", 5)]
    assert kit.hand.cancelled == [5]
    await one.close()


@on_loop
async def test_it_computes_what_is_pinned_before_it_is_used() -> None:
    kit = Kit()
    one = OwnEngine(lambda: kit, exercise=True)
    await one.start()
    warming = asyncio.ensure_future(one.warm())
    for _ in (1, 2):
        await kit.hand.given.get()
        assert not warming.done()
        kit.hand.finish()
    await warming
    assert [(g.prompt, g.max_tokens, g.rid < 0) for g in kit.hand.generations] == [
        ([256] * 16, 1, True),
        ([1, 2, 3], 1, True),
    ]
    await one.close()


@on_loop
async def test_one_that_does_not_answer_is_none() -> None:
    kit = Kit()
    one = OwnEngine(lambda: kit, exercise=True)
    await one.start()
    kit.hand.refusal = Overloaded("no place")
    with pytest.raises(StartupError, match="does not answer: no place"):
        await one.warm()
    warming = asyncio.ensure_future(one.warm())
    await kit.hand.given.get()
    kit.hand.fail(message="it broke")
    with pytest.raises(StartupError, match="it broke"):
        await warming
    warming = asyncio.ensure_future(one.warm())
    await kit.hand.given.get()
    warming.cancel()
    await settle()
    assert kit.hand.live == {}, "nothing is computed for nobody"
    await one.close()


@on_loop
async def test_it_can_be_closed_at_any_time() -> None:
    kit, go = Kit(), threading.Event()

    def unpack() -> Kit:
        go.wait()
        return kit

    one = OwnEngine(unpack, exercise=False)
    starting = asyncio.ensure_future(one.start())
    await settle()
    await one.close()
    go.set()
    with pytest.raises(StartupError, match="stopped"):
        await starting
    await one.close()

    async def broken() -> None:
        raise StartupError("no file")

    kit.hand.start = broken  # type: ignore[method-assign]
    other = OwnEngine(lambda: kit, exercise=False)
    with pytest.raises(StartupError, match="no file"):
        await other.start()
    await other.close()
    assert kit.hand.closed
