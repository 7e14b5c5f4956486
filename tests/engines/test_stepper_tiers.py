"""KV outside the pool, as the stepper uses it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.desk import PATIENCE, SCRIPT, drive, prompt
from headrace.core.limits import Limits
from headrace.core.request import Generation
from headrace.engines.keeper import ASK_S, OPEN_S, WAKE_S, Keeper, TierSettings, open_store
from headrace.engines.stepper import Stepper
from headrace.kv.store import Store
from headrace.kv.tiers import Hit
from headrace.testing import ManualClock, ScriptedEngine
from rig import Transcript


class Forgetful(ScriptedEngine):
    """Its loads from position `lost_from` on fail."""

    lost_from = 10**9

    def load(self, slot: int, start: int, end: int, payload: bytes) -> Sequence[int]:
        return () if start >= self.lost_from else super().load(slot, start, end, payload)


class Vault:
    """A stepper that keeps KV in RAM, with nothing idle in the pool, stepped by hand."""

    def __init__(self, engine: ScriptedEngine, tiers: TierSettings | None = None, **limits: Any) -> None:
        self.engine = engine
        self.clock = ManualClock()
        self.transcript = Transcript()
        options = {"prefill_chunk": 100, "warm_cells": 0, **limits}
        self.stepper = Stepper(engine, Limits(**options), self.clock, lambda e, _: self.transcript.take(e))
        self.stepper.keep(tiers or TierSettings(ram_mib=8))
        assert self.stepper._keeper is not None
        self.keeper: Keeper = self.stepper._keeper

    def ask(self, rid: int, tokens: list[int], max_tokens: int = 3, **fields: Any) -> None:
        generation = Generation(rid, tokens, max_tokens, **fields)
        self.transcript.ask(generation)
        self.keeper.submit(generation, self.clock())

    def drive(self) -> None:
        drive(self.stepper)

    def put_away(self) -> None:
        """Save all that is idle, and drop it from the pool."""
        while self.keeper.save():
            pass
        self.stepper._carry_out()


@pytest.mark.parametrize("lost_from", [0, 256, 512])
def test_what_could_not_be_loaded_is_computed_and_stays(lost_from: int) -> None:
    engine = Forgetful(SCRIPT)
    vault = Vault(engine)
    vault.ask(1, prompt(700))
    vault.drive()
    vault.put_away()
    assert not any(engine.slots.values())
    engine.lost_from = lost_from
    vault.ask(2, prompt(700))
    vault.drive()  # the engine checks that each chunk follows on what its slot holds
    assert vault.transcript.text(2) == "abc"
    assert vault.transcript.cached[2, 0] == min(lost_from, 699)
    layout = vault.stepper._pool.layout
    assert all(len(layout.of(slot)) == len(tokens) for slot, tokens in engine.slots.items())


def test_whose_fetch_has_run_out_of_time_wakes_nobody() -> None:
    """It waits for its reader, or for room: neither comes with time, and looking again and again would take a core."""
    scheduler = Stepper(ScriptedEngine(SCRIPT), Limits(), ManualClock(), lambda *_: None).scheduler
    scheduler.submit(Generation(1, prompt(9), 3), 0.0, hold=1.0)
    scheduler.submit(Generation(2, prompt(9, 2), 3), 0.0, hold=3.0)
    scheduler.pause(1, True)
    assert scheduler.plan(0.5) is None
    assert scheduler.held_until(0.5) == 3.0
    scheduler.pause(1, False)
    assert scheduler.held_until(0.5) == 1.0
    assert scheduler.held_until(1.0) == 3.0
    assert scheduler.held_until(3.0) is None


class Unsavable(ScriptedEngine):
    """Saving breaks in a way that the port does not name."""

    broken = False

    def save(self, slot: int, start: int, end: int) -> bytes:
        if self.broken:
            raise ValueError("not the port's error")
        return super().save(slot, start, end)


def test_the_end_comes_whatever_saving_does() -> None:
    engine = Unsavable(SCRIPT)
    vault = Vault(engine)
    vault.ask(1, prompt(600))
    vault.drive()
    engine.broken = True
    vault.stepper._stop()
    with pytest.raises(ValueError, match="not the port's error"):
        vault.stepper.run()
    vault.stepper.close()  # returns
    assert engine.closed


def on_disk(path: Path) -> TierSettings:
    return TierSettings(ram_mib=0, ssd_mib=8, ssd_path=str(path))


def keep_on_disk(path: Path, tokens: list[int]) -> None:
    """Put the KV of this prompt on the disk, as a server before this one."""
    vault = Vault(ScriptedEngine(SCRIPT), on_disk(path))
    vault.ask(1, tokens)
    vault.drive()
    vault.put_away()
    assert vault.keeper._store.flush(PATIENCE)
    vault.keeper.close(0.0)


def fetched(vault: Vault) -> None:
    """Carry out what the store's thread has to say."""
    vault.stepper._drain(block=True, timeout=PATIENCE)


def test_without_ram_the_disk_is_still_of_use(tmp_path: Path) -> None:
    keep_on_disk(tmp_path, prompt(700))
    vault = Vault(ScriptedEngine(SCRIPT), on_disk(tmp_path))
    vault.ask(1, prompt(700))
    assert vault.stepper.scheduler.plan(vault.clock()) is None, "it waits for the disk"
    fetched(vault)
    vault.drive()
    assert vault.transcript.cached[1, 0] == 699
    vault.keeper.close(0.0)


def test_what_is_on_the_disk_is_known_before_the_first_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(Store, "opened", lambda _self, timeout: asked.append(timeout))
    open_store(on_disk(tmp_path), ScriptedEngine(SCRIPT), ManualClock()).close(0.0)
    assert asked == [OPEN_S]


def test_a_short_prefix_is_fetched_too(tmp_path: Path) -> None:
    """70 tokens take 70 ms to compute and a few to read."""
    keep_on_disk(tmp_path, prompt(70))
    vault = Vault(ScriptedEngine(SCRIPT), on_disk(tmp_path))
    vault.ask(1, prompt(70))
    assert vault.stepper.scheduler.held_until(0.0) == pytest.approx(2 * WAKE_S, rel=0.01)
    fetched(vault)
    vault.drive()
    assert vault.transcript.cached[1, 0] == 69
    vault.keeper.close(0.0)


def test_nobody_waits_for_the_disk_to_bring_what_the_pool_holds(tmp_path: Path) -> None:
    keep_on_disk(tmp_path, prompt(700))
    vault = Vault(ScriptedEngine(SCRIPT), on_disk(tmp_path), warm_cells=None)
    first = Generation(1, prompt(700), 3)
    vault.transcript.ask(first)
    vault.stepper.scheduler.submit(first, 0.0)  # past the keeper, as if nothing were kept of it
    vault.drive()
    vault.ask(2, prompt(700))
    assert vault.stepper.scheduler.held_until(0.0) is None
    vault.drive()
    assert vault.transcript.cached[2, 0] == 699
    vault.keeper.close(0.0)


def test_the_bytes_that_redis_may_send_are_part_of_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    vault = Vault(ScriptedEngine(SCRIPT))
    asked: list[int] = []

    def estimate(_hit: Hit, shared: int = 0) -> float:
        asked.append(shared)
        return 0.02

    monkeypatch.setattr(vault.keeper._store, "beyond", lambda *_: (b"a" * 16, b"b" * 16))
    monkeypatch.setattr(vault.keeper._store, "estimate", estimate)
    monkeypatch.setattr(vault.keeper._store, "fetch", lambda *_: None)
    vault.ask(1, prompt(700))
    assert asked == [2 * 256 * 4]
    assert vault.stepper.scheduler.held_until(0.0) == pytest.approx(2 * ASK_S), "a question alone takes that long"


def test_what_is_idle_leaves_before_cells_are_loaded() -> None:
    """Otherwise the engine has no cells for the block when its turn comes."""

    class Tight(ScriptedEngine):
        def load(self, slot: int, start: int, end: int, payload: bytes) -> Sequence[int]:
            held = sum(map(len, self.slots.values()))
            return super().load(slot, start, end, payload) if held + end - start <= self.n_cells else ()

    vault = Vault(Tight(SCRIPT, cells=1000, n_ctx=1000))
    vault.ask(1, prompt(700))
    vault.drive()
    vault.put_away()
    vault.ask(2, prompt(500, 7))
    vault.drive()
    vault.ask(3, prompt(700))
    vault.drive()
    assert vault.transcript.cached[3, 0] == 699


def test_who_waits_for_the_disk_has_the_place_of_what_will_be_left_of_it(tmp_path: Path) -> None:
    keep_on_disk(tmp_path, prompt(700))
    vault = Vault(ScriptedEngine(SCRIPT), on_disk(tmp_path))
    vault.ask(1, prompt(700))
    (waiting,) = vault.stepper.scheduler.waiting
    assert waiting.known == 699
    assert waiting.due < 0.01
    fetched(vault)
    vault.drive()
    assert vault.transcript.cached[1, 0] == 699
    vault.keeper.close(0.0)


def test_a_fetch_that_takes_too_long_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_on_disk(tmp_path, prompt(700))
    vault = Vault(ScriptedEngine(SCRIPT), on_disk(tmp_path))
    monkeypatch.setattr(vault.keeper._store, "fetch", lambda *_: None)
    vault.ask(1, prompt(700))
    vault.clock.advance(1.0)
    while plan := vault.stepper.scheduler.plan(vault.clock()):
        vault.stepper.step(plan)
    assert vault.transcript.text(1) == "abc"
    assert vault.transcript.cached[1, 0] == 0
    vault.keeper.close(0.0)
