from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.answered import answered
from headrace.core.errors import StartupError
from headrace.core.plan import Chunk, StepResult
from headrace.core.speculation import Speculation
from headrace.engines.base import ModelInfo, StepAborted, StepFailed
from headrace.engines.draft import PART, DraftModel, check_vocabulary
from headrace.engines.llama import LlamaEngine, worker
from headrace.engines.vocab import Vocabulary
from headrace.testing import CHATML, END, ManualClock, ScriptedEngine
from rig import GREEDY

TEXT = b"the quick brown fox jumps over the lazy dog and runs away from the hunter into the woods" * 4
"""What the draft model expects: byte i of it at position i, whatever came before."""


class Slow(ScriptedEngine):
    """Takes 1 ms a token, and can fail."""

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock()
        script = [[TEXT[i : i + 1]] for i in range(len(TEXT))]
        super().__init__(script, clock=self.clock, **options)
        self.fault: Exception | None = None

    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        fault, self.fault = self.fault, None
        if fault:
            raise fault
        self.clock.advance(0.001 * sum(len(c.tokens) for c in chunks))
        return super().step(chunks)


def drafting(**options: Any) -> tuple[Slow, DraftModel]:
    engine = Slow(**{"slots": 4, **options})
    model = DraftModel(engine, engine.clock)
    assert sum(map(len, engine.slots.values())) == 0, "what it was measured with is gone"
    engine.batches.clear()
    return engine, model


def text(start: int, end: int) -> tuple[int, ...]:
    return tuple(TEXT[start:end])


def test_it_measures_itself() -> None:
    _, model = drafting()
    assert model.prefill_s == pytest.approx(0.001)
    assert model.token_s == pytest.approx(0.001)
    assert model.of([1]).cost(7) == pytest.approx(0.007)


def test_it_guesses_what_its_model_says() -> None:
    engine, model = drafting()
    tokens = list(TEXT[:10])
    proposer = model.of(tokens)
    assert proposer.support == 0
    assert proposer.ready(0.0)
    assert proposer.propose(5) == text(10, 15)
    assert engine.batches == [[10], [1], [1], [1], [1]], "the last guess need not be computed"
    tokens += TEXT[10:16]  # all right and one more
    assert proposer.review() == [(0, True), (1, True), (2, True), (3, True), (4, True)]
    assert proposer.support == 5
    engine.batches.clear()
    assert proposer.propose(2) == text(16, 18)
    assert engine.batches == [[2], [1]], "only what it does not have yet"


def test_a_wrong_guess_is_taken_back() -> None:
    engine, model = drafting()
    tokens = list(TEXT[:10])
    proposer = model.of(tokens)
    proposer.propose(5)
    tokens += [*TEXT[10:12], 0]
    assert proposer.review() == [(0, True), (1, True), (2, False)]
    assert proposer.review() == []
    assert proposer.support == 0
    assert proposer.propose(3) == text(13, 16)
    assert [engine.slots[s] for s in engine.slots if engine.slots[s]] == [[*TEXT[:12], 0, *TEXT[13:15]]]


def test_a_long_prompt_is_computed_in_parts() -> None:
    engine, model = drafting()
    tokens = list(TEXT[:200])
    proposer = model.of(tokens)
    assert proposer.propose(3) == ()
    assert not proposer.ready(0.0)
    assert not proposer.ready(0.1)
    assert not proposer.ready(0.05)
    assert proposer.ready(0.0)
    assert engine.batches == [[PART], [100], [50]]
    assert proposer.propose(2) == text(200, 202)
    assert engine.batches[3:] == [[18], [1]]


def test_a_part_is_no_more_than_a_batch() -> None:
    engine, model = drafting(batch=40)
    assert not model.of(list(TEXT[:200])).ready(1.0)
    assert engine.batches == [[40]]


def test_nothing_is_guessed_behind_the_end() -> None:
    engine = ScriptedEngine([[b"a"], [b"b"], [b"c"], [END]])
    model = DraftModel(engine, ManualClock())
    assert model.of([97]).propose(9) == (98, 99, engine.info.eos)
    assert model.of([97, 98, 99, engine.info.eos or 0]).propose(9) == ()


def test_slots_are_taken_from_who_asked_longest_ago() -> None:
    engine, model = drafting(slots=2)
    one, two, three = [1, *TEXT[1:9]], [2, *TEXT[1:9]], [3, *TEXT[1:9]]
    for tokens in (one, two, one, three):
        assert model.of(tokens).propose(2) == text(9, 11)
    engine.batches.clear()
    model.of(one).propose(1)
    assert engine.batches == [[1]], "still there"
    model.of(two).propose(1)
    assert engine.batches == [[1], [9]], "was given up"


def test_cells_are_taken_from_who_asked_longest_ago() -> None:
    engine, model = drafting(cells=64)
    for first in range(1, 9):
        tokens = [first, *TEXT[1:20]]
        guesses = model.of(tokens).propose(8)
        assert guesses == text(20, 20 + len(guesses))
        assert len(guesses) >= 1
        assert sum(map(len, engine.slots.values())) <= 64


def test_guesses_end_where_the_cells_do() -> None:
    _, model = drafting(cells=40)
    assert model.of(list(TEXT[:30])).propose(30) == text(30, 40)
    assert model.of(list(TEXT[:40])).propose(30) == ()
    assert not model.of(list(TEXT[:40])).ready(1.0), "it will never fit"
    _, model = drafting(n_ctx=40)
    assert model.of(list(TEXT[:30])).propose(30) == text(30, 40)


def test_a_shared_prefix_is_no_reason_to_take_anothers_slot() -> None:
    engine, model = drafting()
    one, two = list(TEXT[:20]), [*TEXT[:8], *range(30)]
    model.of(one).propose(1)
    model.of(two[:20]).propose(1)
    engine.batches.clear()
    model.of(one).propose(1)
    assert engine.batches == [[1]]


@pytest.mark.parametrize("fault", [StepFailed("no"), StepAborted()])
def test_a_failed_step_costs_the_guesses_only(fault: Exception) -> None:
    engine, model = drafting()
    tokens = list(TEXT[:10])
    engine.fault = fault
    assert model.of(tokens).propose(3) == ()
    assert model.of(tokens).propose(3) == text(10, 13)
    engine.fault = fault
    assert not model.of(list(TEXT[40:140])).ready(0.0)
    assert model.of(tokens).propose(3) == text(10, 13)


@pytest.mark.parametrize("seed", range(6))
def test_it_keeps_the_engines_rules_whatever_is_asked(seed: int) -> None:
    """The scripted engine asserts them: no hole, no overlap, no slot outside."""
    rng = random.Random(seed)
    engine, model = drafting(slots=3, cells=150, n_ctx=120, batch=64)
    live = [list(TEXT[: rng.randint(1, 90)]) for _ in range(5)]
    proposers = [model.of(tokens) for tokens in live]
    for _ in range(200):
        i = rng.randrange(5)
        proposers[i].review()
        if rng.random() < 0.1:
            engine.fault = StepFailed("no")
        if proposers[i].ready(rng.random() * 0.05):
            n = len(live[i])
            guesses = proposers[i].propose(rng.randint(1, 12))
            assert guesses == text(n, n + len(guesses))
            live[i] += guesses[: rng.randint(0, len(guesses))]
        engine.fault = None
        live[i].append(rng.randrange(256))
        if len(live[i]) > 110:
            live[i] = list(TEXT[: rng.randint(1, 90)])
            proposers[i] = model.of(live[i])
        assert sum(map(len, engine.slots.values())) <= 150


def test_it_frees_its_engine() -> None:
    engine, model = drafting()
    assert "scripted" in repr(model)
    model.close()
    assert engine.closed


# --- the same vocabulary


def info(n: int, eog: tuple[int, ...] = (1,)) -> ModelInfo:
    return ModelInfo(name="m", n_ctx=10, n_vocab=n, chat_template=CHATML, eos=1, eog=eog, control={})


def test_equal_vocabularies_pass() -> None:
    check_vocabulary(info(5000), lambda t: b"%d" % t, info(5000), lambda t: b"%d" % t)


@pytest.mark.parametrize(
    ("draft", "odd", "says"),
    [
        (info(4999), -1, "it has 4999 tokens, the model has 5000"),
        (info(5000, (2,)), -1, r"end with tokens \[2\], the model's with \[1\]"),
        (info(5000), 4, "its token 4 is b'x', the model's is b'4'"),
    ],
)
def test_other_vocabularies_do_not(draft: ModelInfo, odd: int, says: str) -> None:
    with pytest.raises(StartupError, match=r"^engine\.draft_model needs the model's vocabulary: .*" + says):
        check_vocabulary(draft, lambda t: b"x" if t == odd else b"%d" % t, info(5000), lambda t: b"%d" % t)


# --- the demo model, guessing for itself


@pytest.mark.real
def test_a_model_that_guesses_for_itself_is_right(demo_model: Path) -> None:
    sizes = {"cells": 256, "slots": 4, "batch": 128, "drafts": 16}
    engine = worker({"path": str(demo_model), "name": "demo", "draft_model": str(demo_model), **sizes}, ManualClock())
    assert engine.draft is not None
    assert engine.n_drafts == 16
    prompt = Vocabulary.open(demo_model).encode(
        "a b c d e f g h i j k l m n o p q r s t u v w x y z a b c", special=False
    )
    plain, steps = answered(engine, prompt, GREEDY, 12, Speculation(), most=0)
    drafted, fewer = answered(engine, prompt, GREEDY, 12, Speculation(engine.draft.of), most=16)
    engine.close()
    assert drafted == plain
    assert fewer <= 4 < steps


@pytest.mark.real
@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("missing.gguf", "engine.draft_model: cannot read the model file"),
        ("other", "engine.draft_model needs the model's vocabulary: its token 0 is"),
        ("recurrent", "engine.draft_model cannot be a recurrent model"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(
    demo_model: Path, file: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[LlamaEngine] = []
    made = LlamaEngine.__init__

    def make(engine: LlamaEngine, *args: Any) -> None:
        made(engine, *args)
        opened.append(engine)
        if len(opened) == 2 and file == "other":
            monkeypatch.setattr(engine._vocab, "piece", lambda _: b"other")
        if len(opened) == 2 and file == "recurrent":
            engine.can_share = False

    monkeypatch.setattr(LlamaEngine, "__init__", make)
    path = tmp_path / file if file == "missing.gguf" else demo_model
    sizes = {"cells": 64, "slots": 1, "batch": 64, "drafts": 4}
    with pytest.raises(StartupError) as caught:
        worker({"path": str(demo_model), "name": "demo", "draft_model": str(path), **sizes}, ManualClock())
    assert caught.value.message.startswith(says)
    assert all(engine._context is None for engine in opened), "both are freed"
