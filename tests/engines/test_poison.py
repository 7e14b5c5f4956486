"""Logits that are not finite in a step: who fails, who goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.watched import Stream, run, serving, soon
from headrace.core.errors import StartupError
from headrace.core.events import Failed
from headrace.core.plan import NOT_FINITE, Chunk, Draw
from headrace.core.request import Generation, Sampling
from headrace.engines import supervisor
from headrace.engines.base import UntrueNumbers
from headrace.engines.llama import LlamaEngine, LlamaSettings
from headrace.engines.worker import Blueprint
from tiny_gguf import F32, U32, tiny_gguf, weights

BAD = 84
"""A token whose embedding is NaN; the steps of a warm-up have others."""


@pytest.fixture
def bad_model(tmp_path: Path) -> Path:
    tensors = weights()
    tensors["token_embd.weight"][BAD] = np.nan
    return tiny_gguf(tmp_path / "bad.gguf", tensors)


def load(path: Path, **options: Any) -> LlamaEngine:
    return LlamaEngine(LlamaSettings(path, "m", cells=512, slots=4, batch=128, **options), time.monotonic)


def greedy(engine: LlamaEngine, slot: int, tokens: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(tokens drawn, chunks that were broken) of a whole prompt, forgotten afterwards."""
    want = Draw(Sampling(temperature=0.0), 0, len(tokens), tokens, len(tokens))
    result = engine.step([Chunk(slot, 0, tokens, want)])
    engine.trim(slot, 0)
    (drawn,) = result.drawn
    assert drawn is not None
    return drawn.tokens, result.broken


@pytest.mark.real
@pytest.mark.parametrize("flash", [True, False])
def test_what_it_leaves_in_the_kv_is_written_over(bad_model: Path, flash: bool) -> None:
    engine = load(bad_model, flash_attention=flash)
    long = [1 + i % 50 for i in range(100)]
    expected = [greedy(engine, 0, prompt) for prompt in ([1, 5, 6], long)]
    assert all(tokens and not broken for tokens, broken in expected)
    for bad in ([1, BAD, 7], [*long[:70], BAD, *long[:20]]):
        assert greedy(engine, 1, bad) == ((), (0,))
        assert [greedy(engine, 0, prompt) for prompt in ([1, 5, 6], long)] == expected
        assert [greedy(engine, 2, prompt) for prompt in ([1, 5, 6], long)] == expected
    engine.close()


@pytest.mark.real
def test_a_model_that_is_wrong_from_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UntrueNumbers, match="NaN or infinite"):
        load(tiny_gguf(tmp_path / "x.gguf", rope__freq_base=(F32, 0.0)))
    with pytest.raises(StartupError, match=r"0 tokens.*engine\.context"):
        load(tiny_gguf(tmp_path / "x.gguf", context_length=(U32, 0)))


@pytest.fixture
def blueprint(monkeypatch: pytest.MonkeyPatch) -> Blueprint:
    """A scripted engine whose rows are broken for a prompt with 250 in it."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH")))))
    monkeypatch.setattr(supervisor, "_BACKOFF_FIRST", 0.0)
    return Blueprint("broken_rows_engine:make", {"n_ctx": 200}, {})


def test_alone_it_fails_and_the_worker_stays(blueprint: Blueprint) -> None:
    async def main() -> None:
        async with serving(blueprint) as engine:
            for rid in (1, 2):
                stream = Stream(engine, Generation(rid, [rid, 250], 5))
                await soon(stream.over)
                assert stream[-1] == Failed(rid, "engine_failed", NOT_FINITE)
            good = Stream(engine, Generation(3, [3, 2], 5))
            await soon(good.over)
            assert good.answer()[0][0] == "abcde"
            assert engine.stats.broken == 2
            assert engine.restarts == 0

    run(main)


def test_beside_others_it_alone_fails_and_the_others_go_on(blueprint: Blueprint) -> None:
    async def main() -> None:
        async with serving(blueprint) as engine:
            good = [Stream(engine, Generation(rid, [rid, 2], 150)) for rid in (1, 2)]
            for stream in good:
                await soon(stream.begun)
            bad = Stream(engine, Generation(9, [9, 250], 5))
            await soon(bad.over)
            assert isinstance(bad[-1], Failed)
            assert bad[-1].code == "engine_failed"
            for stream in good:
                await soon(stream.over)
                assert stream.answer()[0][0] == ("abcdefgh" * 19)[:150]
            assert (engine.restarts, engine.given_up) == (2, 1), "it was found out by trying it again"

    run(main)
