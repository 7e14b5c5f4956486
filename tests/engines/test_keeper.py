from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest

from headrace.core.events import Event, Finished
from headrace.core.limits import Limits
from headrace.core.request import Generation
from headrace.engines.base import EngineStats
from headrace.engines.keeper import LOOK_S, Keeper, TierSettings
from headrace.engines.stepper import Stepper
from headrace.kv.mining import Miner
from headrace.kv.store import Store
from headrace.testing import ManualClock, ScriptedEngine

SCRIPT = [[b"a"]]
PATIENCE = 10.0
"""Seconds until a wait for another thread counts as failed."""


def make(clock: ManualClock, *, miner: Miner | None, look_s: float = LOOK_S) -> Keeper:
    engine = ScriptedEngine(SCRIPT)
    scheduler = Stepper(engine, Limits(), clock, lambda events, stats: None).scheduler
    store = Store(b"e" * 16, 2**20, clock)
    return Keeper(engine, scheduler, store, clock, lambda command: None, least=16, miner=miner, budget=1, look_s=look_s)


@pytest.mark.parametrize("look_s", [LOOK_S, 3.0])
def test_a_look_at_new_traffic_comes_due_without_further_traffic(look_s: float) -> None:
    clock = ManualClock()
    keeper = make(clock, miner=Miner(), look_s=look_s)
    keeper.mine(clock())
    assert keeper.look_at() is None, "nothing new: an idle engine may sleep for ever"
    clock.advance(1.0)
    keeper.submit(Generation(1, [1, 2, 3], 1), clock())
    assert keeper.look_at() == look_s
    keeper.mine(clock())
    assert keeper.look_at() == look_s, "it is not time yet"
    clock.advance(look_s)
    keeper.mine(clock())
    assert keeper.look_at() is None
    keeper.submit(Generation(2, [1, 2, 3], 1), clock())
    assert keeper.look_at() == 1.0 + 2 * look_s


def test_without_a_miner_there_is_nothing_to_look_at() -> None:
    clock = ManualClock()
    keeper = make(clock, miner=None)
    keeper.submit(Generation(1, [1, 2, 3], 1), clock())
    assert keeper.look_at() is None


def test_an_engine_that_sleeps_wakes_for_a_look_and_pins_what_it_finds() -> None:
    clock, resting, finished, pinned = ManualClock(), threading.Event(), SimpleQueue[int](), SimpleQueue[int]()

    def deliver(events: list[Event], stats: EngineStats) -> None:
        for event in events:
            if isinstance(event, Finished) and event.rid > 0:
                finished.put(event.rid)
        if not events:
            resting.set()
        if stats.prefixes_pinned:
            pinned.put(stats.prefixes_pinned)

    stepper = Stepper(ScriptedEngine(SCRIPT), Limits(), clock, deliver)
    stepper.keep(TierSettings(ram_mib=1, least=16, mined=1, look_s=0.01))
    thread = threading.Thread(target=stepper.run, name="engine under test")
    thread.start()
    try:
        assert resting.wait(PATIENCE), "the first look is before the first prompt"
        for rid in range(1, 5):
            stepper.submit(Generation(rid, [*range(1, 101), 100 + rid], 1))
            assert finished.get(timeout=PATIENCE) == rid
        assert pinned.empty(), "the next one is not due while the clock stands still"
        clock.advance(0.01)
        assert pinned.get(timeout=PATIENCE) == 1
    finally:
        stepper.close()
        thread.join(PATIENCE)
