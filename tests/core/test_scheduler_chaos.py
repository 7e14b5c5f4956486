"""Random acts on the scheduler; after each one `Rig` compares all books."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from headrace.core.budget import Pace
from headrace.core.costmodel import CostModel
from headrace.core.drafter import Drafter
from headrace.core.kv import Kept, Outside
from headrace.core.limits import Limits
from headrace.core.request import BATCH, INTERACTIVE
from headrace.core.speculation import Outcome, Speculation
from headrace.engines.base import StepAborted, StepFailed
from headrace.testing import END, ManualClock
from naive import shared
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
                if generation.resume and generation.resume[index] is None:
                    continue
                text, reason, tokens = expected(generation.prompt, generation.max_tokens, generation.stop, self.bursts)
                end = transcript.ends.get((rid, index))
                if end is None:
                    assert transcript.over[rid] != "finished"
                    assert text.startswith(transcript.text(rid, index))
                else:
                    assert (transcript.text(rid, index), end.reason, end.completion_tokens) == (text, reason, tokens)
        rig.check_empty()


BLOCK = 16
"""Tokens of a block of KV that is kept outside."""


class Oracle:
    """Guesses what the script says, and now and then something else."""

    support: int | None = 20

    def __init__(self, rig: Rig, tokens: Sequence[int]) -> None:
        self._rig, self._tokens = rig, tokens
        (self._choice,) = [s for s in rig.scheduler.running if s.tokens is tokens]

    def review(self) -> Sequence[Outcome]:
        return ()

    def ready(self, allowed: float) -> bool:
        return True

    def cost(self, k: int) -> float:
        return 0.0

    def propose(self, k: int) -> tuple[int, ...]:
        rng = random.Random(repr(self._tokens))  # a plan that is made twice is the same
        prompt, done = list(self._choice.generation.prompt), self._choice.drawn
        right = [self._rig.engine._said(prompt, done + i)[0] for i in range(k)]
        return tuple(token if rng.random() < 0.8 else rng.randrange(300) for token in right)


class Tiers:
    """Blocks of KV by tenant, some of which get lost."""

    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self._rig, self._rng = rig, rng
        self._known: dict[str, list[tuple[list[int], tuple[Kept, ...]]]] = {}

    def save(self) -> None:
        """What is next to go from the cells."""
        residency = self._rig.scheduler.residency
        found = residency.unsaved(4)
        if found is None:
            return
        slot, tokens, salt = found
        blocks = []
        for start, end in pairwise([*range(0, len(tokens), BLOCK), len(tokens)]):
            blocks.append(Kept(start, end, repr((salt, tokens[:end])).encode()))
            self._rig.kept[blocks[-1].key] = self._rig.engine.save(slot, start, end)
        self._known.setdefault(salt, []).append((tokens, tuple(blocks)))
        residency.saved.add(slot)

    def lose(self) -> None:
        """A block that somebody may have been promised."""
        if self._rig.kept:
            del self._rig.kept[self._rng.choice(sorted(self._rig.kept))]

    def outside(self, prompt: list[int], salt: str) -> Outside | None:
        """The best that is known for a prompt, gone or not."""
        best = max(self._known.get(salt, ()), key=lambda known: shared(known[0], prompt), default=None)
        length = 0 if best is None else min(shared(best[0], prompt), len(prompt) - 1)
        if best is None or length == 0:
            return None
        blocks = tuple(block for block in best[1] if block.start < length)
        return Outside(length, blocks, self._rng.choice([0.0, 0.001, 1.0]))


def wild_limits(rng: random.Random, max_running: int, cells: int) -> Limits:
    pace = Pace(
        itl=rng.choice([0.012, 0.02, 0.1]),
        itl_hard=rng.choice([0.1, 0.145]),
        stall=rng.choice([0.2, 0.5]),
        guard=rng.choice([0.02, 0.25]),
        fuse=rng.choice([0.01, 0.1, 5.0]),
    )
    return Limits(
        max_batch=rng.randint(1, max_running),
        max_running=max_running,
        step_tokens=64,
        prefill_chunk=rng.randint(8, 58),
        idle_cells=rng.choice([cells // 2, cells]),
        warm_cells=rng.choice([None, 0, cells // 4]),
        earliest_deadline=rng.random() < 0.8,
        await_prefix=rng.random() < 0.8,
        fuse=rng.random() < 0.8,
        speculation=True,
        pace=pace,
    )


class WildChaos(Chaos):
    """With all that a server has: a pace, guesses, tenants, KV outside the pool, replays."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, bursts=False)
        rng, plain = self.rng, self.rig
        cells = plain.engine.n_cells
        limits = wild_limits(rng, plain.limits.max_running, cells)
        assert limits.pace is not None
        self.clock = ManualClock()
        self.speculation = Speculation(lambda tokens: Oracle(self.rig, tokens))
        self.rig = Rig(
            lambda prompt: script_of(tuple(prompt), False),
            limits,
            cells=cells,
            slots=plain.engine.n_slots,
            clock=self.clock,
            wait=self._wait,
            step_s=0.01,
            prefill_s=0.005,
            cost=CostModel((5e-3, 2e-4, 0.0, 1e-3, 0.0, 0.0, 0.0)),
            drafter=Drafter(self.speculation, most=16, itl=limits.pace.itl),
        )
        self.tiers = Tiers(self.rig, rng)
        self.held: list[int] = []

    def _wait(self, seconds: float) -> bool:
        self.clock.advance(seconds * self.rng.choice([0.5, 1.0, 1.0, 4.0]))
        return False

    def act(self) -> None:
        match self.rng.choices(range(5), [75, 10, 2, 4, 4])[0]:
            case 0:
                super().act()
            case 1:
                self.tiers.save()
            case 2:
                self.tiers.lose()
            case 3:
                self.clock.advance(self.rng.choice([0.01, 0.1, 1.0]))
            case 4 if self.held:
                rid = self.held.pop(self.rng.randrange(len(self.held)))
                asked = self.rig.transcript.asked[rid]
                self.rig.scheduler.fetched(rid, self.tiers.outside(asked.prompt, asked.salt))

    def submit(self) -> None:
        rng, cells = self.rng, self.rig.engine.n_cells
        stem = rng.choice(self.stems)
        prompt = (stem + [rng.randrange(20) for _ in range(rng.choice([0, 1, 5, 50]))])[: cells * 3 // 4]
        salt = rng.choice(["", "", "a", "b"])
        stop = rng.choice([(), (), ("stop",), ("c.d", "top.")])
        most = rng.randint(1, cells - len(prompt))
        n = rng.choice([1, 1, 1, 2, 3])
        outside = self.tiers.outside(prompt, salt) if rng.random() < 0.8 else None
        hold = self.clock() + rng.choice([0.01, 0.5]) if rng.random() < 0.2 else 0.0
        rid = self.rig.submit(
            prompt,
            most,
            n=n,
            stop=stop,
            cache=outside is not None or rng.random() < 0.9,
            outside=outside,
            hold=hold,
            salt=salt,
            priority=rng.choice([INTERACTIVE, INTERACTIVE, BATCH]),
            deadline=rng.choice([None, None, 0.0, 1.0]),
            resume=self.resume(prompt, most, stop, n) if rng.random() < 0.2 else (),
        )
        if hold:
            self.held.append(rid)

    def resume(self, prompt: list[int], most: int, stop: tuple[str, ...], n: int) -> tuple[tuple[int, ...] | None, ...]:
        """Where the readers of `n` choices stand: somewhere before the end, or behind it, but for the last one."""
        rng = self.rng
        _, _, tokens = expected(prompt, most, stop, False)
        said = tuple(self.rig.engine._said(prompt, i)[0] for i in range(tokens - 1))
        seen = [said[: rng.randint(0, len(said))] for _ in range(n)]
        return (*(rng.choice([None, ids]) for ids in seen[1:]), seen[0])


def test_books_hold_with_everything_on() -> None:
    preemptions = loaded = torn = guesses = right = replays = 0
    for seed in range(40):
        chaos = WildChaos(1000 + seed)
        for _ in range(200):
            chaos.act()
        chaos.finish()
        rig = chaos.rig
        preemptions += rig.scheduler.preemptions
        loaded, torn = loaded + rig.loaded, torn + rig.torn
        guesses, right = guesses + chaos.speculation.proposed, right + chaos.speculation.accepted
        replays += sum(bool(generation.resume) for generation in rig.transcript.asked.values())
    assert preemptions > 10
    assert loaded > 100
    assert torn > 20, "too little gets lost"
    assert guesses - right > 100
    assert right > 100
    assert replays > 100


def test_books_hold_whatever_is_done() -> None:
    preemptions = 0
    for seed in range(90):
        chaos = Chaos(seed, bursts=False)
        for _ in range(200):
            chaos.act()
        chaos.finish()
        preemptions += chaos.rig.scheduler.preemptions
    assert preemptions > 15, "the pools are too large to test much"


def test_books_hold_with_bursts() -> None:
    for seed in range(30):
        chaos = Chaos(seed, bursts=True)
        for _ in range(200):
            chaos.act()
        chaos.finish()
