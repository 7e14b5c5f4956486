from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.core.events import Admitted, Delta, Event, Failed, Finished, Marks
from headrace.core.kv import Pin
from headrace.core.limits import Limits
from headrace.core.plan import Chunk, Drawn, StepResult
from headrace.core.request import Generation
from headrace.engines.base import EngineStats, Lives, ModelInfo, Sink
from headrace.engines.local import LocalEngine
from headrace.testing import (
    ManualClock,
    ScriptedEngine,
    check_step_engine,
    check_stream_engine,
    collect,
)

PROMPT = list(range(300, 340))
ABC = [[b"a"], [b"b"], [b"c"]]


# --- the kit for step engines, against engines with one fault each


def test_the_scripted_engine_passes() -> None:
    engine = ScriptedEngine([[b"a"], [b"b"]])
    check_step_engine(engine, PROMPT)
    assert not any(engine.slots.values()), "the kit leaves the engine empty"
    check_step_engine(engine, PROMPT)
    check_step_engine(ScriptedEngine([[bytes([i])] for i in range(65, 90)]), PROMPT)
    check_step_engine(ScriptedEngine(ABC, drafts=0), PROMPT)
    check_step_engine(ScriptedEngine(ABC, drafts=2), PROMPT)


class DrawsAlways(ScriptedEngine):
    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        result = super().step(chunks)
        return StepResult(tuple(d or Drawn((1,)) for d in result.drawn), 0.0)


class DrawsByBatch(ScriptedEngine):
    """What comes out depends on how the prompt was cut."""

    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        result = super().step(chunks)
        out = (Drawn((len(c.tokens),)) if d else None for c, d in zip(chunks, result.drawn, strict=True))
        return StepResult(tuple(out), 0.0)


class TakesTooMany(ScriptedEngine):
    def _check(self, chunks: Sequence[Chunk]) -> None:
        pass


class ForgetsToTrim(ScriptedEngine):
    def trim(self, slot: int, length: int) -> None:
        if length == 0:
            super().trim(slot, length)


class SharesTooMuch(ScriptedEngine):
    def copy(self, source: int, target: int, length: int) -> None:
        super().copy(source, target, len(self.slots[source]))


class FreesTheSharers(ScriptedEngine):
    def trim(self, slot: int, length: int) -> None:
        for other in list(self.slots) if length == 0 else [slot]:
            super().trim(other, length)


class DrawsOutside(ScriptedEngine):
    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        result = super().step(chunks)
        return StepResult(tuple(d and Drawn((self.info.n_vocab,)) for d in result.drawn), 0.0)


class BelievesGuesses(ScriptedEngine):
    def _verified(self, prompt: list[int], done: int, guesses: Sequence[int]) -> tuple[int, ...]:
        return (*guesses, *super()._verified(prompt, done + len(guesses), ())[:1])


class BelievesWhatIsRightAgain(ScriptedEngine):
    """Goes on behind a wrong guess."""

    def _verified(self, prompt: list[int], done: int, guesses: Sequence[int]) -> tuple[int, ...]:
        said = tuple(self._said(prompt, done + i)[0] for i in range(len(guesses) + 1))
        last = max((i for i, guess in enumerate(guesses) if guess == said[i]), default=-1)
        return (*guesses[: last + 1], said[last + 1])


class BelievesNothing(ScriptedEngine):
    def _verified(self, prompt: list[int], done: int, guesses: Sequence[int]) -> tuple[int, ...]:
        return super()._verified(prompt, done, guesses)[:1]


class GoesOnBehindTheEnd(ScriptedEngine):
    def _verified(self, prompt: list[int], done: int, guesses: Sequence[int]) -> tuple[int, ...]:
        return (*super()._verified(prompt, done, guesses), 1)


FAULTY = [
    DrawsAlways,
    DrawsByBatch,
    TakesTooMany,
    ForgetsToTrim,
    SharesTooMuch,
    FreesTheSharers,
    DrawsOutside,
    BelievesGuesses,
    BelievesWhatIsRightAgain,
    BelievesNothing,
    GoesOnBehindTheEnd,
]


@pytest.mark.parametrize("kind", FAULTY)
def test_an_engine_with_a_fault_does_not_pass(kind: type[ScriptedEngine]) -> None:
    with pytest.raises(AssertionError):
        check_step_engine(kind([[b"a"], [b"b"]]), PROMPT)


# --- the kit for stream engines


def local(engine: ScriptedEngine) -> LocalEngine:
    return LocalEngine(lambda: engine, Limits(), ManualClock())


def test_collect_takes_all_events_of_one_generation() -> None:
    async def main() -> list[Event]:
        engine = local(ScriptedEngine(ABC))
        await engine.start()
        events = await collect(engine, Generation(1, [1, 2], 9, n=2))
        await engine.close()
        return events

    events = asyncio.run(main())
    assert sum(isinstance(e, Finished) for e in events) == 2
    assert "".join(e.text for e in events if isinstance(e, Delta)) == "aabbcc"


def test_collect_can_cancel_and_ends_with_a_failure() -> None:
    async def main() -> None:
        engine = local(ScriptedEngine(ABC, fail_at=[8]))
        await engine.start()
        cut = await collect(engine, Generation(1, [1, 2], 9), cancel_after=2)
        assert [type(e) for e in cut] == [Admitted, Delta, Delta]
        for rid in range(2, 6):
            events = await collect(engine, Generation(rid, [rid, 2], 9))
            if isinstance(events[-1], Failed):
                break
        else:
            raise AssertionError("no step failed")
        await engine.close()

    asyncio.run(main())


class Faked:
    """A StreamEngine that answers with what `events` gives for (rid, choice)."""

    def __init__(self, *, marks: int = 1, admitted: bool = True, late: bool = False, vary: bool = False) -> None:
        self.info = ModelInfo("fake", 4096, 300)
        self.ready = True
        self.clock_offset = 0.0
        self.stats = EngineStats()
        self.lives = Lives()
        self._marks, self._admitted, self._late, self._vary = marks, admitted, late, vary
        self._gone: set[int] = set()
        self._sinks: dict[int, Sink] = {}

    async def start(self) -> None: ...

    def pin(self, pins: Sequence[Pin]) -> None: ...

    def predict(self, tokens: int, priority: int) -> float:
        return 0.0

    async def close(self) -> None: ...

    def pause(self, rid: int) -> None: ...

    def resume(self, rid: int) -> None: ...

    def cancel(self, rid: int) -> None:
        self._gone.add(rid)

    def submit(self, generation: Generation, sink: Sink) -> None:
        asyncio.get_running_loop().call_soon(self._answer, generation, sink)

    def _answer(self, g: Generation, sink: Sink) -> None:
        for index in range(g.n):
            for event in self._events(g, index):
                if g.rid in self._gone and not self._late:
                    return
                sink(event)

    def _events(self, g: Generation, index: int) -> list[Event]:
        marks = Marks(0.0, 1.0, 2.0, 3.0, 4.0)
        texts = "abc" if not (self._vary and index) else "abd"
        deltas: list[Event] = [
            Delta(g.rid, index, text, 1, marks=marks if i < self._marks else None) for i, text in enumerate(texts)
        ]
        first: list[Event] = [Admitted(g.rid, index, 0)] if self._admitted else []
        return [*first, *deltas, Finished(g.rid, index, "stop", 4)]


def test_an_engine_that_keeps_the_contract_passes() -> None:
    asyncio.run(check_stream_engine(Faked(), PROMPT))
    engine = local(ScriptedEngine(ABC))

    async def main() -> None:
        await engine.start()
        await check_stream_engine(engine, PROMPT)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("fault", [{"marks": 0}, {"marks": 2}, {"admitted": False}, {"late": True}, {"vary": True}])
def test_an_engine_that_breaks_the_contract_does_not_pass(fault: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        asyncio.run(check_stream_engine(Faked(**fault), PROMPT))
