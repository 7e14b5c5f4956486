"""The engine with a model that has sliding-window layers and 262,144 tokens: what is cut, shared and given up must be
as exact as with any other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.core.events import Admitted, Delta, Event, Finished
from headrace.core.limits import Limits
from headrace.core.plan import Chunk, Draw
from headrace.core.request import Generation
from headrace.core.sampler import Logits
from headrace.engines.llama import LlamaEngine, LlamaSettings
from headrace.engines.llama_lib import C
from headrace.engines.local import LocalEngine
from headrace.engines.vocab import Vocabulary
from headrace.testing import ManualClock
from rig import GREEDY

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

WINDOW = 512
SETTINGS = LlamaSettings(Path(), "window", cells=2048, slots=1, batch=64)


@pytest.fixture(scope="module")
def vocabulary(window_model: Path) -> Vocabulary:
    return Vocabulary.open(window_model)


@pytest.fixture(scope="module")
def alone(window_model: Path) -> Iterator[LlamaEngine]:
    """One slot and small batches: without all of their cells the windowed layers would hold 1,088 positions."""
    engine = LlamaEngine(replace(SETTINGS, path=window_model), ManualClock())
    yield engine
    engine.close()


def counting(vocabulary: Vocabulary, start: int, n: int) -> list[int]:
    """The first `n` tokens of a text whose continuation is beyond doubt."""
    text = "".join(f" {number}," for number in range(start, start + n))
    return [2, *vocabulary.encode(text, special=False)][:n]


def prefill(engine: LlamaEngine, ids: Sequence[int], start: int = 0) -> Logits:
    """The last token's logits."""
    for at in range(start, len(ids), SETTINGS.batch):
        part = ids[at : at + SETTINGS.batch]
        last = at + len(part) == len(ids)
        engine.step([Chunk(0, at, part, Draw(GREEDY, 0, len(ids), ids, len(ids)) if last else None)])
    logits: Logits = engine._outputs(1)[0].copy()
    return logits


def test_what_it_says_of_itself(alone: LlamaEngine) -> None:
    assert int(C.llama_model_n_swa(alone._model)) == WINDOW
    assert (alone.info.n_vocab, alone.info.bos, alone.info.add_bos, alone.info.chat_template) == (
        262_144,
        2,
        True,
        None,
    )
    assert alone.can_share
    assert alone.bytes_per_token == 0, "llama.cpp saves only the window of these layers: KV stays in the pool"


def test_a_prefix_far_behind_the_window_can_be_gone_on_from_exactly(alone: LlamaEngine, vocabulary: Vocabulary) -> None:
    ids = counting(vocabulary, 100, 1300)
    short = prefill(alone, ids[:420])
    alone.trim(0, 0)
    prefill(alone, ids)
    assert int(C.llama_memory_seq_pos_min(alone._memory, 0)) == 0, "nothing that left the window was forgotten"
    alone.trim(0, 384)
    assert np.abs(prefill(alone, ids[:420], 384) - short).max() == 0.0
    alone.trim(0, 0)


class Answer:
    """What one generation said."""

    def __init__(self) -> None:
        self.text, self.cached = "", 0
        self.over = asyncio.Event()

    def __call__(self, event: Event) -> None:
        match event:
            case Admitted():
                self.cached = event.cached
            case Delta():
                self.text += event.text
            case Finished():
                self.over.set()


async def answers(engine: LocalEngine, *prompts: list[int], rid: int, cache: bool = True, n: int = 24) -> list[Answer]:
    """Of generations that run at the same time."""
    told = [Answer() for _ in prompts]
    for i, (prompt, one) in enumerate(zip(prompts, told, strict=True)):
        engine.submit(Generation(rid + i, prompt, n, sampling=GREEDY, cache=cache), one)
    for one in told:
        await one.over.wait()
    return told


def test_reused_prefixes_and_preempted_sequences_give_the_cold_text(window_model: Path, vocabulary: Vocabulary) -> None:
    settings = replace(SETTINGS, path=window_model, cells=1280, slots=8, batch=128, drafts=8)
    limits = Limits(max_running=4, max_batch=4, step_tokens=128, prefill_chunk=128, idle_cells=640)
    long, other = counting(vocabulary, 1, 600), counting(vocabulary, 300, 600)
    cut = long[:540]

    async def play() -> None:
        engine = LocalEngine(lambda: LlamaEngine(settings, ManualClock()), limits, ManualClock())
        await engine.start()
        try:
            (first,) = await answers(engine, long, rid=1)
            (shorter,) = await answers(engine, cut, rid=10)
            assert shorter.cached > WINDOW
            # Both fit when they begin and do not when they end: one is given up and computed again.
            crowd = await answers(engine, long, other, rid=20, n=60)
            assert engine.stats.preemptions > 0
            cold = [
                (await answers(engine, prompt, rid=rid, cache=False, n=60))[0]
                for rid, prompt in ((30, long), (40, cut), (50, other))
            ]
            assert [one.cached for one in cold] == [0, 0, 0]
            assert all(one.text.count(",") > 5 for one in cold), "it counts on"
            assert cold[0].text.startswith(first.text)
            assert cold[1].text.startswith(shorter.text)
            assert [one.text for one in crowd] == [cold[0].text, cold[2].text]
        finally:
            await engine.close()

    asyncio.run(play())
