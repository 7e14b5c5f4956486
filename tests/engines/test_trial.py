from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.core.plan import Chunk, StepResult
from headrace.core.tuning import READERS
from headrace.engines.llama import LlamaEngine
from headrace.engines.trial import CELLS, SLOTS, Job, Trial, run_delays, run_trial
from headrace.testing import ManualClock, ScriptedEngine

PREFILL_S, DECODE_S, POSITION_S = 0.002, 0.005, 1e-6

BREAKING = """
import os, sys
from headrace.core.errors import StartupError
def abort(settings, clock):
    sys.stderr.write("GGML_ASSERT(false) failed\\n"); sys.stderr.flush(); os.abort()
def refuse(settings, clock):
    raise StartupError("cannot load it")
def crash(settings, clock):
    raise KeyError("odd")
def hang(settings, clock):
    import time; time.sleep(60)
"""


class PricedEngine(ScriptedEngine):
    """Its steps take what they cost by the formula above, on a clock that is moved by hand."""

    def __init__(self, clock: ManualClock, **options: Any) -> None:
        super().__init__([[b"a"]] * 999, slots=SLOTS, batch=576, cells=CELLS, **options)
        self.time = clock
        self.seen: list[Sequence[Chunk]] = []

    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        self.seen.append(list(chunks))
        for chunk in chunks:
            n = len(chunk.tokens)
            self.time.advance(DECODE_S if n == 1 else n * PREFILL_S + POSITION_S * n * (chunk.start + (n - 1) / 2))
        return super().step(chunks)


def job(**options: Any) -> Job:
    return Job(
        "headrace.testing:counting_worker",
        {},
        **{"long": 512, "idle": 512, "step_tokens": 512, "guard_s": 0.25, **options},
    )


def scripted(factory: str = "headrace.testing:counting_worker", **options: Any) -> Job:
    settings = {"name": "s", "step_s": 0.001, "n_ctx": 4096, "cells": CELLS, "slots": SLOTS, "batch": 576}
    return Job(factory, settings, **{"long": 128, "idle": 64, "step_tokens": 64, "guard_s": 0.0, **options})


def environ(*folders: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), *sys.path])}


def test_it_tells_what_steps_cost() -> None:
    clock = ManualClock()
    engine = PricedEngine(clock)
    figures = Trial(engine, job(), clock).run()
    known = dict(figures.first_tokens)
    for tokens in (64, 512, 2048):
        expected = tokens * PREFILL_S + POSITION_S * tokens * (tokens - 1) / 2
        assert known[tokens] == pytest.approx(expected, rel=0.02)
    assert figures.one == pytest.approx(DECODE_S)
    assert figures.many == pytest.approx(READERS * DECODE_S)


def test_steps_are_as_long_as_the_server_would_make_them() -> None:
    clock = ManualClock()
    engine = PricedEngine(clock)
    figures = Trial(engine, job(), clock).run()
    long = [len(chunk.tokens) for step in engine.seen for chunk in step if chunk.slot == 0 and len(chunk.tokens) > 1]
    assert sum(long) == 512
    assert figures.longest == max(long)
    assert 0.15 < max(long) * PREFILL_S < 0.25
    fixed = PricedEngine(ManualClock())
    assert Trial(fixed, job(guard_s=0.0, step_tokens=200), fixed.time).run().longest == 200


def test_the_pool_is_wide_and_readers_are_at_the_end_of_a_prompt() -> None:
    clock = ManualClock()
    engine = PricedEngine(clock)
    Trial(engine, job(), clock).run()
    idle = [len(engine.slots.get(slot, ())) for slot in range(READERS + 1, SLOTS)]
    assert idle[:3] == [256, 256, 0], "nobody's, and still there"
    wide = [step for step in engine.seen if len(step) == READERS]
    assert wide
    assert {len(chunk.tokens) for step in wide for chunk in step} == {1}
    assert min(chunk.start for step in wide for chunk in step) == 512


def test_lengths_that_the_model_cannot_hold_are_left_out() -> None:
    clock = ManualClock()
    figures = Trial(PricedEngine(clock, n_ctx=1024), job(), clock).run()
    assert [tokens for tokens, _ in figures.first_tokens] == [64, 512]


@pytest.mark.real
def test_the_real_engine_takes_its_steps(model_engine: LlamaEngine) -> None:
    figures = Trial(model_engine, job(long=96, idle=32, step_tokens=64, decodes=3), time.perf_counter).run()
    known = dict(figures.first_tokens)
    assert 0.0 < known[64] < known[512]
    assert 2048 not in known, "the pool holds no more"
    assert figures.longest <= 64
    assert figures.one > 0.0
    assert figures.many > 0.0
    assert figures.save > 0.0


def test_a_child_does_it() -> None:
    report = run_trial(scripted(), environ())
    assert report.failure == ""
    assert report.figures is not None
    assert 0.001 <= report.figures.one < 0.1
    assert report.figures.memory > 10**7
    assert 0.0 <= report.figures.waited


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("abort", "ended by SIGABRT: GGML_ASSERT(false) failed"),
        ("refuse", "cannot load it"),
        ("crash", "ended with status 1: KeyError: 'odd'"),
        ("none", "AttributeError"),
    ],
)
def test_a_child_that_ends_badly_is_a_failure_with_a_reason(tmp_path: Path, way: str, said: str) -> None:
    (tmp_path / "breaking.py").write_text(BREAKING)
    report = run_trial(scripted(f"breaking:{way}"), environ(tmp_path))
    assert report.figures is None
    assert said in report.failure
    assert "\n" not in report.failure


def test_a_child_that_never_ends_is_ended(tmp_path: Path) -> None:
    (tmp_path / "breaking.py").write_text(BREAKING)
    report = run_trial(scripted("breaking:hang"), environ(tmp_path), timeout_s=1.0)
    assert report.failure == "took longer than 1 s"


def test_how_long_threads_waited_is_read_where_it_can_be(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "schedstat").write_text("100 2500000000 3\n")
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "schedstat").write_text("odd")
    assert run_delays(tmp_path) == {"7": 2.5}
    assert run_delays(tmp_path / "none") == {}
