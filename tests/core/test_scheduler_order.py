"""Who goes first, and how long a step is: in virtual time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from core.simulator import TRUE, Part, Simulator, Step
from headrace.core.attention import TILE
from headrace.core.budget import BUCKETS, CROWD, LEAST, Pace
from headrace.core.costmodel import CostModel
from headrace.core.door import WORTH_WAITING
from headrace.core.limits import Limits
from headrace.core.request import BATCH
from headrace.core.scheduler import PATIENCE, STRETCH
from headrace.core.sequence import Sequence, common_prefix

PACE = Pace()
LIMITS = Limits(
    max_batch=8, max_running=16, step_tokens=576, prefill_chunk=512, idle_cells=1536, earliest_deadline=True, pace=PACE
)
COST = CostModel(TRUE)


def alone(tokens: int, limits: Limits = LIMITS) -> float:
    """Seconds to the first token of a prompt that has the engine for itself."""
    one = Simulator(limits)
    rid = one.ask(0.0, tokens)
    one.run()
    return one.waited(rid)


# --- order


def test_a_question_passes_a_document() -> None:
    sim = Simulator(LIMITS)
    document = sim.ask(0.0, 3000)
    questions = [sim.ask(0.5 + i, 20) for i in range(5)]
    sim.run()
    assert max(map(sim.waited, questions)) < 2 * PACE.guard, "the running step, and its own"
    assert sim.waited(document) < alone(3000) + 5 * (alone(20) + PACE.guard)


def test_without_it_who_comes_first_goes_first() -> None:
    sim = Simulator(replace(LIMITS, earliest_deadline=False))
    document = sim.ask(0.0, 3000)
    question = sim.ask(0.5, 20)
    sim.run()
    assert sim.heard[question][0] >= sim.heard[document][0]


def test_of_equals_who_comes_first_goes_first() -> None:
    sim = Simulator(LIMITS)
    rids = [sim.ask(0.1 * i, 400) for i in range(8)]
    sim.run()
    assert sorted(rids, key=lambda rid: sim.heard[rid][0]) == rids


def test_a_document_that_is_due_is_not_passed_any_more() -> None:
    """Questions keep coming, more than can be answered."""
    sim = Simulator(LIMITS)
    document = sim.ask(0.0, 1000)
    for i in range(1000):
        sim.ask(0.09 * i, 30)
    sim.run(until=lambda sim: document in sim.heard)
    due = sim.choices[document].due
    assert due == pytest.approx(STRETCH * COST.prefill(0, 1000))
    assert due * 0.5 < sim.waited(document) <= due + COST.prefill(0, 1000)


def passed(sim: Simulator) -> list[tuple[Step, Sequence, Part]]:
    """Where somebody who came after another was due got prompt tokens before it had all of its own.

    Unless that one waits for a beginning that is computed for a third, who has all of its own.
    """
    found = []
    for step in sim.steps:
        finished = {part.choice for part in step.prompts if part.finishes}
        for choice in sim.choices.values():
            rid = choice.generation.rid
            if choice.arrived > step.began or choice in finished or sim.heard[rid][0] <= step.began:
                continue
            served = [
                other
                for other in finished
                if other.generation.salt == choice.generation.salt
                and common_prefix(other.generation.prompt, choice.generation.prompt) >= WORTH_WAITING
            ]
            if not served:
                found += [(step, choice, part) for part in step.prompts if part.choice.arrived > choice.due]
    return found


def traffic(seed: int, *, answer: int, load: float, alike: float = 0.3) -> Simulator:
    """Questions, chats and documents, some with a beginning in common, some that nobody waits for."""
    rng = random.Random(seed)
    limits = replace(LIMITS, max_batch=rng.choice([2, 4, 8]), max_running=rng.choice([8, 16]))
    sim = Simulator(limits, noise=0.05, seed=seed)
    stems = [[500 + i, *range(1, rng.choice([100, 700]))] for i in range(2)]
    at = 0.0
    for i in range(120):
        size = rng.choice([15, 30, 60, 200, 200, 800])
        prompt = [2000 + i, *range(1, size)]
        if rng.random() < alike:
            prompt = [*rng.choice(stems), *prompt]
        at += rng.expovariate(load / COST.prefill(0, 220))
        priority = BATCH if rng.random() < 0.15 else 0
        sim.ask(at, prompt, rng.randint(1, answer), priority=priority)
    return sim


@pytest.mark.parametrize("answer", [1, 20])
def test_nobody_who_comes_after_another_is_due_passes_it(answer: int) -> None:
    overdue = 0
    for seed in range(8):
        sim = traffic(seed, answer=answer, load=2.0)
        sim.run()
        assert passed(sim) == []
        assert len(sim.heard) == 120, "everybody is served"
        overdue += sum(sim.heard[rid][0] > choice.due for rid, choice in sim.choices.items())
    assert overdue > 100, "there is too little to do for anybody to be passed"


def left(sim: Simulator, choice: Sequence, at: float) -> float:
    """Seconds that its prompt still takes at some moment."""
    n = len(choice.generation.prompt)
    parts = [p for step in sim.steps for p in step.prompts if p.choice is choice and step.ended > at]
    return COST.prefill(min(p.start for p in parts), n - min(p.start for p in parts)) if parts else 0.0


def test_the_first_token_comes_when_what_was_there_before_is_done() -> None:
    """The bound in seconds: it is due, a step may be running, and all that was there by then may go before it.

    Steps of a few rows take longer than `prefill` says: no part of the bound, and less than a fifth.
    """
    late = 0
    for seed in range(8):
        sim = traffic(100 + seed, answer=1, load=2.0)
        sim.run()
        for rid, choice in sim.choices.items():
            ahead = sum(left(sim, o, choice.due) for o in sim.choices.values() if o.arrived <= choice.due)
            assert sim.heard[rid][0] <= choice.due + 2 * PACE.stall + 1.2 * ahead
            late += sim.heard[rid][0] > choice.due
    assert late > 100


def test_a_deadline_is_honoured() -> None:
    sim = Simulator(LIMITS)
    patient = [sim.ask(0.0, 600) for _ in range(4)]
    urgent = sim.ask(0.1, 600, deadline=4.0)
    hopeless = sim.ask(0.2, 600, deadline=60.0)
    sim.run()
    assert sim.waited(urgent) <= 4.0
    assert sim.heard[urgent][0] < sorted(sim.heard[rid][0] for rid in patient)[1], "one was running"
    assert all(sim.heard[hopeless][0] > sim.heard[rid][0] for rid in patient)


def test_deadlines_that_can_all_be_kept_are_all_kept() -> None:
    """In the order in which they are kept with nothing to spare, but for a step that others are in as well."""
    rng = random.Random(3)
    for _ in range(10):
        sim = Simulator(LIMITS)
        sizes = [rng.randint(50, 500) for _ in range(8)]
        total, asked = 0.0, []
        for size in sizes:
            total += alone(size)
            asked.append((size, 1.1 * total + PACE.stall))
        rng.shuffle(asked)
        rids = {sim.ask(0.0, size, deadline=deadline): deadline for size, deadline in asked}
        sim.run()
        assert all(sim.waited(rid) <= deadline for rid, deadline in rids.items())


def test_what_nobody_waits_for_lets_all_others_pass() -> None:
    sim = Simulator(LIMITS)
    idle = sim.ask(0.0, 300, priority=BATCH)
    others = [sim.ask(0.01 + 0.2 * i, 300) for i in range(20)]
    sim.run()
    assert all(sim.heard[rid][0] < sim.heard[idle][0] for rid in others)


def test_but_not_for_ever() -> None:
    sim = Simulator(LIMITS)
    idle = sim.ask(0.0, 300, priority=BATCH)
    for i in range(400):
        sim.ask(0.01 + 0.9 * i, 300)
    sim.run(until=lambda sim: idle in sim.heard)
    due = PATIENCE + STRETCH * COST.prefill(0, 300)
    assert due * 0.8 < sim.waited(idle) < due + 2.0


def test_who_waits_for_what_nobody_waits_for_is_not_passed_with_it() -> None:
    """A prompt whose beginning is being computed for one of the batch class lends it its place in the queue."""
    sim = Simulator(LIMITS)
    stem = [5, *range(1, 1000)]
    idle = sim.ask(0.0, [*stem, 1, 2], priority=BATCH)
    urgent = sim.ask(1.0, [*stem, 3, 4])
    for i in range(200):
        sim.ask(1.0 + 0.25 * i, 60)
    sim.run(until=lambda sim: urgent in sim.heard)
    assert sim.waited(urgent) < sim.choices[urgent].due
    assert sim.choices[urgent].cached > len(stem) - WORTH_WAITING, "it was not computed twice"
    assert sim.waited(idle) < PATIENCE / 2


def test_a_replay_is_due_at_once() -> None:
    sim = Simulator(LIMITS)
    others = [sim.ask(0.0, 300) for _ in range(5)]
    again = sim.ask(0.01, 300, max_tokens=10, resume=((7, 7, 7),))
    sim.run()
    assert sum(sim.heard[rid][0] < sim.heard[again][0] for rid in others) <= 1


# --- places


def test_the_fuse_lets_in_who_would_wait_for_a_place() -> None:
    def first(fuse: bool) -> tuple[float, int]:
        sim = Simulator(replace(LIMITS, max_batch=2, max_running=4, fuse=fuse))
        for _ in range(2):
            sim.ask(0.0, 10, 300)
        late = [sim.ask(0.5, 10, 100) for _ in range(3)]
        sim.run()
        return min(map(sim.waited, late)), max(step.awake for step in sim.steps)

    waited, most = first(True)
    assert PACE.fuse <= waited < PACE.fuse + PACE.stall
    assert most == 4, "and no more than may"
    waited, most = first(False)
    assert waited > 1.0
    assert most == 2


def test_before_it_burns_nobody_gets_in_beyond_the_batch() -> None:
    sim = Simulator(replace(LIMITS, max_batch=2, max_running=4, pace=replace(PACE, fuse=1.0)))
    for _ in range(2):
        sim.ask(0.0, 10, 200)
    late = sim.ask(0.5, 10, 5)
    sim.run()
    assert 1.0 <= sim.waited(late) < 1.0 + PACE.stall
    assert all(sim.steps[i].awake <= 2 for i in range(len(sim.steps)) if sim.steps[i].began < 1.5)


# --- the length of a step


def beside_reader(limits: Limits, tokens: int, newcomers: int = 1, readers: int = 1) -> tuple[Simulator, list[Step]]:
    """Steps in which prompts are computed while somebody reads."""
    sim = Simulator(limits)
    for _ in range(readers):
        sim.ask(0.0, 10, 400)
    for _ in range(newcomers):
        sim.ask(2.0, tokens)
    sim.run()
    return sim, [step for step in sim.steps if step.began >= 2.0 and step.reading and step.prompts]


def test_who_reads_waits_no_longer_than_the_target() -> None:
    _, steps = beside_reader(replace(LIMITS, fuse=False), 1500)
    assert len(steps) > 20
    assert all(s.seconds <= PACE.itl + 1e-9 or sum(p.count for p in s.prompts) == LEAST for s in steps)
    assert sum(s.seconds > 0.9 * PACE.itl for s in steps) > len(steps) * 0.8, "and the time is used"


def test_a_burnt_fuse_lengthens_steps_to_the_hard_limit() -> None:
    _, steps = beside_reader(LIMITS, 1500)
    before = [s for s in steps if s.began - 2.0 < PACE.fuse]
    after = [s for s in steps if s.began - 2.0 >= PACE.fuse]
    assert all(s.seconds <= PACE.itl + 1e-9 for s in before)
    assert all(s.seconds <= PACE.itl_hard + 1e-9 for s in after)
    assert sum(s.seconds > PACE.itl for s in after) > len(after) * 0.8


def test_a_crowd_is_brought_to_its_first_tokens_at_once() -> None:
    sim, steps = beside_reader(LIMITS, 20, newcomers=6)
    (step,) = steps
    assert len(step.prompts) == 6
    assert PACE.itl_hard < step.seconds <= PACE.stall
    assert max(sim.waited(rid) for rid in range(2, 8)) <= PACE.stall + PACE.itl


def test_many_readers_are_not_held_up_for_few() -> None:
    _, steps = beside_reader(LIMITS, 100, newcomers=2, readers=8)
    assert steps
    assert all(s.seconds <= PACE.itl_hard + 1e-9 for s in steps)


def test_a_newcomer_waits_no_longer_than_the_guard_for_a_step_to_end() -> None:
    sim = Simulator(LIMITS)
    sim.ask(0.0, 3000)
    sim.run()
    full = [s.seconds for s in sim.steps if not s.prompts[0].finishes]
    assert max(full) <= PACE.guard + 1e-9
    assert min(full) > 0.75 * PACE.guard


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_gaps_are_bounded_whatever_comes(noise: float) -> None:
    more = 1.0 + 3 * noise  # what the model learned may be off, and what happens too
    crowds = 0
    for seed in range(8):
        sim = traffic(seed, answer=30, load=0.7, alike=0.0)
        sim._noise = noise
        sim.run()
        for step in sim.steps:
            if not step.reading or sum(p.count for p in step.prompts) <= LEAST:
                continue
            assert step.seconds <= PACE.stall * more
            if step.seconds > PACE.itl_hard * more + 1e-9:
                crowds += 1
                assert CROWD * sum(p.finishes for p in step.prompts) > len(step.reading)
    assert crowds > 10


def test_every_reader_gets_a_token_in_every_step() -> None:
    for seed in range(8):
        sim = traffic(200 + seed, answer=30, load=1.0)
        sim.run()
        assert all(len(step.reading) == step.awake for step in sim.steps)
        assert any(step.awake > 3 for step in sim.steps)


def test_sizes_of_steps_come_from_few() -> None:
    cut = 0
    for seed in range(8):
        sim = traffic(300 + seed, answer=30, load=1.0)
        sim.run()
        for step in sim.steps:
            if step.prompts and not step.prompts[-1].finishes:
                cut += 1
                tokens = sum(p.count for p in step.prompts)
                # Apart from the readers, whole tiles are sizes that come again too.
                assert step.rows in BUCKETS or tokens == LEAST or tokens % TILE == 0
            assert all(p.finishes for p in step.prompts[:-1]), "only the last one is cut"
    assert cut > 100


def test_a_document_beside_a_stream() -> None:
    """OC-39: 30 chunks of 100 ms come while somebody reads."""
    tokens = 1000
    by_itself = alone(tokens)
    assert by_itself > 3.0
    sim = Simulator(LIMITS)
    reader = sim.ask(0.0, 10, 400)
    sim.run(until=lambda sim: len(sim.heard.get(reader, ())) == 20)
    asked = sim.now
    document = sim.ask(asked, tokens)
    sim.run()
    assert max(sim.gaps(reader)) <= 0.25
    assert sim.waited(document) <= 2 * by_itself
    steps = [s for s in sim.steps if asked <= s.began < sim.heard[document][0]]
    assert all(len(s.reading) == 1 for s in steps), "a token between any two chunks"
    assert all(s.of(document) for s in steps), "and a chunk with every token"


# --- without a pace


def test_without_a_pace_chunks_are_as_long_as_is_said() -> None:
    limits = replace(LIMITS, pace=None, prefill_chunk=256, prefill_chunk_busy=64)
    sim = Simulator(limits)
    sim.ask(0.0, 600)
    reader = sim.ask(5.0, 10, 40)
    sim.ask(5.1, 200)
    sim.run()
    assert [s.rows for s in sim.steps if not s.reading and s.began < 5.0] == [256, 256, 88]
    assert [s.rows - len(s.reading) for s in sim.steps if s.reading and s.prompts] == [64, 64, 64, 8]
    assert len(sim.heard[reader]) == 40
    assert sim.scheduler.cost is None, "nothing is predicted"


def test_whole_prompts_in_one_step() -> None:
    """Chunks off: the baseline that everything is measured against."""
    whole = 4096
    limits = replace(LIMITS, pace=None, step_tokens=whole, prefill_chunk=whole, prefill_chunk_busy=whole)
    sim = Simulator(limits)
    reader = sim.ask(0.0, 10, 40)
    sim.ask(0.1, 1500)
    sim.run()
    (step,) = [s for s in sim.steps if s.prompts and s.began > 0.0]
    assert step.rows == 1501
    assert max(sim.gaps(reader)) > 4.0, "which is why nobody wants that"
