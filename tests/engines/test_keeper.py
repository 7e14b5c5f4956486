"""By hand and in virtual time, but for the store's own threads, which are waited for."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

import pytest

from headrace.core.budget import Pace
from headrace.core.errors import StartupError
from headrace.core.events import Event, Finished
from headrace.core.kv import Pin
from headrace.core.limits import Limits
from headrace.core.plan import Chunk, Drawn, Plan
from headrace.core.request import Generation
from headrace.engines.base import EngineStats, StepFailed
from headrace.engines.keeper import COPY_S, LOOK_S, SHARE, TRIES, Keeper, TierSettings, open_store
from headrace.engines.stepper import Stepper
from headrace.kv.blob import BLOCK, blocks, pack
from headrace.kv.disk import Disk
from headrace.kv.mining import MIN_USES, Miner
from headrace.kv.store import Done, Store
from headrace.testing import ManualClock, Script, ScriptedEngine
from rig import GREEDY, Transcript

ROOM = 2**20
"""Bytes: more than any test fills."""
PATIENCE = 10.0
"""Seconds until a wait for another thread counts as failed."""
SAVE_S, LOAD_S, STEP_S = 3e-3, 1e-3, 10e-3


def answer(prompt: Sequence[int]) -> Script:
    """Of its prompt alone, so that a mix-up shows."""
    rng = random.Random(repr(list(prompt)))
    return [[bytes([rng.randrange(97, 123)])] for _ in range(200)]


def text(prompt: Sequence[int], n: int) -> str:
    return b"".join(token for (token,) in answer(prompt)[:n]).decode()


def prompt(n: int, first: int) -> list[int]:
    return [first, *(i % 50 for i in range(1, n))]


class Engine(ScriptedEngine):
    """Copies and steps take their time; what a slot holds is compared token by token; its cells are counted."""

    def __init__(self, clock: ManualClock, *, cells: int, slots: int) -> None:
        super().__init__(
            answer, clock=clock, wait=self._pass, step_s=STEP_S, prefill_s=STEP_S, cells=cells, slots=slots
        )
        self._manual = clock
        self.saves: list[tuple[int, int, int]] = []
        self.loads: list[tuple[int, int]] = []
        self.free: Callable[[], int] = lambda: cells

    def _pass(self, seconds: float) -> bool:
        self._manual.advance(seconds)
        return False

    def save(self, slot: int, start: int, end: int) -> bytes:
        self.saves.append((slot, start, end))
        self._manual.advance(SAVE_S)
        return super().save(slot, start, end)

    def load(self, slot: int, start: int, end: int, payload: bytes) -> Sequence[int]:
        self._manual.advance(LOAD_S)
        if self.free() < end - start:
            return ()
        self.loads.append((start, end))
        return super().load(slot, start, end, payload)

    def _compute(self, chunk: Chunk) -> Drawn | None:
        drawn = super()._compute(chunk)
        if chunk.draw is not None:
            assert self.slots[chunk.slot] == list(chunk.draw.history), "the KV is not that of this sequence"
        return drawn


class Forgetful(Store):
    """Loses blocks when asked to: `lost` counts calls of `get` from 0."""

    lost: Iterable[int] = ()
    asked = 0

    def get(self, key: bytes) -> bytes | None:
        self.asked += 1
        return None if self.asked - 1 in self.lost else super().get(key)


class Silent(Store):
    """A disk that never answers."""

    def fetch(self, keys: Iterable[bytes], done: Done) -> None:
        self.fetches = [*getattr(self, "fetches", ()), tuple(keys)]


class House:
    """An engine with its stepper, its keeper and its store, moved by hand."""

    def __init__(self, store: Store, clock: ManualClock, engine: Engine, limits: Limits, miner: Miner | None) -> None:
        self.clock, self.engine, self.store = clock, engine, store
        self.transcript = Transcript()
        self.stepper = Stepper(engine, limits, clock, lambda events, _: self._hear(events))
        self.scheduler = self.stepper.scheduler
        self.commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.keeper = self.stepper._keeper = Keeper(
            engine, self.scheduler, store, clock, self.commands.put, least=64, miner=miner, budget=4
        )
        layout = self.stepper._pool.layout
        engine.free = lambda: layout.n - layout.used
        self._rid = 0

    def _hear(self, events: list[Event]) -> None:
        self.transcript.take([event for event in events if event.rid > 0])

    def ask(self, tokens: list[int], max_tokens: int = 3, *, n: int = 1, salt: str = "", cache: bool = True) -> int:
        self._rid += 1
        generation = Generation(self._rid, tokens, max_tokens, n, sampling=GREEDY, salt=salt, cache=cache)
        self.transcript.ask(generation)
        self.keeper.submit(generation, self.clock())
        return self._rid

    @property
    def held_until(self) -> float | None:
        """Until when the engine would sleep."""
        return self.scheduler.held_until(self.clock())

    def step(self) -> Plan | None:
        plan = self.scheduler.plan(self.clock())
        if plan is not None:
            self.stepper.step(plan)
        self.check()
        return plan

    def work(self) -> None:
        """Until there is nothing to compute."""
        while self.step():
            pass

    def rest(self) -> None:
        """All that an idle engine does, until that is nothing."""
        while True:
            self.work()
            self.stepper._carry_out()
            if self.keeper.save():
                continue
            now = self.clock()
            self.keeper.mine(now)
            if not self.keeper.fill(now):
                self.stepper._carry_out()
                self.check()
                return

    def check(self) -> None:
        layout, pool = self.stepper._pool.layout, self.stepper._pool
        self.stepper._carry_out()
        assert layout.used == pool.used <= pool.cells
        for slot in range(self.engine.n_slots):
            assert len(layout.of(slot)) == len(self.engine.slots.get(slot, []))

    def answered(self, tokens: list[int], max_tokens: int = 3, **options: str | int) -> int:
        """Ask, work, and see that the answer is right: tokens that were cached."""
        rid = self.ask(tokens, max_tokens, **options)  # type: ignore[arg-type]
        self.work()
        for index in range(self.transcript.asked[rid].n):
            assert self.transcript.text(rid, index) == text(tokens, max_tokens)
        return self.transcript.cached[rid, 0]

    def forget(self) -> None:
        """The cells lose all that is idle."""
        residency = self.scheduler.residency
        for slot in list(residency.idle):
            residency.drop(slot)
        self.check()
        assert self.stepper._pool.used == self.stepper._pool.held

    def fetched(self) -> None:
        """Wait for one fetch, and let the engine thread hear of it."""
        self.commands.get(timeout=PATIENCE)()


@contextmanager
def house(
    path: Path | None = None,
    *,
    ram: int = ROOM,
    cells: int = 8192,
    slots: int = 8,
    limits: Limits | None = None,
    miner: Miner | None = None,
    store: type[Store] = Store,
) -> Iterator[House]:
    clock = ManualClock(1.0)
    engine = Engine(clock, cells=cells, slots=slots)
    disk = None if path is None else Disk(path, 2**24, engine.fingerprint)
    kept = store(engine.fingerprint, ram, clock, disk=disk)
    kept.start()
    assert kept.opened(PATIENCE)
    try:
        yield House(kept, clock, engine, limits or Limits(idle_cells=cells), miner)
        assert kept.flush(PATIENCE)
    finally:
        kept.close(PATIENCE)


P = prompt(600, 1)
"""Two full blocks and a part of a third."""


@pytest.fixture
def away(tmp_path: Path) -> Path:
    """A directory that holds the KV of P and two answer tokens."""
    with house(tmp_path) as h:
        h.answered(P)
        h.rest()
        assert h.store.flush(PATIENCE)
    return tmp_path


# --- saving


def test_what_is_idle_is_saved_block_by_block() -> None:
    with house() as h:
        h.answered(P)
        assert h.engine.saves == [(0, 0, BLOCK)], "while it worked there was time for one"
        h.clock.advance(1.0)
        assert h.keeper.save()
        assert h.engine.saves == [(0, 0, 256), (0, 256, 512)]
        assert h.keeper.save()
        assert h.engine.saves[2:] == [(0, 512, 602)], "the last drawn token is not in the KV"
        assert not h.keeper.save()
        assert h.store.stats.ram_blocks == 3
        assert h.store.stats.ram_bytes == 602 * h.engine.bytes_per_token


def test_nothing_is_saved_twice() -> None:
    with house() as h:
        h.answered(P)
        h.rest()
        before = list(h.engine.saves)
        h.answered([*P, 7, 8, 9])
        h.rest()
        assert h.engine.saves[len(before) :] == [(h.engine.saves[-1][0], 512, 605)], "only what is new"
        before = list(h.engine.saves)
        h.forget()
        h.answered([*P, 7, 8, 9])
        h.rest()
        assert h.engine.saves == before


def test_what_is_running_is_not_saved() -> None:
    with house() as h:
        h.ask(P, 50)
        for _ in range(10):
            h.step()
        h.clock.advance(1.0)
        assert not h.keeper.save()
        assert h.engine.saves == []


def test_what_is_too_short_is_not_saved_and_stays() -> None:
    with house(limits=Limits(idle_cells=8192, warm_cells=0)) as h:
        h.answered(prompt(60, 1))
        h.rest()
        assert h.engine.saves == []
        assert h.stepper._pool.used == 62, "there is nothing to bring it back from"


def test_nobody_who_does_not_want_it_is_saved() -> None:
    with house() as h:
        assert h.answered(P, cache=False) == 0
        h.rest()
        assert h.engine.saves == []
        assert h.answered(P, cache=False) == 0


def test_while_there_is_work_copies_take_a_share_of_the_time() -> None:
    with house(limits=Limits(idle_cells=8192)) as h:
        for first in range(1, 6):
            h.answered(prompt(600, first))
        h.clock.advance(10.0)
        h.engine.saves.clear()
        h.ask(prompt(10, 99), 190)
        began, at = h.clock(), list[float]()
        while h.step():
            if len(h.engine.saves) > len(at):
                at.append(h.clock())
        assert len(at) > 10
        assert len(at) * SAVE_S <= SHARE * (h.clock() - began) + SAVE_S
        assert min(b - a for a, b in pairwise(at)) >= SAVE_S / SHARE - 1e-9


def test_no_copy_lengthens_a_gap_beside_a_prompt() -> None:
    with house(limits=Limits(idle_cells=8192, prefill_chunk=100, pace=Pace())) as h:
        h.answered(P, 1)
        h.engine.saves.clear()
        h.clock.advance(10.0)
        h.ask(prompt(20, 3), 100)
        h.step()
        assert len(h.engine.saves) == 1, "nobody reads yet"
        h.engine.saves.clear()
        h.ask(prompt(450, 2), 3)
        saves = 0
        while (plan := h.step()) is not None and plan.prompts:
            assert h.engine.saves == []
            h.clock.advance(10.0)
            saves += 1
        assert saves > 2
        assert len(h.engine.saves) == 1, "and when it has its first token there is time"


def test_a_copy_waits_until_a_gap_has_room_for_it() -> None:
    with house(limits=Limits(idle_cells=8192, pace=Pace(itl=0.1))) as h:
        h.answered(P)
        h.engine.saves.clear()
        h.clock.advance(10.0)
        assert not h.keeper.save(lambda: None, spare=COPY_S / 2)
        assert h.engine.saves == []
        assert h.keeper.save(lambda: None, spare=COPY_S)
        assert len(h.engine.saves) == 1
        h.clock.advance(10.0)
        assert not h.keeper.save(lambda: None, spare=SAVE_S / 2), "it is judged by the one before"
        h.ask(prompt(20, 3), 50)
        h.step()
        plan = h.scheduler.plan(h.clock())
        assert plan is not None
        assert h.stepper._spare(plan, 0.03) == pytest.approx(0.07), "what is left of the readers' gap"
        h.ask(prompt(400, 4), 50)
        plan = h.scheduler.plan(h.clock())
        assert plan is not None
        assert plan.prompts
        assert h.stepper._spare(plan, 0.03) == 0.0


def test_what_the_engine_cannot_save_is_left_alone() -> None:
    with house() as h:
        h.answered(P)

        def fail(slot: int, start: int, end: int) -> bytes:
            h.engine.saves.append((slot, start, end))
            raise StepFailed("no")

        h.engine.save = fail  # type: ignore[method-assign]
        h.engine.saves.clear()
        h.rest()
        assert len(h.engine.saves) == 1, "once, not for ever"
        assert h.answered(P) == 599


def test_what_is_saved_leaves_the_cells_early() -> None:
    with house(limits=Limits(idle_cells=8192, warm_cells=700)) as h:
        h.answered(P)
        h.answered(prompt(600, 2))
        assert h.stepper._pool.idle == 1204
        h.rest()
        assert h.stepper._pool.idle == 602
        assert h.answered(P) == 599, "and is found again"
        assert h.engine.loads == [(0, 256), (256, 512), (512, 602)]


def test_the_end_saves_what_is_idle(tmp_path: Path) -> None:
    with house(tmp_path) as h:
        h.answered(P)
        h.answered(prompt(300, 2))
        h.ask(prompt(300, 3), 50)
        h.step()
        h.keeper.close(PATIENCE)
        assert h.step() is not None, "who runs is not robbed"
    with house(tmp_path) as h:
        assert h.store.match(P).length == 600
        assert h.store.match(prompt(300, 2)).length == 300
        assert h.store.match(prompt(300, 3)).length == 0


def test_the_end_takes_no_longer_than_it_may(tmp_path: Path) -> None:
    with house(tmp_path, limits=Limits(idle_cells=8192)) as h:
        for first in range(1, 9):
            h.answered(prompt(600, first))
        h.engine.saves.clear()
        h.keeper.close(20 * SAVE_S)
        assert len(h.engine.saves) in (10, 11), "the other half of the time is for writing"


# --- bringing back


def test_what_left_the_cells_comes_back_from_ram_at_once() -> None:
    with house() as h:
        h.answered(P)
        h.rest()
        h.forget()
        computed = h.scheduler.prompt_tokens
        rid = h.ask([*P, 7, 8])
        assert h.held_until is None
        h.work()
        assert h.transcript.cached[rid, 0] == 600
        assert h.transcript.text(rid) == text([*P, 7, 8], 3)
        assert h.scheduler.prompt_tokens - computed == 2
        assert h.store.stats.restored_tokens == 602
        assert h.store.stats.restore_s == pytest.approx(3 * LOAD_S)


def test_only_the_beginning_that_fits_is_used() -> None:
    with house() as h:
        h.answered(P)
        h.rest()
        h.forget()
        other = [*P[:300], *prompt(100, 77)]
        assert h.answered(other) == 300
        assert h.engine.loads == [(0, 256), (256, 512)], "the second one goes beyond and is cut"
        h.forget()
        assert h.answered(P[:256]) == 255


def test_cells_bring_what_they_have_and_blocks_the_rest() -> None:
    with house() as h:
        h.answered(P)
        h.rest()
        h.forget()
        h.answered(P[:400])
        h.engine.loads.clear()
        assert h.answered(P) == 599
        assert h.engine.loads == [(256, 512), (512, 602)]


def test_what_is_kept_of_a_tenant_is_for_that_tenant() -> None:
    with house() as h:
        h.answered(P, salt="a")
        h.rest()
        h.forget()
        assert h.answered(P, salt="b") == 0
        assert h.answered(P) == 0
        h.forget()
        assert h.answered(P, salt="a") == 599


def test_two_choices_load_once() -> None:
    with house() as h:
        h.answered(P)
        h.rest()
        h.forget()
        rid = h.ask([*P, 7, 8], n=2)
        h.work()
        assert [h.transcript.cached[rid, i] for i in range(2)] == [600, 601]
        assert [h.transcript.text(rid, i) for i in range(2)] == [text([*P, 7, 8], 3)] * 2
        assert len(h.engine.loads) == 3


@pytest.mark.parametrize(("lost", "cached"), [((0,), 0), ((1,), 256), ((2,), 512), ((0, 1, 2), 0), ((1, 2), 256)])
@pytest.mark.parametrize("chunk", [512, 100])
def test_a_block_that_is_gone_by_then_is_computed(lost: Sequence[int], cached: int, chunk: int) -> None:
    with house(store=Forgetful, limits=Limits(idle_cells=8192, prefill_chunk=chunk)) as h:
        assert isinstance(h.store, Forgetful)
        h.answered(P)
        h.rest()
        h.forget()
        h.store.lost = lost
        before = h.scheduler.cached_tokens
        assert h.answered([*P, 7, 8]) == cached
        assert h.scheduler.cached_tokens - before == cached
        assert h.engine.loads == [(0, 256), (256, 512)][: lost[0]]
        assert h.answered([*P, 7, 8]) == 601, "what was computed is as good as what was lost"


def test_a_block_that_is_gone_for_two_choices() -> None:
    with house(store=Forgetful) as h:
        assert isinstance(h.store, Forgetful)
        h.answered(P)
        h.rest()
        h.forget()
        h.store.lost = (1,)
        rid = h.ask([*P, 7, 8], n=2)
        h.work()
        assert [h.transcript.text(rid, i) for i in range(2)] == [text([*P, 7, 8], 3)] * 2
        assert h.transcript.cached[rid, 0] == 256


def test_loading_makes_itself_room() -> None:
    """Idle cells leave before what is loaded takes their place, or the engine would find none."""
    with house(cells=1300) as h:
        h.answered(P)
        h.rest()
        h.forget()
        for first in (2, 3):
            h.answered(prompt(600, first))
        assert h.stepper._pool.free < 602
        assert h.answered(P) == 599
        assert len(h.engine.loads) == 3


def test_loading_for_one_spares_what_another_copies_from() -> None:
    with house(cells=1300, limits=Limits(idle_cells=1300, prefill_chunk=1000)) as h:
        h.answered(P)
        h.rest()
        h.forget()
        old, young = prompt(500, 2), prompt(500, 3)
        h.answered(old)
        h.answered(young)
        one, two = h.ask(P), h.ask([*old, 7])
        h.work()
        assert h.transcript.text(one) == text(P, 3)
        assert h.transcript.text(two) == text([*old, 7], 3)
        assert h.transcript.cached[one, 0] == 599
        assert h.transcript.cached[two, 0] == 500


# --- from far away


def test_what_is_on_the_disk_is_fetched_while_others_go_on(away: Path) -> None:
    with house(away) as h:
        rid = h.ask([*P, 7, 8])
        assert h.held_until is not None
        other = h.ask(prompt(20, 9))
        plan = h.step()
        assert plan is not None
        assert list(plan.by_generation()) == [other], "it waits"
        h.fetched()
        assert h.held_until is None
        h.work()
        assert h.transcript.cached[rid, 0] == 600
        assert h.transcript.text(rid) == text([*P, 7, 8], 3)
        assert h.store.stats.ssd_hits == 3
        h.forget()
        assert h.answered(P) == 599, "from RAM, this time"
        assert h.store.stats.ssd_hits == 3


def test_two_choices_wait_for_one_fetch(away: Path) -> None:
    with house(away) as h:
        rid = h.ask([*P, 7, 8], n=2)
        assert h.step() is None
        h.fetched()
        h.work()
        assert [h.transcript.text(rid, i) for i in range(2)] == [text([*P, 7, 8], 3)] * 2
        assert h.transcript.cached[rid, 0] == 600


def test_who_leaves_while_it_waits_leaves_nothing_behind(away: Path) -> None:
    with house(away) as h:
        rid = h.ask(P)
        h.scheduler.cancel(rid)
        assert h.held_until is None
        h.transcript.over[rid] = "cancelled"
        h.fetched()
        assert h.step() is None
        assert h.scheduler.rids() == set()
        assert h.answered(P) == 599, "the fetch was of use to the next one"


def test_a_fetch_that_never_ends_is_not_waited_for(away: Path) -> None:
    with house(away, store=Silent) as h:
        rid = h.ask(P)
        assert h.step() is None
        until = h.held_until
        assert until is not None
        assert h.clock() < until < h.clock() + 0.6, "computing it would take as long"
        h.clock.now = until
        h.work()
        assert h.transcript.cached[rid, 0] == 0
        assert h.transcript.text(rid) == text(P, 3)


def test_a_fetch_that_comes_too_late_changes_nothing(away: Path) -> None:
    with house(away) as h:
        rid = h.ask(P)
        h.clock.now += 0.6
        h.step()
        h.fetched()
        h.work()
        assert h.transcript.cached[rid, 0] == 0
        assert h.transcript.text(rid) == text(P, 3)


def test_files_that_are_gone_are_computed(away: Path) -> None:
    with house(away) as h:
        for file in away.glob("*.kv"):
            file.unlink()
        rid = h.ask(P)
        h.fetched()
        h.work()
        assert h.transcript.cached[rid, 0] == 0
        assert h.transcript.text(rid) == text(P, 3)


def test_what_the_cells_hold_is_not_fetched(away: Path) -> None:
    """RAM is too small to keep it, the cells have it: nobody waits for the disk."""
    with house(away, ram=0, store=Silent) as h:
        h.ask(P)
        h.clock.advance(1.0)
        h.work()
        rid = h.ask([*P, 7, 8])
        assert h.held_until is None
        h.work()
        assert h.transcript.cached[rid, 0] == 600
        assert isinstance(h.store, Silent)
        assert len(h.store.fetches) == 1


def test_a_short_prefix_is_sooner_computed_than_fetched(away: Path) -> None:
    with house(away, store=Silent) as h:
        assert h.answered(P[:9]) == 0
        assert not hasattr(h.store, "fetches")


def test_who_waits_and_is_paused_does_not_keep_the_engine_awake(away: Path) -> None:
    """Once the hold is over, only the reader can wake it."""
    with house(away, store=Silent) as h:
        rid = h.ask(P)
        h.scheduler.pause(rid, True)
        assert h.held_until is None
        h.clock.advance(10.0)
        assert h.step() is None
        assert h.held_until is None


# --- pins


def pin(tokens: Sequence[int]) -> Pin:
    return Pin("one", tuple(tokens))


def test_a_prefix_that_is_given_is_computed_when_there_is_time() -> None:
    with house() as h:
        h.keeper.pin([pin(P), pin(prompt(300, 2))])
        assert h.keeper.pinned == 0
        h.rest()
        assert h.keeper.pinned == 2
        h.forget()
        assert h.answered([*P, 7]) == 600
        assert h.answered([*prompt(300, 2), 7]) == 300


def test_others_come_first() -> None:
    with house(limits=Limits(earliest_deadline=True)) as h:
        h.keeper.pin([pin(P)])
        h.keeper.fill(h.clock())
        rid = h.ask(prompt(10, 5))
        plan = h.step()
        assert plan is not None
        assert rid in plan.by_generation()


def test_a_prefix_that_is_kept_already_is_not_computed_again() -> None:
    with house() as h:
        h.answered(P)
        h.rest()
        before = h.scheduler.prompt_tokens
        h.keeper.pin([pin(P)])
        assert h.keeper.pinned == 1
        h.rest()
        assert h.scheduler.prompt_tokens == before


def test_what_is_pinned_stays_whatever_else_comes() -> None:
    with house(ram=1100 * 4) as h:
        h.keeper.pin([pin(P)])
        h.rest()
        for first in range(2, 12):
            h.answered(prompt(400, first))
            h.rest()
        h.forget()
        assert h.answered([*P, 7]) == 600
        assert h.store.match(prompt(400, 2)).length == 0


def test_what_is_not_given_any_more_is_like_any_other() -> None:
    with house(ram=1100 * 4) as h:
        h.keeper.pin([pin(P)])
        h.rest()
        h.keeper.pin([])
        assert h.keeper.pinned == 0
        for first in range(2, 12):
            h.answered(prompt(400, first))
            h.rest()
        h.forget()
        assert h.answered([*P, 7]) == 0


def test_a_pinned_prefix_is_found_after_a_restart(tmp_path: Path) -> None:
    with house(tmp_path) as h:
        h.keeper.pin([pin(P)])
        h.rest()
        h.keeper.close(PATIENCE)
    with house(tmp_path) as h:
        h.keeper.pin([pin(P)])
        assert h.keeper.pinned == 1
        h.rest()
        assert h.scheduler.prompt_tokens == 0
        rid = h.ask([*P, 7])
        if h.held_until is not None:  # the store may have it in RAM already
            h.fetched()
        h.work()
        assert h.transcript.cached[rid, 0] == 600


def test_all_tenants_see_what_is_given() -> None:
    with house() as h:
        h.keeper.pin([pin(P)])
        h.rest()
        h.forget()
        assert h.answered([*P, 7], salt="a") == 600
        assert h.answered([*P, 7], salt="b") == 600


def test_a_pin_that_ends_inside_a_block_does_not_make_public_what_follows_it() -> None:
    with house(ram=2000 * 4) as h:
        own = [*P, *prompt(80, 5)]
        h.answered(own)
        h.rest()
        h.keeper.pin([pin(P)])
        h.rest()
        h.forget()
        assert h.answered([*own, 7], salt="a") == 600, "the rest of the block was somebody's own text"
        h.forget()
        assert h.answered([*own, 7]) == 680


def test_what_does_not_fit_is_not_tried_for_ever() -> None:
    with house(ram=100 * 4, miner=Miner()) as h:
        h.keeper.pin([pin(P)])
        for _ in range(5):
            h.rest()
            h.forget()
            h.clock.advance(LOOK_S + 1.0)
        assert h.keeper.pinned == 0
        once = 601 + (TRIES - 1)
        assert h.scheduler.prompt_tokens == once, "the second time the cells had it"
        h.keeper.pin([pin(P)])
        h.rest()
        assert h.scheduler.prompt_tokens == 2 * once, "asked for again, it is tried again"


def test_what_comes_again_and_again_is_pinned_for_those_without_a_salt() -> None:
    with house(miner=Miner(), ram=2000 * 4) as h:
        for i in range(int(MIN_USES) + 2):
            h.answered([*P, *prompt(40, 100 + i)])
        h.clock.advance(LOOK_S)
        h.rest()
        assert h.keeper.pinned == 1
        for first in range(2, 12):
            h.answered(prompt(900, first), salt="other")
            h.rest()
        h.forget()
        assert h.answered([*P, 7], salt="a") == 0, "it was somebody's, not everybody's"
        assert h.answered([*P, 7]) == 600


def test_what_a_tenant_repeats_is_not_mined() -> None:
    with house(miner=Miner()) as h:
        for i in range(10):
            h.answered([*P, *prompt(40, 100 + i)], salt="a")
        h.clock.advance(LOOK_S)
        h.rest()
        assert h.keeper.pinned == 0


def test_it_looks_at_the_traffic_now_and_then() -> None:
    looks = []

    class Watched(Miner):
        def choose(self, budget: int, now: float, cells: int | None = None):  # type: ignore[no-untyped-def]
            looks.append(now)
            return super().choose(budget, now, cells)

    with house(miner=Watched()) as h:
        for _ in range(100):
            h.keeper.mine(h.clock())
            h.clock.advance(1.0)
        assert len(looks) == 100 // LOOK_S


# --- how it is put together


def test_the_settings_say_which_tiers_there_are(tmp_path: Path) -> None:
    clock = ManualClock()
    engine = Engine(clock, cells=1024, slots=4)
    (block,) = blocks(engine.fingerprint, "", P[:100])
    for settings, ram, ssd in (
        (TierSettings(ram_mib=1), 1, 0),
        (TierSettings(ssd_mib=1, ssd_path=str(tmp_path / "a")), 1, 1),
        (TierSettings(ram_mib=1, ssd_mib=1, ssd_path=str(tmp_path / "b")), 1, 1),
        (TierSettings(ram_mib=1, ssd_mib=0, ssd_path=str(tmp_path / "c")), 1, 0),
    ):
        store = open_store(settings, engine, clock)
        assert store.opened(PATIENCE)
        assert store.put(block, pack(P[:100]))
        assert store.flush(PATIENCE)
        assert (store.stats.ram_blocks, store.stats.ssd_blocks) == (ram, ssd)
        store.close(PATIENCE)
    assert not (tmp_path / "c").exists()


def test_an_address_that_is_none_stops_the_start() -> None:
    clock = ManualClock()
    with pytest.raises(StartupError, match="redis"):
        open_store(TierSettings(ram_mib=1, redis_url="nonsense"), Engine(clock, cells=1024, slots=4), clock)


@pytest.mark.parametrize(("size", "cache"), [(0, True), (4, False)])
def test_an_engine_whose_kv_is_of_no_use_outside_goes_without(tmp_path: Path, size: int, cache: bool) -> None:
    clock = ManualClock()
    engine = Engine(clock, cells=1024, slots=4)
    engine.bytes_per_token = size
    stepper = Stepper(engine, Limits(prefix_cache=cache), clock, lambda events, stats: None)
    stepper.keep(TierSettings(ram_mib=1, ssd_mib=1, ssd_path=str(tmp_path / "none")))
    assert stepper.stats().prefixes_pinned == 0
    assert stepper._keeper is None
    assert not (tmp_path / "none").exists()


# --- when it looks at the traffic


def idle_keeper(clock: ManualClock, *, miner: Miner | None, look_s: float = LOOK_S) -> Keeper:
    engine = ScriptedEngine([[b"a"]])
    scheduler = Stepper(engine, Limits(), clock, lambda events, stats: None).scheduler
    store = Store(b"e" * 16, 2**20, clock)
    return Keeper(engine, scheduler, store, clock, lambda command: None, least=16, miner=miner, budget=1, look_s=look_s)


@pytest.mark.parametrize("look_s", [LOOK_S, 3.0])
def test_a_look_at_new_traffic_comes_due_without_further_traffic(look_s: float) -> None:
    clock = ManualClock()
    keeper = idle_keeper(clock, miner=Miner(), look_s=look_s)
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
    keeper = idle_keeper(clock, miner=None)
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

    stepper = Stepper(ScriptedEngine([[b"a"]]), Limits(), clock, deliver)
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
