from __future__ import annotations

import asyncio
from collections.abc import MutableMapping, Sequence
from typing import Any

import pytest

from headrace.core.plan import Chunk, Draw, Drawn, StepResult
from headrace.core.request import Sampling
from headrace.engines.base import StepAborted, StepFailed
from headrace.testing import (
    CONTROL,
    END,
    ManualClock,
    RecordingSend,
    ScriptedEngine,
    ScriptedTokenizer,
    counting_tokenizer,
    counting_worker,
    scripted_worker,
)
from rig import GREEDY

ABC = [[b"a"], [b"b"], [b"c"]]


def drawing(slot: int, start: int, ids: Sequence[int], prompt: int, sampling: Sampling = GREEDY) -> Chunk:
    return Chunk(slot, start, ids[start:], Draw(sampling, 0, len(ids), ids, prompt))


def drawn(result: StepResult, i: int = 0) -> Drawn:
    found = result.drawn[i]
    assert found is not None
    return found


# --- clock and send


def test_the_clock_moves_by_hand() -> None:
    clock = ManualClock(5.0)
    assert (clock(), clock()) == (5.0, 5.0)
    clock.advance(0.5)
    assert clock() == 5.5


def test_send_remembers() -> None:
    async def main() -> None:
        send = RecordingSend()
        assert (send.status, send.headers, send.body, send.finished) == (None, {}, b"", False)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"Content-Type", b"a/b")]})
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        assert not send.finished
        await send({"type": "http.response.body", "body": b"two"})
        assert (send.status, send.headers, send.body, send.finished) == (
            200,
            {b"content-type": b"a/b"},
            b"one two",
            True,
        )
        assert len(send.messages) == 3

    asyncio.run(main())


def test_send_fails_when_told_to() -> None:
    async def fail(n: int) -> None:
        if n == 1:
            raise OSError

    async def main() -> None:
        send = RecordingSend(fail)
        message: MutableMapping[str, Any] = {"type": "http.response.body"}
        await send(message)
        with pytest.raises(OSError):  # noqa: PT011 - the test's own
            await send(message)
        assert send.messages == [message], "what failed was not sent"

    asyncio.run(main())


# --- tokenizer


@pytest.mark.parametrize("text", ["", "hi", "é🔥", "<|im_end|> <|im_start|>x", "\ud800"])
@pytest.mark.parametrize("special", [False, True])
def test_the_tokenizer_gives_text_back(text: str, special: bool) -> None:
    tokenizer = ScriptedTokenizer()
    ids = tokenizer.encode(text, special=special)
    assert b"".join(map(tokenizer.piece, ids)) == text.encode("utf-8", "surrogatepass")
    assert bool(set(ids) & set(CONTROL.values())) == (special and "<|" in text)


def test_words_have_ids_of_their_own() -> None:
    tokenizer = ScriptedTokenizer()
    word, other = tokenizer.word(b"word"), tokenizer.word(b"other")
    assert word != other
    assert tokenizer.word(b"word") == word >= 256
    assert (tokenizer.piece(word), tokenizer.answer_piece(word)) == (b"word", b"word")
    assert tokenizer.word(b"w") == ord("w")
    assert tokenizer.word(END) == CONTROL["<|im_end|>"]
    assert tokenizer.word(b"") not in (word, other, 0)
    assert tokenizer.answer_piece(CONTROL["<|im_start|>"]) == b""
    assert tokenizer.answer_piece(4000) == b""


# --- scripted engine


def test_it_plays_its_script_whatever_the_prompt() -> None:
    engine = ScriptedEngine(ABC)
    ids = [1, 2, 3]
    said = []
    for _ in range(5):
        result = engine.step([drawing(0, len(engine.slots.get(0, ())), ids, 3)])
        (token,) = drawn(result).tokens
        said.append(engine.piece(token))
        ids = [*ids, token]
    assert said == [b"a", b"b", b"c", b"", b""]
    assert ids[-1] == engine.info.eog[0]


def test_a_script_may_depend_on_the_prompt() -> None:
    engine = ScriptedEngine(lambda prompt: [[b"%d" % (prompt[0] % 10)]])
    result = engine.step([drawing(0, 0, [7, 1], 2), drawing(1, 0, [8, 1], 2)])
    assert [engine.piece(drawn(result, i).tokens[0]) for i in range(2)] == [b"7", b"8"]


def test_a_burst_is_computed_but_for_its_last_token_and_may_be_resumed_inside() -> None:
    engine = ScriptedEngine([[b"a", b"b", b"c"], [b"d"]])
    result = engine.step([drawing(0, 0, [1], 1)])
    assert drawn(result).tokens == tuple(b"abc")
    assert engine.slots[0] == [1, *b"ab"]
    assert drawn(engine.step([drawing(1, 0, [1, *b"a"], 1)])).tokens == tuple(b"bc")
    assert drawn(engine.step([drawing(2, 0, [1, *b"abc"], 1)])).tokens == tuple(b"d")


WORDS = [[b"a"], [b"b"], [b"c"], [b"d"], [END], [b"e"]]


def guessed(slot: int, guesses: bytes, sampling: Sampling = GREEDY) -> Chunk:
    return Chunk(slot, 0, [1, *guesses], Draw(sampling, 0, 1, [1], 1, len(guesses)))


@pytest.mark.parametrize(
    ("guesses", "said"), [(b"abc", b"abcd"), (b"abx", b"abc"), (b"axc", b"ab"), (b"xbc", b"a"), (b"a", b"ab")]
)
@pytest.mark.parametrize("script", [WORDS, [[b"a", b"b", b"c"], [b"d"]]])
def test_guesses_are_held_against_the_script(script: list[list[bytes]], guesses: bytes, said: bytes) -> None:
    engine = ScriptedEngine(script)
    assert drawn(engine.step([guessed(0, guesses)])).tokens == tuple(said)
    assert engine.slots[0] == [1, *guesses], "the wrong ones too, until they are trimmed"
    assert engine.produced == len(said)
    assert len(drawn(engine.step([guessed(1, guesses, Sampling(logprobs=0))])).logprobs) == len(said)


def test_nothing_is_drawn_behind_the_end() -> None:
    engine = ScriptedEngine(WORDS)
    end = engine.info.eog[0]
    guesses = [*b"abcd", end, *b"e"]
    result = engine.step([Chunk(0, 0, [1, *guesses], Draw(GREEDY, 0, 1, [1], 1, 6))])
    assert drawn(result).tokens == (*b"abcd", end)


def test_it_records_what_it_was_asked() -> None:
    engine = ScriptedEngine(ABC)
    engine.step([Chunk(0, 0, [1, 2], None)])
    engine.step([drawing(0, 2, [1, 2, 3], 3, Sampling(seed=9)), Chunk(1, 0, [5], None)])
    engine.step([drawing(0, 3, [1, 2, 3, 97], 3)])
    assert engine.prompts == [[1, 2, 3]]
    assert [d.position for d in engine.draws] == [3, 4]
    assert engine.draws[0].sampling.seed == 9
    assert engine.batches == [[2], [1, 1], [1]]
    assert (engine.prefilled, engine.produced, engine.steps) == (2, 2, 3)


def test_logprobs_are_given_if_asked() -> None:
    engine = ScriptedEngine(ABC)
    (told,) = drawn(engine.step([drawing(0, 0, [1], 1, Sampling(logprobs=2))])).logprobs
    assert (told.piece, len(told.top)) == (b"a", 2)
    assert told.logprob <= 0
    assert drawn(engine.step([drawing(1, 0, [1], 1)])).logprobs == ()


def test_delays_are_for_prompts_and_for_decodes() -> None:
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return False

    engine = ScriptedEngine(ABC, step_s=1.0, prefill_s=10.0, wait=wait)
    engine.step([drawing(0, 0, [1], 1)])
    engine.step([drawing(0, 1, [1, 97], 1)])
    engine.step([drawing(0, 2, [1, 97, 98], 1), Chunk(1, 0, [1], None), drawing(2, 0, [2], 1)])
    assert waits == [10.0, 1.0, 21.0]


def test_an_aborted_step_leaves_no_trace() -> None:
    engine = ScriptedEngine(ABC, step_s=1.0, prefill_s=1.0, wait=lambda seconds: True)
    with pytest.raises(StepAborted):
        engine.step([drawing(0, 0, [1], 1)])
    assert not engine.slots.get(0)
    assert engine.batches == []


def test_a_real_wait_ends_with_an_abort() -> None:
    entered: list[float] = []
    engine = ScriptedEngine(ABC, prefill_s=3600.0)
    engine.abort()
    wait = engine._aborted.wait

    def abort_meanwhile(seconds: float) -> bool:
        entered.append(seconds)
        engine.abort()
        return wait(seconds)

    engine._wait = abort_meanwhile
    with pytest.raises(StepAborted):
        engine.step([drawing(0, 0, [1], 1)])
    assert (entered, engine.aborts) == ([3600.0], 2)


def test_an_abort_that_comes_just_before_a_step_is_for_that_one_alone() -> None:
    engine = ScriptedEngine(ABC, step_s=0.001, prefill_s=3600.0)
    engine.abort()
    with pytest.raises(StepAborted):
        engine.step([drawing(0, 0, [1], 1)])
    engine.slots[0] = [1]
    engine.step([drawing(0, 1, [1, 97], 1)])


def test_steps_fail_where_the_script_says() -> None:
    engine = ScriptedEngine(ABC, fail_at=[2])
    engine.step([Chunk(0, 0, [1], None)])
    with pytest.raises(StepFailed):
        engine.step([Chunk(0, 1, [1], None)])
    engine.step([Chunk(0, 1, [1], None)])


def test_callers_that_break_the_rules_are_told() -> None:
    engine = ScriptedEngine(ABC, slots=2)
    engine.step([Chunk(0, 0, [1, 2], None)])
    with pytest.raises(AssertionError, match="starts at 1"):
        engine.step([Chunk(0, 1, [1], None)])
    with pytest.raises(AssertionError, match="two chunks"):
        engine.step([Chunk(0, 2, [1], None), Chunk(0, 3, [1], None)])
    with pytest.raises(AssertionError):
        engine.step([Chunk(2, 0, [1], None)])
    with pytest.raises(AssertionError, match="drawn elsewhere"):
        engine.step([Chunk(0, 2, [1, 5], Draw(GREEDY, 0, 4, [1, 2, 1], 3, 1))])
    with pytest.raises(AssertionError, match="drawn elsewhere"):
        engine.step([Chunk(0, 2, [5], Draw(GREEDY, 0, 2, [1, 2], 2, 1))])
    with pytest.raises(AssertionError, match="65 guesses; the engine checks at most 64"):
        engine.step([guessed(1, b"x" * 65)])
    with pytest.raises(AssertionError, match="shorter"):
        engine.copy(0, 1, 3)
    engine.copy(0, 1, 2)
    with pytest.raises(AssertionError, match="not empty"):
        engine.copy(0, 1, 1)
    engine.trim(1, 1)
    assert engine.slots == {0: [1, 2], 1: [1]}
    engine.trim(7, 0)


def test_without_a_record_it_serves_the_same() -> None:
    engine = ScriptedEngine(ABC, record=False)
    assert drawn(engine.step([drawing(0, 0, [1], 1)])).tokens == tuple(b"a")
    assert (engine.batches, engine.draws, engine.prompts) == ([], [], [])


def test_the_worker_s_factory_takes_text() -> None:
    engine = scripted_worker({"script": [["é", "x"]], "n_ctx": 9, "name": "n"}, ManualClock())
    assert (engine.info.n_ctx, engine.info.name) == (9, "n")
    assert [engine.piece(t) for t in drawn(engine.step([drawing(0, 0, [1], 1)])).tokens] == ["é".encode(), b"x"]


def test_the_counting_worker_counts() -> None:
    engine = counting_worker({"n_ctx": 500}, ManualClock())
    ids = [1]
    for _ in range(12):
        ids += drawn(engine.step([drawing(0, len(ids) - 1, ids, 1)])).tokens
    assert b"".join(map(engine.piece, ids[1:])) == b"1 2 3 4 5 6 7 8 9 10 11 12 "
    assert max(ids) < engine.info.n_vocab
    beside = counting_tokenizer(500)
    assert [beside.piece(token) for token in ids[1:]] == [engine.piece(token) for token in ids[1:]]
