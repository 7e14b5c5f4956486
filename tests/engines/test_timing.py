from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.core.plan import Chunk, StepResult
from headrace.core.timings import Part, figures
from headrace.core.tuning import READERS
from headrace.engines.base import StepFailed
from headrace.engines.llama import LlamaEngine
from headrace.engines.timing import DEPTH, ROWS, Job, Timer, run_timing
from headrace.engines.trial import CELLS, SLOTS
from headrace.testing import ManualClock, ScriptedEngine

ROW_S, POSITION_S = 0.0005, 1e-7

BREAKING = """
import os, signal
def crash(settings, clock):
    os.kill(os.getpid(), signal.SIGSEGV)
"""


class PricedEngine(ScriptedEngine):
    """Its steps take what their rows cost, on a clock that is moved by hand."""

    def __init__(self, clock: ManualClock, *, row: float = ROW_S, **options: Any) -> None:
        super().__init__([[b"a"]] * 999, slots=SLOTS, batch=576, cells=CELLS, **options)
        self.time, self.row = clock, row
        self.broken = False

    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        for chunk in chunks:
            n = len(chunk.tokens)
            self.time.advance(n * self.row + POSITION_S * n * (chunk.start + (n - 1) / 2))
        result = super().step(chunks)
        return StepResult(result.drawn, result.computed_at, (0,)) if self.broken else result


def job(**options: Any) -> Job:
    return Job("headrace.testing:counting_worker", {}, **options)


def timer(*, row: float = ROW_S, n_ctx: int = 8192, **options: Any) -> tuple[Timer, PricedEngine]:
    clock = ManualClock()
    engine = PricedEngine(clock, row=row, n_ctx=n_ctx)
    return Timer(engine, job(**options), clock), engine


def environ(*folders: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), *sys.path])}


def test_its_timings_say_what_prompts_cost() -> None:
    found = figures(timer()[0].run(), Part(1, 1), 8192)
    assert found is not None
    for tokens, seconds in found.first_tokens:
        assert seconds == pytest.approx(tokens * ROW_S + POSITION_S * tokens * (tokens - 1) / 2, rel=0.02)
    assert found.one == pytest.approx(ROW_S + POSITION_S * DEPTH, rel=0.02)
    assert found.many == pytest.approx(READERS * ROW_S, rel=0.02)


def test_a_long_prompt_stays_in_the_pool_while_the_rest_is_timed() -> None:
    one, engine = timer()
    timings = one.run()
    assert [t.depth for t in timings if t.rows == ROWS[0]] == [0, 512, 1024]
    assert {slot: len(held) for slot, held in engine.slots.items() if held} == {0: DEPTH + 3}
    assert max(t.depth for t in timings if t.rows == 1) == DEPTH


@pytest.mark.parametrize("row", [0.002, 0.02])
def test_a_slow_model_is_timed_with_shorter_steps_in_its_time(row: float) -> None:
    one, engine = timer(row=row, seconds=3.0)
    timings = one.run()
    assert figures(timings, Part(1, 1), 8192) is not None
    assert max(t.rows for t in timings) < ROWS[0]
    assert engine.time() < 3.0 + 6 * 64 * row, "the time, and the steps that there must be"


def test_a_small_context_is_kept() -> None:
    one, _ = timer(n_ctx=200)
    assert max(t.depth + t.rows // t.sequences for t in one.run()) <= 200


def test_numbers_that_are_none_are_a_failure() -> None:
    one, engine = timer()
    engine.broken = True
    with pytest.raises(StepFailed, match="NaN"):
        one.run()


@pytest.mark.real
def test_the_real_engine_takes_its_steps(model_engine: LlamaEngine) -> None:
    timings = Timer(model_engine, job(depth=128, seconds=1.0), time.perf_counter).run()
    found = figures(timings, Part(30, 30), 512)
    assert found is not None
    assert found.one > 0.0
    assert [tokens for tokens, _ in found.first_tokens] == [64]


def test_a_child_does_it() -> None:
    settings = {"name": "s", "step_s": 0.001, "n_ctx": 4096, "cells": CELLS, "slots": SLOTS, "batch": 576}
    report = run_timing(Job("headrace.testing:counting_worker", settings, 512, 1.0), environ(), 60.0)
    assert report.failure == ""
    assert report.n_ctx == 4096
    assert report.memory > 10**7
    assert figures(report.timings, Part(1, 1), report.n_ctx) is not None


def test_a_child_that_dies_by_a_signal_is_a_failure_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "breaking.py").write_text(BREAKING)
    report = run_timing(Job("breaking:crash", {}), environ(tmp_path), 60.0)
    assert "SIGSEGV" in report.failure
    assert "\n" not in report.failure
    assert report.timings == ()
