"""What any engine behind our ports must do, the scripted and the real ones alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace.core.events import Admitted, Delta, Event, Failed, Finished
from headrace.core.plan import Chunk, Draw, StepResult
from headrace.core.request import Generation, Sampling
from headrace.engines.base import StepEngine, StepFailed, StreamEngine
from headrace.kv.blob import KEY


def check_step_engine(engine: StepEngine, prompt: Sequence[int]) -> None:
    """What every StepEngine must do. `prompt`: at least 8 valid ids."""
    greedy = Sampling(temperature=0.0)
    tokens = list(prompt)

    def chunk(slot: int, start: int, end: int, ids: list[int] = tokens) -> Chunk:
        draw = Draw(greedy, 0, end, ids, len(tokens)) if end == len(ids) else None
        return Chunk(slot, start, ids[start:end], draw)

    def first(result: StepResult, i: int = 0) -> int:
        drawn = result.drawn[i]
        assert drawn is not None
        assert len(drawn.tokens) >= 1
        assert all(0 <= t < engine.info.n_vocab for t in drawn.tokens)
        return drawn.tokens[0]

    n = len(tokens)
    whole = first(engine.step([chunk(0, 0, n)]))
    assert engine.step([chunk(1, 0, n // 2)]).drawn == (None,), "a chunk without a draw draws nothing"
    assert first(engine.step([chunk(1, n // 2, n)])) == whole, "a prompt in two chunks gives the same token"
    engine.copy(1, 2, n - 1)
    engine.copy(0, 3, n - 2)
    both = engine.step([chunk(2, n - 1, n), chunk(3, n - 2, n)])
    assert first(both) == first(both, 1) == whole, "shared prefixes give the same token, in one batch too"
    engine.trim(2, 2)
    assert first(engine.step([chunk(2, 2, n)])) == whole, "a trimmed slot can be continued"
    engine.trim(2, 0)
    assert first(engine.step([chunk(2, 0, n)])) == whole, "an emptied slot is as new"
    engine.trim(0, 0)
    assert first(engine.step([chunk(3, n, n + 1, [*tokens, whole])])) >= 0, "a slot outlives the one it was copied from"
    for too_many in (0, engine.n_batch + 1):
        try:
            engine.step([Chunk(4, 0, [tokens[0]] * too_many, None)])
        except StepFailed:
            continue
        raise AssertionError(f"a step of {too_many} tokens must be refused")
    _check_saving(engine, lambda start: first(engine.step([chunk(4, start, n)])) == whole, n)
    for slot in range(1, 5):
        engine.trim(slot, 0)
    for how in (greedy, Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.1)) if engine.n_drafts else ():
        _check_guesses(engine, tokens, how)


def _check_guesses(engine: StepEngine, prompt: list[int], sampling: Sampling) -> None:
    """Right, wrong and half-right guesses leave the answer as it is without them."""
    plain = _answer(engine, prompt, sampling, ())[0]
    assert _answer(engine, prompt, sampling, plain) == (plain, 1), "right guesses must all be accepted, in one step"
    wrong = [(t + 1) % engine.info.n_vocab for t in plain]
    for guesses in (wrong, plain[:2] + wrong[2:], wrong[:1] + plain[1:], plain[:-1] + wrong[-1:] * 3):
        assert _answer(engine, prompt, sampling, guesses)[0] == plain, "guesses changed the answer"


def _answer(engine: StepEngine, prompt: list[int], how: Sampling, guesses: Sequence[int]) -> tuple[list[int], int]:
    """(the first tokens of an answer in slot 0, steps they took); `guesses[i]` is the guess for token i of it."""
    n = min(6, engine.n_drafts + 1)
    tokens, computed, steps = list(prompt), 0, 0
    while len(tokens) < len(prompt) + n and tokens[-1] not in engine.info.eog:
        ahead = guesses[len(tokens) - len(prompt) : n - 1]
        draw = Draw(how, 7, len(tokens), tokens, len(prompt), len(ahead))
        (drawn,) = engine.step([Chunk(0, computed, [*tokens[computed:], *ahead], draw)]).drawn
        assert drawn is not None
        tokens += drawn.tokens
        computed, steps = len(tokens) - 1, steps + 1
        engine.trim(0, computed)
    engine.trim(0, 0)
    return tokens[len(prompt) :][:n], steps


def _check_saving(engine: StepEngine, goes_on: Callable[[int], bool], n: int) -> None:
    """Slot 1 holds the prompt of `n` tokens; `goes_on(start)` computes the rest of it in slot 4, and looks."""
    if not engine.bytes_per_token:
        return
    assert len(engine.fingerprint) == KEY
    half, rest = engine.save(1, 0, n // 2), engine.save(1, n // 2, n - 1)
    assert sorted(engine.load(4, 0, n // 2, half)) == list(range(n // 2))
    assert not engine.load(4, n // 2, n - 1, rest[:-1]), "part of a payload is refused"
    assert goes_on(n // 2), "a restored slot can be continued"
    engine.trim(4, 0)
    assert engine.load(4, 0, n // 2, half)
    assert engine.load(4, n // 2, n - 1, rest), "block by block"
    assert goes_on(n - 1), "a restored prompt gives the same token"
    engine.trim(4, 0)


async def collect(engine: StreamEngine, generation: Generation, *, cancel_after: int | None = None) -> list[Event]:
    """All events of one generation; with `cancel_after`, cancelled after that many deltas."""
    events: list[Event] = []
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = generation.n

    def sink(event: Event) -> None:
        nonlocal left
        events.append(event)
        left -= isinstance(event, Finished)
        deltas = sum(isinstance(e, Delta) for e in events)
        if cancel_after is not None and deltas == cancel_after:
            engine.cancel(generation.rid)
        elif left and not isinstance(event, Failed):
            return
        if not over.done():
            over.set_result(None)

    engine.submit(generation, sink)
    await over
    return events


async def check_stream_engine(engine: StreamEngine, prompt: list[int]) -> None:
    """What every started StreamEngine must do. `prompt` must lead to at least three deltas of text."""
    greedy = Sampling(temperature=0.0)
    events = await collect(engine, Generation(9001, prompt, 8, n=2, sampling=greedy))
    for index in (0, 1):
        mine = [e for e in events if not isinstance(e, Failed) and e.index == index]
        assert isinstance(mine[0], Admitted)
        assert 0 <= mine[0].cached < len(prompt)
        assert isinstance(mine[-1], Finished)
        assert all(isinstance(e, Delta) for e in mine[1:-1])
        marked = [e.marks for e in mine if isinstance(e, Delta) and e.marks]
        assert len(marked) == 1, "exactly one delta carries the marks"
        m = marked[0]
        assert m.queued <= m.scheduled <= m.restored <= m.prefilled <= m.sampled
    texts = ["".join(e.text for e in events if isinstance(e, Delta) and e.index == i) for i in (0, 1)]
    assert texts[0] == texts[1] != "", "greedy choices are equal"
    cut = await collect(engine, Generation(9002, prompt, 8, sampling=greedy), cancel_after=1)
    assert sum(isinstance(e, Delta) for e in cut) == 1
    after = await collect(engine, Generation(9003, prompt, 8, sampling=greedy))
    assert not any(e.rid == 9002 for e in after)
    assert sum(isinstance(e, Delta) for e in cut) == 1, "nothing comes after a cancel"
    assert "".join(e.text for e in after if isinstance(e, Delta)) == texts[0]
    assert engine.ready
