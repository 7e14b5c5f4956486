"""Random acts on the scheduler; after each one `Rig` compares all books."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

from headrace.core.limits import Limits
from headrace.engines.base import StepAborted, StepFailed
from headrace.testing import END
from rig import Rig


@cache
def script_of(prompt: tuple[int, ...], bursts: bool) -> list[list[bytes]]:
    """An answer that only this prompt gets: a mix-up would show."""
    rng = random.Random(repr(prompt))
    steps = []
    for _ in range(rng.randrange(24)):
        size = rng.choice([1, 1, 2, 4]) if bursts else 1
        steps.append(
            [rng.choice([b"a", b"bc", b"d ", b"", b"stop"]) + b"." * (rng.random() < 0.3) for _ in range(size)]
        )
    if steps and rng.random() < 0.5:
        steps[rng.randrange(len(steps))].insert(0, END)
    return steps


def expected(prompt: Sequence[int], max_tokens: int, stop: tuple[str, ...], bursts: bool) -> tuple[str, str, int]:
    """(text, finish reason, tokens) by reading the script from the front."""
    text, n = "", 0
    for token in (*(t for step in script_of(tuple(prompt), bursts) for t in step), END):
        n += 1
        if token == END:
            return text, "stop", n
        text += token.decode()
        for s in stop:
            if s in text:
                return text[: text.index(s)], "stop", n
        if n == max_tokens:
            return text, "length", n
    raise AssertionError("unreachable")


class Chaos:
    """Does random things to a rig, then lets it finish and looks at what came out."""

    def __init__(self, seed: int, *, bursts: bool) -> None:
        self.rng = rng = random.Random(seed)
        self.bursts = bursts
        cells = rng.randint(60, 400)
        limits = Limits(
            max_running=rng.randint(1, 6),
            step_tokens=64,
            prefill_chunk=rng.randint(8, 58),
            prefill_chunk_busy=rng.randint(1, 16),
            idle_cells=rng.choice([0, cells // 2, cells]),
            prefix_cache=rng.random() < 0.9,
        )
        self.rig = Rig(
            lambda prompt: script_of(tuple(prompt), bursts),
            limits,
            cells=cells,
            slots=rng.randint(limits.max_running, 9),
            bursts=bursts,
        )
        self.stems = [[rng.randrange(20) for _ in range(rng.randint(1, cells // 2))] for _ in range(3)]
        self.paused: set[int] = set()

    def act(self) -> None:
        rig = self.rig
        match self.rng.choices(range(7), [50, 12, 4, 3, 4, 2, 2])[0]:
            case 0:
                rig.step()
            case 1:
                self.submit()
            case 2:
                rig.cancel(self.some_rid())
            case 3:
                rid = self.some_rid()
                rig.pause(rid)
                self.paused.add(rid)
            case 4 if self.paused:
                rid = self.rng.choice(sorted(self.paused))
                rig.pause(rid, False)
                self.paused.discard(rid)
            case 5:
                rig.step(StepAborted)
            case 6:
                rig.step(StepFailed)

    def submit(self) -> None:
        rng = self.rng
        stem = rng.choice(self.stems)
        stem = stem[: rng.randint(1, len(stem))] if rng.random() < 0.3 else stem
        most = self.rig.engine.n_cells * 3 // 4
        prompt = (stem + [rng.randrange(20) for _ in range(rng.choice([0, 1, 5, 50]))])[:most]
        for _ in range(rng.choice([1, 1, 1, 2])):
            self.rig.submit(
                prompt,
                rng.randint(1, self.rig.engine.n_cells - len(prompt)),
                n=rng.choice([1, 1, 1, 2, 3]),
                stop=rng.choice([(), (), ("stop",), ("c.d", "top.")]),
                cache=rng.random() < 0.9,
            )

    def some_rid(self) -> int:
        """Often one that is over, or was never there."""
        return self.rng.choice([*self.rig.transcript.asked, *self.rig.scheduler.rids(), 999])

    def finish(self) -> None:
        rig = self.rig
        for rid in self.paused:
            rig.pause(rid, False)
        left = (*rig.scheduler.running, *rig.scheduler.waiting)
        rig.run(most=10 + 3 * sum(len(s.generation.prompt) + s.generation.max_tokens for s in left))
        transcript = rig.transcript
        assert transcript.over.keys() == transcript.asked.keys()
        for rid, generation in transcript.asked.items():
            for index in range(generation.n):
                text, reason, tokens = expected(generation.prompt, generation.max_tokens, generation.stop, self.bursts)
                end = transcript.ends.get((rid, index))
                if end is None:
                    assert transcript.over[rid] != "finished"
                    assert text.startswith(transcript.text(rid, index))
                else:
                    assert (transcript.text(rid, index), end.reason, end.completion_tokens) == (text, reason, tokens)
        rig.check_empty()


def test_books_hold_whatever_is_done() -> None:
    preemptions = 0
    for seed in range(160):
        chaos = Chaos(seed, bursts=False)
        for _ in range(200):
            chaos.act()
        chaos.finish()
        preemptions += chaos.rig.scheduler.preemptions
    assert preemptions > 20, "the pools are too large to test much"


def test_books_hold_with_bursts() -> None:
    for seed in range(40):
        chaos = Chaos(seed, bursts=True)
        for _ in range(200):
            chaos.act()
        chaos.finish()
