"""20,000 short conversations, one after another and eight at a time: what is left behind must be nothing."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Sequence
from pathlib import Path

from headrace.core.events import Event, Failed, Finished
from headrace.core.limits import Limits
from headrace.core.request import Generation
from headrace.engines.base import EngineStats
from headrace.engines.stepper import Stepper
from headrace.testing import ManualClock, ScriptedEngine
from rig import GREEDY

CONVERSATIONS = 20_000
SETTLED = 5_000
"""By then every cache is as full as it gets."""
STEM = list(range(300, 316))


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """Ten clients that ask as soon as they are answered; every fourth asks on, every fiftieth hangs up."""

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.engine = ScriptedEngine([[b"a"]] * 12, cells=4096, slots=32, record=False)
        self.stepper = Stepper(self.engine, Limits(max_running=8, idle_cells=512), ManualClock(), self._deliver)
        self.live: dict[int, list[int]] = {}
        self.asked = self.begun = self.ended = self.cancelled = 0
        self.again: list[list[int]] = []

    def _deliver(self, events: Sequence[Event], _stats: EngineStats) -> None:
        for event in events:
            assert not isinstance(event, Failed)
            if isinstance(event, Finished):
                prompt = self.live.pop(event.rid)
                self.ended += 1
                if event.rid % 4 == 0 and len(prompt) < 30:
                    self.again.append([*prompt, *b"a" * event.completion_tokens, *b"go on"])

    def _ask(self) -> None:
        rng = self.rng
        if self.again:
            prompt = self.again.pop()
        else:
            self.begun += 1
            prompt = [
                *(STEM if self.begun % 3 else []),
                self.begun % 4000,
                *rng.choices(range(256), k=rng.randint(1, 9)),
            ]
        self.asked += 1
        self.live[self.asked] = prompt
        generation = Generation(
            self.asked, prompt, rng.choice((1, 2, 4, 8, 14)), sampling=GREEDY, cache=self.asked % 9 != 0
        )
        self.stepper.scheduler.submit(generation, 0.0)

    def run(self, conversations: int) -> None:
        """Until so many have begun and all are over."""
        scheduler = self.stepper.scheduler
        while True:
            while len(self.live) < 10 and (self.begun < conversations or self.again):
                self._ask()
            plan = scheduler.plan(0.0)
            if plan is None:
                break
            self.stepper.step(plan)
            if self.asked % 50 == 0 and self.asked in self.live:
                del self.live[self.asked]
                scheduler.cancel(self.asked)
                self.stepper._carry_out()
                self.cancelled += 1
        assert not self.live
        assert self.ended + self.cancelled == self.asked

    def footprint(self) -> tuple[int, int]:
        """(objects, bytes) of the process."""
        gc.collect()
        return len(gc.get_objects()), resident()


def test_20000_conversations_leave_nothing_behind() -> None:
    soak = Soak()
    soak.run(SETTLED)
    objects, size = soak.footprint()
    soak.run(CONVERSATIONS)
    more_objects, more_size = soak.footprint()
    assert more_objects - objects < 1000
    assert more_size - size < 4 << 20

    stepper, scheduler, pool = soak.stepper, soak.stepper.scheduler, soak.stepper._pool
    assert soak.asked > CONVERSATIONS * 1.1
    assert soak.cancelled > 100
    assert scheduler.cached_tokens > CONVERSATIONS, "little was shared"
    layout = pool.layout
    assert layout.fragmentation < 0.05
    assert 0 < layout.used == pool.used == pool.idle <= 512
    assert layout.width < 2 * 512
    assert pool.slots_running == 0
    assert pool.slots_idle + pool.slots_free == soak.engine.n_slots
    held = {slot: len(tokens) for slot, tokens in soak.engine.slots.items() if tokens}
    assert held == {slot: len(layout.of(slot)) for slot in held}
    assert len(held) == pool.slots_idle

    scheduler.residency.idle_cells = 0
    scheduler.submit(Generation(soak.asked + 1, [1], 1, cache=False), 0.0)
    soak.live[soak.asked + 1] = [1]
    while plan := scheduler.plan(0.0):
        stepper.step(plan)
    assert (pool.used, pool.held, layout.used, layout.shared, layout.width) == (0, 0, 0, 0, 0)
    assert pool.slots_free == soak.engine.n_slots
    assert repr(scheduler.residency._indexes[""]) == "<Radix [0 slots, 0 tokens]>"
    assert not any(soak.engine.slots.values())
