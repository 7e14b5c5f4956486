from __future__ import annotations

import gc

from headrace.server import collector
from headrace.server.collector import ENOUGH, MAX_GROWN, NEVER, TOO_MANY, Collector, resident
from server.asgi_driver import on_loop, settle


class Scene:
    """A collector whose full collections are counted, not made."""

    def __init__(self) -> None:
        self.busy = False
        self.collected = 0
        self.memory = 10**9
        self.collector = Collector(lambda: self.busy, collect=self._collect, memory=lambda: self.memory)

    def _collect(self) -> None:
        self.collected += 1

    def younger(self, times: int) -> None:
        """So many collections of the middle generation."""
        for _ in range(times):
            self.collector._told("start", {"generation": 1})
            self.collector._told("stop", {"generation": 1})


@on_loop
async def test_leaves_python_as_it_was() -> None:
    before, told = gc.get_threshold(), list(gc.callbacks)
    scene = Scene()
    scene.collector.start()
    try:
        assert gc.get_threshold() == (*before[:2], NEVER)
    finally:
        scene.collector.stop()
        gc.unfreeze()
    assert gc.get_threshold() == before
    assert gc.callbacks == told
    scene.collector.stop()


@on_loop
async def test_collects_when_there_is_enough_and_nobody_waits() -> None:
    scene = Scene()
    scene.collector.start()
    try:
        scene.younger(ENOUGH - 1)
        scene.collector._told("stop", {"generation": 0})
        await settle()
        assert scene.collected == 0
        scene.younger(1)
        assert scene.collected == 0, "not in the middle of whatever allocated"
        await settle()
        assert scene.collected == 1
        scene.younger(ENOUGH)
        await settle()
        assert scene.collected == 2
    finally:
        scene.collector.stop()
        gc.unfreeze()


@on_loop
async def test_waits_while_somebody_is_answered_but_not_for_ever() -> None:
    scene = Scene()
    scene.busy = True
    scene.collector.start()
    try:
        scene.younger(ENOUGH)
        await settle()
        assert scene.collected == 0
        assert scene.collector._timer is not None
        scene.busy = False
        scene.collector._look()
        assert scene.collected == 1
        assert scene.collector._timer is None, "an idle server does not wake"

        scene.busy = True
        scene.younger(ENOUGH)
        await settle()
        assert scene.collected == 1
        scene.younger(TOO_MANY - ENOUGH)
        scene.collector._look()
        assert scene.collected == 2
    finally:
        scene.collector.stop()
        gc.unfreeze()


@on_loop
async def test_a_server_that_is_never_idle_collects_when_it_has_grown() -> None:
    scene = Scene()
    scene.busy = True
    scene.collector.start()
    try:
        scene.younger(ENOUGH)
        scene.memory += MAX_GROWN - 1
        await settle()
        assert scene.collected == 0
        scene.memory += 1
        scene.collector._look()
        assert scene.collected == 1

        scene.younger(ENOUGH)
        await settle()
        assert scene.collected == 1, "it has grown no more since then"
        scene.memory -= 2 * MAX_GROWN
        scene.collector._look()
        assert scene.collected == 1
        scene.memory += MAX_GROWN
        scene.collector._look()
        assert scene.collected == 2, "what it had at the last one may have been given back since"
    finally:
        scene.collector.stop()
        gc.unfreeze()


def test_the_memory_that_it_has() -> None:
    assert 2**20 < resident() < 2**40


@on_loop
async def test_a_look_that_comes_after_the_end_does_nothing() -> None:
    scene = Scene()
    scene.collector.start()
    scene.younger(ENOUGH)
    scene.collector.stop()
    gc.unfreeze()
    await settle()
    assert scene.collected == 0


def test_python_calls_it() -> None:
    """The names that the callback relies on."""
    told: list[tuple[str, int]] = []

    def callback(phase: str, info: dict[str, int]) -> None:
        told.append((phase, info["generation"]))

    gc.callbacks.append(callback)
    try:
        gc.collect(1)
    finally:
        gc.callbacks.remove(callback)
    assert ("stop", 1) in told
    assert collector.PAUSE_S > 0
