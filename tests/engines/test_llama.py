"""The real engine with the demo model. Steps are kept few and small: a token costs milliseconds."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.answered import answered
from headrace.core.attention import TILE, Attention
from headrace.core.errors import StartupError
from headrace.core.events import Admitted, Delta, Event, Failed, Finished
from headrace.core.limits import Limits
from headrace.core.plan import Chunk, Draw, Drawn
from headrace.core.request import Generation, Sampling
from headrace.core.speculation import Speculation
from headrace.engines.base import StepAborted, StepFailed
from headrace.engines.llama import LlamaEngine, LlamaSettings, worker
from headrace.engines.llama_lib import C
from headrace.engines.local import LocalEngine
from headrace.engines.stepper import Stepper
from headrace.engines.supervisor import WorkerEngine
from headrace.engines.vocab import Vocabulary
from headrace.engines.worker import Blueprint
from headrace.testing import ManualClock, check_step_engine, check_stream_engine, collect
from rig import GREEDY, Transcript

pytestmark = pytest.mark.real

# Texts whose continuation is beyond doubt: rounding depends on a batch's shape, but cannot change the likeliest token.
COUNT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,"
ABC = "a b c d e f g h i j k l m n o p q r s t u v w x y z a b c d e f g h i j k l"
FOX = "the big red fox the big red fox the big red fox the big red fox the big"
CATS = "cat dog cat dog cat dog cat dog cat dog cat dog cat dog cat dog cat"
LONG = "\n".join([ABC, FOX, COUNT])


@pytest.fixture(scope="module")
def vocabulary(demo_model: Path) -> Vocabulary:
    return Vocabulary.open(demo_model)


def small(path: Path, **options: Any) -> LlamaEngine:
    return LlamaEngine(
        LlamaSettings(path, "small", **{"cells": 256, "slots": 8, "batch": 256, **options}), ManualClock()
    )


def greedy(ids: Sequence[int]) -> Draw:
    return Draw(GREEDY, 0, len(ids), ids, len(ids))


def test_warming_leaves_nothing_behind(demo_model: Path) -> None:
    for options in ({"slots": 2}, {"batch": 3}, {}):
        engine = small(demo_model, **options)
        try:
            held = [C.llama_memory_seq_pos_max(engine._memory, slot) for slot in range(engine.n_slots)]
            assert held == [-1] * engine.n_slots
        finally:
            engine.close()


def first(drawn: Drawn | None) -> int:
    assert drawn is not None
    return drawn.tokens[0]


def held(engine: LlamaEngine, slot: int) -> int:
    """Positions that llama.cpp itself says are in the slot."""
    return int(C.llama_memory_seq_pos_max(engine._memory, slot)) + 1


# --- as a StepEngine


def test_it_keeps_the_contract(model_engine: LlamaEngine, vocabulary: Vocabulary) -> None:
    check_step_engine(model_engine, vocabulary.encode(COUNT, special=False))
    assert [held(model_engine, slot) for slot in range(5)] == [0] * 5


def test_what_it_says_of_itself(model_engine: LlamaEngine) -> None:
    assert (model_engine.n_slots, model_engine.n_cells, model_engine.n_batch) == (16, 2048, 256)
    assert model_engine.info.name == "demo"
    assert model_engine.info.n_ctx == 2048, "no more than the pool holds, though the model could"
    assert model_engine.can_share
    assert model_engine.piece(model_engine.info.eos or 0) == b""


def test_an_abort_leaves_the_kv_as_it_was(model_engine: LlamaEngine, vocabulary: Vocabulary) -> None:
    engine = model_engine
    count, abc = vocabulary.encode(COUNT, special=False), vocabulary.encode(ABC, special=False)
    engine.step([Chunk(0, 0, count[:-1], None), Chunk(1, 0, abc[:-1], None)])
    before = [held(engine, slot) for slot in range(3)]
    over = threading.Event()

    def abort() -> None:
        while not over.wait(0.001):  # from before the step until it gives up
            engine.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        with pytest.raises(StepAborted):
            engine.step([Chunk(0, before[0], count[-1:], greedy(count)), Chunk(2, 0, [5] * 250, None)])
    finally:
        over.set()
        thread.join()
    assert [held(engine, slot) for slot in range(3)] == before
    with suppress(StepAborted):  # the last abort may have come too late for that step
        engine.step([Chunk(3, 0, [7], None)])
    result = engine.step([Chunk(0, before[0], count[-1:], greedy(count)), Chunk(1, before[1], abc[-1:], greedy(abc))])
    assert [engine.piece(first(d)) for d in result.drawn] == [b" ", b" m"]


def test_an_abort_between_steps_is_for_the_next_one_alone(model_engine: LlamaEngine, vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode(ABC, special=False)
    model_engine.abort()
    with pytest.raises(StepAborted):
        model_engine.step([Chunk(0, 0, ids, greedy(ids))])
    assert model_engine.piece(first(model_engine.step([Chunk(0, 0, ids, greedy(ids))]).drawn[0])) == b" m"


def test_a_step_that_finds_no_cells_fails_and_leaves_the_kv_as_it_was(demo_model: Path, vocabulary: Vocabulary) -> None:
    engine = small(demo_model)
    ids = vocabulary.encode(ABC, special=False)
    n = len(ids) - 1
    engine.step([Chunk(0, 0, ids[:-1], None)])
    engine.copy(0, 1, n)
    engine.step([Chunk(1, n, [7] * (256 - n), None)])  # shared cells are counted once: the pool is full now
    with pytest.raises(StepFailed, match="gave 1"):
        engine.step([Chunk(2, 0, [7, 7, 7], None)])
    assert [held(engine, slot) for slot in range(3)] == [n, 256, 0]
    engine.trim(1, 255)
    assert engine.piece(first(engine.step([Chunk(0, n, ids[-1:], greedy(ids))]).drawn[0])) == b" m"
    engine.trim(0, 0)
    with pytest.raises(StepFailed):
        engine.step([Chunk(2, 0, [7, 7], None)])
    engine.trim(1, 0)
    engine.step([Chunk(2, 0, [7, 7], None)])
    engine.close()
    engine.close()


def test_a_hole_in_the_positions_fails_in_one_line(model_engine: LlamaEngine) -> None:
    model_engine.step([Chunk(0, 0, [7], None)])
    with pytest.raises(StepFailed) as caught:
        model_engine.step([Chunk(0, 5, [7], None)])
    assert "\n" not in str(caught.value)
    assert "consecutive" in str(caught.value)
    assert held(model_engine, 0) == 1


def test_rows_belong_to_their_chunks(model_engine: LlamaEngine, vocabulary: Vocabulary) -> None:
    texts = [COUNT, ABC, FOX, CATS]
    prompts = [vocabulary.encode(text, special=False) for text in texts]
    chunks = [Chunk(3 * i, 0, ids, greedy(ids)) for i, ids in enumerate(prompts)]
    chunks.insert(1, Chunk(1, 0, prompts[2][:5], None))
    together = model_engine.step(chunks).drawn
    assert together[1] is None
    assert [model_engine.piece(first(d)) for d in together if d] == [b" ", b" m", b" red", b" cat"]


def test_logprobs_name_tokens_with_their_bytes(model_engine: LlamaEngine, vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode(ABC, special=False)
    want = Draw(Sampling(temperature=0.0, logprobs=3), 0, len(ids), ids, len(ids))
    (drawn,) = model_engine.step([Chunk(0, 0, ids, want)]).drawn
    assert drawn is not None
    (told,) = drawn.logprobs
    assert (told.token, told.piece) == (drawn.tokens[0], b" m")
    assert -1.5 < told.logprob <= 0
    assert told.top[0] == (told.token, b" m", told.logprob)
    assert told.logprob >= told.top[1][2] >= told.top[2][2]


def test_bias_decides(model_engine: LlamaEngine, vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode(ABC, special=False)
    likely = vocabulary.encode(" m", special=False)[0]
    for bias, token in ((((4093, 100.0),), 4093), (((likely, -100.0),), None)):
        want = Draw(Sampling(temperature=1.0, logit_bias=bias), 3, len(ids), ids, len(ids))
        drawn = first(model_engine.step([Chunk(0, 0, ids, want)]).drawn[0])
        assert drawn == token if token else drawn != likely
        model_engine.trim(0, 0)


# --- guesses


def guessed(slot: int, ids: list[int], guesses: list[int], sampling: Sampling = GREEDY) -> Chunk:
    """A prompt from its start, with guesses behind it."""
    return Chunk(slot, 0, [*ids, *guesses], Draw(sampling, 0, len(ids), ids, len(ids), len(guesses)))


def test_guesses_are_checked_amid_other_chunks(model_engine: LlamaEngine, vocabulary: Vocabulary) -> None:
    texts = [COUNT, ABC, FOX, CATS]
    count, abc, fox, cats = (vocabulary.encode(text, special=False) for text in texts)
    model_engine.step([Chunk(9, 0, cats[:-1], None)])
    result = model_engine.step(
        [
            Chunk(9, len(cats) - 1, cats[-1:], greedy(cats)),
            guessed(2, fox, vocabulary.encode(" red fox the big", special=False)),
            Chunk(1, 0, abc[:5], None),
            guessed(3, count, vocabulary.encode(" 17, 19, 20", special=False)),
            Chunk(4, 0, abc, greedy(abc)),
            guessed(5, fox, vocabulary.encode(" green fox", special=False)),
        ]
    ).drawn
    texts = [b"".join(map(model_engine.piece, d.tokens)).decode() if d else "" for d in result]
    assert texts == [" cat", " red fox the big red", "", " 17, 18", " m", " red"]
    assert held(model_engine, 3) == len(count) + len(vocabulary.encode(" 17, 19, 20", special=False))


def test_each_accepted_token_has_its_logprob(model_engine: LlamaEngine, vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode(FOX, special=False)
    guesses = vocabulary.encode(" red fox a", special=False)
    (drawn,) = model_engine.step([guessed(0, ids, guesses, Sampling(temperature=0.0, logprobs=1))]).drawn
    assert drawn is not None
    assert [(told.token, told.piece) for told in drawn.logprobs] == list(
        zip(drawn.tokens, [b" red", b" fox", b" the"], strict=True)
    )


def test_more_guesses_than_it_has_room_for_fail_in_one_line(model_engine: LlamaEngine) -> None:
    with pytest.raises(StepFailed, match="a step of 34 guesses; the engine checks at most 32"):
        model_engine.step([guessed(0, [7], [7] * 17), guessed(1, [7], [7] * 17)])
    assert held(model_engine, 0) == 0
    every = [guessed(0, [7], [7] * 32), *[Chunk(slot, 0, [7], greedy([7])) for slot in range(1, 16)]]
    assert all(model_engine.step(every).drawn), "every slot draws and every guess is made: still room"


def test_an_engine_without_room_for_guesses_says_so(demo_model: Path) -> None:
    engine = small(demo_model, cells=64, batch=64, slots=1)
    assert engine.n_drafts == 0
    with pytest.raises(StepFailed, match="checks at most 0"):
        engine.step([guessed(0, [7], [7])])
    engine.close()


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, Sampling(temperature=0.6, top_p=0.9, seed=7), Sampling(temperature=0.5, frequency_penalty=0.1, seed=3)],
    ids=["greedy", "seeded", "penalised"],
)
def test_guesses_do_not_change_the_text(model_engine: LlamaEngine, vocabulary: Vocabulary, sampling: Sampling) -> None:
    passage = (
        "The old red boat lay in the harbour. Nobody knew who owned it, and on Sundays the children played there.\n"
    )
    prompt = vocabulary.encode(passage * 3 + passage[:12], special=False)
    plain, steps = answered(model_engine, prompt, sampling, 48, Speculation(), most=0)
    drafted, fewer = answered(model_engine, prompt, sampling, 48, Speculation(), most=32)
    assert drafted == plain
    assert steps == 48
    assert fewer < 30


# --- steps in two batches, and rows that nobody reads


Logits = np.ndarray[Any, np.dtype[np.float32]]

SHAPES = 0.25
"""How far the logits of two shapes of a batch may be apart, in their standard deviations. Row by row and in tiles they
are added up in another order, over weights of four bits: 0.16 was the most of twelve prompts of random words."""


def apart(a: Logits, b: Logits) -> float:
    return float(np.sqrt(np.mean((a - b) ** 2)) / max(a.std(), b.std()))


def logits_of(engine: LlamaEngine, chunks: Sequence[Chunk], split: int = 0, pad: int = 0) -> list[Logits]:
    """The logits that each chunk with a draw was drawn from; afterwards the slots hold what they did."""
    seen: list[Logits] = []
    outputs = engine._outputs

    def look(n: int) -> Logits:
        rows = outputs(n)
        seen.extend(rows.copy())
        return rows

    engine._outputs = look  # type: ignore[method-assign]
    try:
        if split or pad:
            engine.arrange(split, pad)
        engine.step(chunks)
    finally:
        del engine._outputs
        for chunk in chunks:
            engine.trim(chunk.slot, chunk.start)
    return seen


def readers_and_a_prompt(engine: LlamaEngine, seed: int) -> list[Chunk]:
    """Some readers, each after a text of its own, and a part of a prompt, deep in it."""
    rng = random.Random(seed)

    def word() -> int:
        return rng.randrange(100, 40_000)

    chunks = []
    for slot in range(1, 1 + rng.randrange(4)):
        text = [word() for _ in range(rng.randrange(2, 60))]
        engine.step([Chunk(slot, 0, text, None)])
        chunks.append(Chunk(slot, len(text), [word()], Draw(GREEDY, 0, len(text) + 1, [*text, 0], 1)))
    depth, count = rng.randrange(1, 300), rng.randrange(2, 50)
    while depth > 0 and held(engine, 0) < depth:
        start = held(engine, 0)
        engine.step([Chunk(0, start, [word() for _ in range(min(100, depth - start))], None)])
    ids = [word() for _ in range(count)]
    return [*chunks, Chunk(0, depth, ids, Draw(GREEDY, 0, depth + count, [0] * (depth + count), depth + count))]


def clear(engine: LlamaEngine) -> None:
    for slot in range(engine.n_slots):
        engine.trim(slot, 0)


@pytest.mark.parametrize("seed", range(8))
def test_what_rows_hold_that_nobody_reads_changes_no_bit(
    model_engine: LlamaEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = model_engine
    chunks = readers_and_a_prompt(engine, seed)
    rows = sum(len(chunk.tokens) for chunk in chunks)
    split = (len(chunks) - 1) * (seed % 2)
    pad = TILE - (len(chunks[-1].tokens) if split else rows)
    found = []
    for token in (0, 7, 12_345):
        monkeypatch.setattr("headrace.engines.llama._PAD_TOKEN", token)
        found.append(logits_of(engine, chunks, split, pad))
    assert all(np.array_equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    plain = logits_of(engine, chunks)
    for a, b in zip(found[0], plain, strict=True):
        assert apart(a, b) < SHAPES
    clear(engine)


def test_rows_that_nobody_reads_leave_nothing_behind(model_engine: LlamaEngine, vocabulary: Vocabulary) -> None:
    engine = model_engine
    ids = vocabulary.encode(COUNT, special=False)
    engine.arrange(0, TILE - len(ids))
    engine.step([Chunk(0, 0, ids, greedy(ids))])
    assert held(engine, engine.n_slots) == 0
    assert held(engine, 0) == len(ids)
    (drawn,) = engine.step([Chunk(1, 0, ids, greedy(ids))]).drawn
    assert first(drawn) >= 0
    assert held(engine, engine.n_slots) == 0, "the next step is plain again"
    clear(engine)


def test_a_step_goes_without_them_where_the_pool_is_full(demo_model: Path, vocabulary: Vocabulary) -> None:
    engine = small(demo_model, cells=256, batch=256, slots=2)
    ids = vocabulary.encode(ABC, special=False)
    engine.step([Chunk(0, 0, [7] * (256 - len(ids)), None)])
    engine.arrange(0, TILE - len(ids))
    (drawn,) = engine.step([Chunk(1, 0, ids, greedy(ids))]).drawn
    assert engine.piece(first(drawn)) == b" m"
    assert [held(engine, slot) for slot in (0, 1, 2)] == [256 - len(ids), len(ids), 0]
    engine.close()


@pytest.mark.parametrize("seed", range(4))
def test_readers_apart_draw_what_they_draw_together(model_engine: LlamaEngine, seed: int) -> None:
    engine = model_engine
    chunks = readers_and_a_prompt(engine, 100 + seed)
    plain, parts = logits_of(engine, chunks), logits_of(engine, chunks, split=len(chunks) - 1)
    assert len(plain) == len(parts) == len(chunks)
    assert all(apart(a, b) < SHAPES for a, b in zip(plain, parts, strict=True))
    clear(engine)


def test_a_step_that_fails_in_its_second_part_leaves_the_kv_as_it_was(
    model_engine: LlamaEngine, vocabulary: Vocabulary
) -> None:
    engine = model_engine
    count, abc = vocabulary.encode(COUNT, special=False), vocabulary.encode(ABC, special=False)
    engine.step([Chunk(1, 0, count[:-1], None)])
    reader = Chunk(1, len(count) - 1, count[-1:], greedy(count))
    engine.arrange(1, 0)
    with pytest.raises(StepFailed, match="a step of 300 tokens"):
        engine.step([reader, Chunk(0, 0, [7] * 300, None)])
    assert held(engine, 1) == len(count) - 1
    assert held(engine, 0) == 0
    part = engine._part

    def aborted(chunks: Sequence[Chunk], pad: int, *, last: bool) -> list[Drawn | None]:
        if last:
            engine.abort()
        return part(chunks, pad, last=last)

    engine._part = aborted  # type: ignore[method-assign]
    try:
        engine.arrange(1, TILE - len(abc))
        with pytest.raises(StepAborted):
            engine.step([reader, Chunk(0, 0, abc, None)])
    finally:
        del engine._part
    assert [held(engine, slot) for slot in (0, 1, engine.n_slots)] == [0, len(count) - 1, 0]
    (drawn,) = engine.step([reader]).drawn
    assert model_engine.piece(first(drawn)) == b" "
    clear(engine)


def test_what_attention_is_like_is_read_from_the_model(demo_model: Path, model_engine: LlamaEngine) -> None:
    assert model_engine.attention == Attention(9, 2, tiled=True, splits=True, pads=True)
    engine = small(demo_model, flash_attention=False, threads_batch=1)
    assert not engine.attention.tiled
    assert engine.attention.threads == 1
    engine.close()
    short = small(demo_model, batch=32)
    assert not short.attention.pads, "a batch holds no tile"
    short.close()


# --- through the scheduler: the same text whatever the way


class Served:
    """A stepper driven by hand over a real engine."""

    def __init__(self, engine: LlamaEngine, **limits: Any) -> None:
        self.transcript = Transcript()
        self.stepper = Stepper(engine, Limits(**limits), ManualClock(), lambda e, _: self.transcript.take(e))

    def submit(self, rid: int, prompt: list[int], max_tokens: int = 10, **options: Any) -> None:
        generation = Generation(rid, prompt, max_tokens, **{"sampling": GREEDY, **options})
        self.transcript.ask(generation)
        self.stepper.scheduler.submit(generation, 0.0)

    def step(self) -> bool:
        plan = self.stepper.scheduler.plan(0.0)
        if plan is not None:
            self.stepper.step(plan)
        return plan is not None

    def run(self) -> None:
        while self.step():
            pass

    def cancel(self, rid: int) -> None:
        self.stepper.scheduler.cancel(rid)
        self.stepper._carry_out()
        if rid in self.transcript.asked:
            self.transcript.over.setdefault(rid, "cancelled")

    def leave(self) -> None:
        """Give up all that is cached."""
        residency = self.stepper.scheduler.residency
        while residency.idle:
            residency.drop(next(iter(residency.idle)))
        self.stepper._carry_out()
        assert self.stepper.stats().cells_cached == 0


Alone = Callable[[list[int], int], str]


@pytest.fixture(scope="module")
def alone(loaded_engine: LlamaEngine) -> Alone:
    """The greedy text the plain way: by itself, in one chunk, without a cache."""
    known: dict[tuple[int, ...], str] = {}

    def text(prompt: list[int], max_tokens: int) -> str:
        key = (*prompt, max_tokens)
        if key not in known:
            served = Served(loaded_engine, prefix_cache=False, step_tokens=256, prefill_chunk=256)
            served.submit(1, prompt, max_tokens)
            served.run()
            known[key] = served.transcript.text(1)
        return known[key]

    return text


@pytest.fixture(scope="module")
def long(vocabulary: Vocabulary) -> list[int]:
    return vocabulary.encode(LONG, special=False)


@pytest.mark.parametrize("chunk", [64, 100])
def test_chunks_do_not_change_the_text(model_engine: LlamaEngine, alone: Alone, long: list[int], chunk: int) -> None:
    served = Served(model_engine, step_tokens=256, prefill_chunk=chunk, prefix_cache=False)
    served.submit(1, long, 8)
    served.run()
    assert served.transcript.text(1) == alone(long, 8) == " 17, 18,"


def test_sharing_does_not_change_the_text(
    model_engine: LlamaEngine, alone: Alone, long: list[int], vocabulary: Vocabulary
) -> None:
    longer = long + vocabulary.encode(" 17, 18, 19,", special=False)
    served = Served(model_engine, step_tokens=256, prefill_chunk=64)
    served.submit(1, long, 30)
    served.submit(2, longer, 5, n=2)  # waits for the prefix of 1
    for _ in range(4):
        served.step()
    served.submit(3, long, 8)  # from one that is still running
    served.run()
    served.submit(4, longer, 5)  # from one that is over
    served.run()
    prompt_tokens = served.stepper.stats().prompt_tokens
    served.leave()
    cached = served.transcript.cached
    assert cached[2, 0] >= len(long) - 1
    assert cached[2, 1] >= len(long) - 1
    assert cached[3, 0] == len(long) - 1
    assert cached[4, 0] == len(longer) - 1
    assert served.transcript.text(3) == alone(long, 8)
    assert served.transcript.text(2, 0) == served.transcript.text(2, 1) == served.transcript.text(4) == alone(longer, 5)
    assert prompt_tokens <= len(long) + 2 * (len(longer) - len(long)) + 2


def test_preemption_and_eviction_do_not_change_the_text(
    model_engine: LlamaEngine, alone: Alone, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_engine, "n_cells", 100)
    prompts = [vocabulary.encode(text, special=False) for text in (COUNT, FOX, CATS)]
    served = Served(model_engine, step_tokens=256, prefill_chunk=256)
    for rid, ids in enumerate(prompts):
        served.submit(rid, ids, 24)
    served.run()
    assert served.stepper.stats().preemptions > 0, "the pool is too large"
    served.submit(9, prompts[0], 24)
    served.run()
    served.leave()
    for rid, ids in enumerate([*prompts, *[[]] * 6, prompts[0]]):
        if ids:
            assert served.transcript.text(rid) == alone(ids, 24)


def test_eight_at_once_say_what_each_says_alone(
    model_engine: LlamaEngine, alone: Alone, vocabulary: Vocabulary
) -> None:
    texts = [COUNT, ABC, FOX, CATS, COUNT + " 17, 18,", ABC + " m n", FOX + " red fox", CATS + " cat"]
    prompts = [vocabulary.encode(text, special=False) for text in texts]
    served = Served(model_engine, step_tokens=256, prefill_chunk=256)
    for rid, ids in enumerate(prompts):
        served.submit(rid, ids, 4)
    served.run()
    served.leave()
    for rid, ids in enumerate(prompts):
        assert served.transcript.text(rid) == alone(ids, 4)


def test_llama_cpp_holds_what_the_books_say(
    model_engine: LlamaEngine, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_engine, "n_cells", 120)
    monkeypatch.setattr(model_engine, "n_slots", 6)
    rng = random.Random(8)
    served = Served(model_engine, step_tokens=256, prefill_chunk=32, prefill_chunk_busy=8, max_running=4, idle_cells=60)
    scheduler = served.stepper.scheduler
    stems = [vocabulary.encode(text, special=False)[:30] for text in (COUNT, ABC, FOX)]
    for act in range(120):
        match rng.choices(range(4), [10, 3, 1, 1])[0]:
            case 0:
                served.step()
            case 1 if len(scheduler.rids()) < 8:
                stem = rng.choice(stems)
                served.submit(act, stem[: rng.randint(1, len(stem))], rng.randint(1, 12), n=rng.choice([1, 1, 2]))
            case 2:
                served.cancel(rng.choice([*scheduler.rids(), 999]))
            case 3:
                scheduler.pause(rng.choice([*scheduler.rids(), 999]), rng.random() < 0.5)
        computed = {s.slot: s.computed for s in scheduler.running}
        for slot in range(6):
            if slot in computed:
                assert held(model_engine, slot) == computed[slot]
            elif slot not in scheduler.residency.idle:
                assert held(model_engine, slot) == 0
    for rid in scheduler.rids():
        scheduler.pause(rid, False)
    served.run()
    assert set(served.transcript.over.values()) == {"finished", "cancelled"}
    served.leave()
    assert [held(model_engine, slot) for slot in range(6)] == [0] * 6


def test_seeds_repeat_and_differ(model_engine: LlamaEngine, vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode("Once upon a time", special=False)
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=123)
    texts = []
    for _ in range(2):
        served = Served(model_engine, step_tokens=256)
        served.submit(1, ids, 8, n=3, sampling=sampling)
        served.run()
        served.leave()
        texts.append([served.transcript.text(1, i) for i in range(3)])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_an_end_token_ends_the_answer(model_engine: LlamaEngine, vocabulary: Vocabulary) -> None:
    turn = "<|im_start|>user\nWhat is the capital of France? One word.<|im_end|>\n<|im_start|>assistant\n"
    served = Served(model_engine, step_tokens=256)
    served.submit(1, vocabulary.encode(turn, special=True), 40)
    served.run()
    assert served.transcript.ends[1, 0].reason == "stop"
    assert "Paris" in served.transcript.text(1)
    assert "<|im_end|>" not in served.transcript.text(1)
    served.leave()


# --- settings


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"slots": 0}, ["engine.slots", "0", "255"]),
        ({"slots": 256}, ["engine.slots", "256", "255"]),
        ({"cells": -1}, ["engine.cells", "-1"]),
    ],
)
def test_settings_out_of_range_are_startup_errors(
    demo_model: Path, options: dict[str, Any], numbers: list[str]
) -> None:
    with pytest.raises(StartupError) as caught:
        small(demo_model, **options)
    assert "\n" not in caught.value.message
    assert all(number in caught.value.message for number in numbers)


def test_context_bounds_a_sequence(demo_model: Path) -> None:
    engine = small(demo_model, context=100)
    assert (engine.info.n_ctx, engine.n_cells) == (100, 256)
    engine.close()


def test_a_missing_file_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match="nowhere"):
        worker({"path": "/nowhere.gguf", "name": "x"}, ManualClock())


@pytest.mark.parametrize("options", [{"kv_type": "q8_0"}, {"flash_attention": False}])
def test_other_kinds_of_kv_work_too(demo_model: Path, vocabulary: Vocabulary, options: dict[str, Any]) -> None:
    engine = worker(
        {"path": str(demo_model), "name": "x", "cells": 256, "slots": 4, "batch": 64, **options}, ManualClock()
    )
    ids = vocabulary.encode(ABC, special=False)
    assert engine.piece(first(engine.step([Chunk(0, 0, ids, greedy(ids))]).drawn[0])) == b" m"
    engine.close()


# --- as a StreamEngine


def test_in_this_process(demo_model: Path, long: list[int]) -> None:
    async def main() -> None:
        engine = LocalEngine(lambda: small(demo_model, cells=1024), Limits(prefill_chunk=128), ManualClock())
        await engine.start()
        await check_stream_engine(engine, long[:40])
        before = engine.stats.prompt_tokens
        admitted = asyncio.get_running_loop().create_future()

        def sink(event: Event) -> None:
            if isinstance(event, Admitted):
                admitted.set_result(None)

        engine.submit(Generation(1, [7] * 900, 9), sink)
        await admitted
        engine.cancel(1)
        events = await collect(engine, Generation(2, long[:40], 3))
        assert isinstance(events[-1], Finished)
        assert engine.stats.prompt_tokens - before < 900, "the cancelled prompt was not computed to its end"
        await engine.close()

    asyncio.run(main())


def test_in_a_worker(demo_model: Path, long: list[int]) -> None:
    settings = {"path": str(demo_model), "name": "demo", "cells": 1024, "slots": 16, "batch": 256}

    async def main() -> None:
        engine = WorkerEngine(Blueprint("headrace.engines.llama:worker", settings, {"max_batch": 256}), ManualClock())
        await engine.start()
        assert engine.info.n_ctx == 1024
        await check_stream_engine(engine, long[:40])
        refused = await collect(engine, Generation(1, [engine.info.n_vocab], 3))
        assert isinstance(refused[-1], Failed)
        after = await collect(engine, Generation(2, long[:40], 3))
        assert any(isinstance(e, Delta) for e in after)
        await engine.close()

    asyncio.run(main())
