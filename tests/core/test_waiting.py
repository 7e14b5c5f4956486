from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from core import simulator
from core.simulator import TRUE, Simulator
from core.walked import WalkedScheduler, lines
from headrace.core.budget import Pace
from headrace.core.costmodel import CostModel
from headrace.core.kv import Outside
from headrace.core.limits import Limits
from headrace.core.plan import Drawn, StepResult
from headrace.core.request import BATCH, INTERACTIVE, Generation
from headrace.core.scheduler import Scheduler
from headrace.core.sequence import Sequence as Choice
from headrace.core.sequence import sequences
from headrace.core.waiting import LOOKS, Waiting
from headrace.kv.pool import Pool
from headrace.kv.radix import Radix

LIMITS = Limits(
    max_batch=8,
    max_running=16,
    step_tokens=576,
    prefill_chunk=512,
    idle_cells=1536,
    earliest_deadline=True,
    pace=Pace(),
)


def choices(rid: int, now: float = 0.0, *, due: float = 0.0, tokens: int = 5, **fields: Any) -> list[Choice]:
    found = sequences(Generation(rid, [rid] * tokens, 4, **fields), now, lambda token: b"x")
    for sequence in found:
        sequence.due = due
    return found


def filled(n: int, **fields: Any) -> tuple[Waiting, list[Choice]]:
    """`n` that came one a second."""
    one, all_ = Waiting(by_due=True), [sequence for rid in range(n) for sequence in choices(rid, float(rid), **fields)]
    for sequence in all_:
        one.add(sequence)
    return one, all_


def never(sequence: Choice) -> bool:
    return False


# Orders.


def test_the_earliest_due_comes_first_and_equals_as_they_came() -> None:
    one = Waiting(by_due=True)
    a, b, c, d = (choices(rid, due=due)[0] for rid, due in enumerate([2.0, 1.0, 2.0, 1.0]))
    for sequence in (a, b, c, d):
        one.add(sequence)
    assert one.newcomers(0.0, 9, 9, never) == [b, d, a, c]
    one.remove(d)
    one.put_back(d)
    assert one.newcomers(0.0, 9, 9, never) == [d, b, a, c], "sent back, it stands before its equals"
    assert list(one) == [d, a, b, c]


def test_without_dues_whoever_came_first_is_first() -> None:
    one = Waiting(by_due=False)
    a, b = (choices(rid, due=due)[0] for rid, due in enumerate([2.0, 1.0]))
    one.add(a)
    one.add(b)
    assert one.newcomers(0.0, 9, 9, never) == [a, b]


def test_who_does_not_wait_cannot_be_removed() -> None:
    one, (a,) = filled(1)
    one.remove(a)
    with pytest.raises(KeyError):
        one.remove(a)
    one.discard(77)
    assert repr(one) == "<Waiting [0 sequences]>"


# How many are looked at.


def test_as_many_as_there_are_places_and_some_more() -> None:
    one, all_ = filled(200)
    assert one.newcomers(500.0, 3, 3, never) == all_[: 3 + LOOKS]


def test_without_a_place_the_first_one_is_enough() -> None:
    """Whose turn it is says who else is a newcomer; it cannot come in."""
    one, all_ = filled(200)
    assert one.newcomers(500.0, 0, 0, never) == all_[:1]
    assert one.newcomers(500.0, -2, -2, never) == all_[:1], "one who resumes may be one too many"


def test_where_only_late_ones_get_in_others_are_passed_over() -> None:
    one, all_ = filled(200)
    late = {all_[150], all_[170]}
    taken = one.newcomers(500.0, 0, 2, lambda s: s in late or s is all_[0])
    assert taken[:3] == all_[:3], "as many as could be newcomers"
    assert [s for s in taken if s in late] == [all_[150], all_[170]]
    assert len(taken) == 5


def test_if_the_oldest_is_not_late_nobody_is() -> None:
    one, all_ = filled(200)
    assert one.newcomers(500.0, 0, 2, lambda s: s is not all_[0]) == all_[:3]


# Compared with a list.


class Listed:
    """Plain list, and a walk for each question."""

    def __init__(self) -> None:
        self.all: list[Choice] = []

    def ready(self, now: float, *, by_due: bool) -> list[Choice]:
        ready = [s for s in self.all if not s.paused and now >= s.hold]
        return sorted(ready, key=lambda s: s.due) if by_due else ready

    def held_until(self, now: float) -> float | None:
        return min((s.hold for s in self.all if s.hold > now and not s.paused), default=None)

    def tokens(self, *, begun: bool) -> int:
        return sum(len(s.tokens) - s.known for s in self.all if s.index == 0 and s.begun == begun)


class Both:
    """A `Waiting` and a list, and random things that happen to both."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.by_due = rng.random() < 0.7
        self.real, self.listed = Waiting(by_due=self.by_due), Listed()
        self.now, self.rids = 0.0, 0

    def act(self) -> None:
        rng, listed, real = self.rng, self.listed, self.real
        some = rng.choice(listed.all) if listed.all else None
        rid = some.generation.rid if some is not None else 0
        match rng.randrange(8):
            case 0 | 1 | 2:
                self.add()
            case 3 if some is not None:
                real.remove(some)
                listed.all.remove(some)
                if rng.random() < 0.5:  # it ran for a while
                    some.scheduled = self.now
                    some.tokens.append(7)
                    real.put_back(some)
                    listed.all.insert(0, some)
            case 4:
                real.discard(rid)
                listed.all = [s for s in listed.all if s.generation.rid != rid]
            case 5:
                real.pause(rid, True)
                assert all(s.paused for s in listed.all if s.generation.rid == rid)
            case 6:
                real.pause(rid, False)
            case 7:
                outside = Outside(3, (), 0.1)
                real.fetched(rid, outside)
                assert all(s.outside is outside and s.hold == 0.0 for s in listed.all if s.generation.rid == rid)
        self.now += rng.choice([0.0, 0.3, 2.0])

    def add(self) -> None:
        rng = self.rng
        self.rids += 1
        n = rng.choice([1, 1, 2, 3])
        resume = rng.choice([(), (), ((1, 2),) * n])
        hold, known, due = rng.choice([0.0, 0.0, self.now + rng.random() * 5]), rng.randrange(5), rng.randrange(9)
        for sequence in choices(self.rids, self.now, n=n, resume=resume, due=self.now + due):
            sequence.hold, sequence.known = hold, known
            self.real.add(sequence)
            self.listed.all.append(sequence)

    def compare(self) -> None:
        real, listed, now = self.real, self.listed, self.now
        assert list(real) == listed.all
        assert (len(real), real.rids) == (len(listed.all), {s.generation.rid for s in listed.all})
        assert real.held_until(now) == listed.held_until(now)
        ready = listed.ready(now, by_due=self.by_due)
        assert real.newcomers(now, len(ready), len(ready), never) == ready
        assert [s.arrived for s in real.oldest(now)] == sorted(s.arrived for s in ready)[:1]
        assert real.fresh_tokens == listed.tokens(begun=False)
        assert real.begun_tokens == listed.tokens(begun=True)


@pytest.mark.parametrize("seed", range(20))
def test_it_keeps_what_a_list_would(seed: int) -> None:
    both = Both(seed)
    for _ in range(300):
        both.act()
        both.compare()
    assert both.rids > 50


# The scheduler's plans.


def load(sim: Simulator, seed: int) -> None:
    """More than can be computed, of all sorts."""
    rng = random.Random(seed)
    stems = [[900_000 + i, *range(rng.choice([40, 300]))] for i in range(3)]
    for _ in range(70):
        at = rng.choice([0.0, rng.random() * 3])
        stem = rng.choice(stems) if rng.random() < 0.3 else []
        prompt = [*stem, rng.randrange(10**6), *range(rng.choice([3, 30, 200, 700]))]
        sim.ask(at, prompt, rng.choice([1, 3, 20]), priority=rng.choice([INTERACTIVE, INTERACTIVE, BATCH]))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "limits",
    [
        LIMITS,
        replace(LIMITS, earliest_deadline=False),
        replace(LIMITS, fuse=False),
        replace(LIMITS, pace=None, max_batch=4, max_running=4),
        replace(LIMITS, await_prefix=False, max_batch=1, max_running=3),
    ],
    ids=["usual", "as they come", "no fuse", "no pace", "few places"],
)
def test_plans_are_those_of_a_walk_over_everybody(limits: Limits, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    for kind in (Scheduler, WalkedScheduler):
        monkeypatch.setattr(simulator, "Scheduler", kind)
        sim = Simulator(limits, cells=4096, seed=seed, noise=0.2)
        load(sim, seed)
        sim.run()
        assert type(sim.scheduler) is kind
        heard.append(sim.heard)
    assert len(heard[0]) == 70
    assert heard[0] == heard[1]


def queue(n: int, *, running: int = 0, prompt: Callable[[int], list[int]] | None = None) -> Scheduler:
    """`n` that wait behind `running` that read."""
    one = Scheduler(
        LIMITS,
        index=Radix,
        pool=Pool(cells=100_000, slots=64),
        piece=lambda token: b"x",
        eog=frozenset(),
        cost=CostModel(TRUE, sure=True),
    )
    for rid in range(running):
        one.submit(Generation(rid, [10**6 + rid], 99), 0.0)
    while sum(s.drawn > 0 for s in one.running) < running:
        advance(one, 1.0)
    for rid in range(running, running + n):
        one.submit(Generation(rid, prompt(rid) if prompt else [rid] * 20, 9), 1.0)
    return one


def advance(one: Scheduler, now: float) -> None:
    """One step."""
    plan = one.plan(now)
    assert plan is not None
    one.begin(plan, now)
    drawn = tuple(None if chunk.draw is None else Drawn((7,)) for chunk in one.chunks(plan))
    one.teller.tell(one.apply(plan, StepResult(drawn, now), now, now))
    one.take_ops()


@pytest.mark.parametrize("running", [0, 8, 16])
def test_a_step_looks_at_no_more_of_ten_thousand_than_of_a_hundred(running: int) -> None:
    """With places for all that are looked at, for late ones only, and for nobody."""

    def cost(n: int) -> list[int]:
        one = queue(n, running=running)
        rid = running + 50
        return [
            lines(lambda: one.plan(9.0)),
            lines(lambda: (one.backlog, one.begun, one.held_until(9.0))),
            lines(lambda: one.pause(rid, True)),
            lines(lambda: one.pause(rid, False)),
            lines(lambda: one.cancel(rid)),
            lines(lambda: one.submit(Generation(10**6, [1, 2, 3], 9), 9.0)),
            lines(partial(advance, one, 9.5)),
        ]

    cost(100)  # what is remembered of shapes is known then
    assert cost(10_000) == cost(100)


def test_of_those_that_wait_for_a_prefix_so_many_let_others_pass() -> None:
    """A prefix that everybody has is computed for the first: looking at ten thousand others whom nobody lets in would
    take longer than the step."""
    shared = list(range(5000))
    one = queue(1000, prompt=lambda rid: [*shared, rid])
    asked = []
    match = one.residency.match
    one.residency.match = lambda sequence: asked.append(sequence) or match(sequence)  # type: ignore[func-returns-value,method-assign]
    advance(one, 2.0)
    assert len(one.running) == 1
    assert 1 <= len(asked) <= LIMITS.max_running + LOOKS


@pytest.mark.parametrize(("crowd", "passes"), [(LOOKS - 1, True), (2 * LOOKS, False)])
def test_who_is_behind_them_is_let_in_if_they_are_not_too_many(crowd: int, passes: bool) -> None:
    shared = list(range(440))
    one = queue(crowd, prompt=lambda rid: [*shared, rid])
    advance(one, 2.0)
    while one.running[0].pending > 50:  # what is left of it leaves room in the next step
        advance(one, 2.0)
    one.submit(Generation(99_999, [1] * 4, 1, deadline=1000.0), 2.0)
    plan = one.plan(2.1)
    assert plan is not None
    assert (99_999 in {share.sequence.generation.rid for share in plan.shares}) is passes
