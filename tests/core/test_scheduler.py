from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from headrace.core.budget import Pace
from headrace.core.events import Delta, Failed, Finished, Marks
from headrace.core.limits import Limits
from headrace.core.plan import Chunk, Copy, Draw, Trim
from headrace.core.request import Generation, Sampling
from headrace.engines.base import StepAborted, StepFailed
from headrace.testing import END, ManualClock, Script
from rig import GREEDY, Rig

LETTERS = [[bytes([c])] for c in b"abcdefghijklmnopqrstuvwxyz"]


def endless(text: str = "abcdefgh", times: int = 500) -> Script:
    return [[c.encode()] for c in text] * times


def prompt(n: int, first: int = 1) -> list[int]:
    return [first, *range(2, n + 1)]


def counts(rig: Rig) -> list[list[int]]:
    return rig.engine.batches


# --- what a step holds


def test_a_sequence_goes_from_prompt_to_answer() -> None:
    rig = Rig(LETTERS)
    rid = rig.submit(prompt(5), 3)
    rig.run()
    assert rig.transcript.text(rid) == "abc"
    assert counts(rig) == [[5], [1], [1]]
    assert rig.transcript.ends[rid, 0] == Finished(rid, 0, "length", 3)
    rig.check_empty()


def test_without_work_there_is_no_plan() -> None:
    rig = Rig(LETTERS)
    assert rig.step() is None
    rig.run()
    assert rig.steps == 0


def test_a_long_prompt_comes_in_bounded_chunks() -> None:
    rig = Rig(LETTERS, Limits(prefill_chunk=256))
    rig.submit(prompt(1000), 1)
    rig.run()
    assert counts(rig) == [[256], [256], [256], [232]]
    assert rig.engine.prefilled == 3


def test_decodes_come_first_and_prompts_share_what_is_left() -> None:
    rig = Rig(LETTERS, Limits(prefill_chunk=64, prefill_chunk_busy=16))
    a, b = rig.submit(prompt(3, 101), 20), rig.submit(prompt(4, 102), 20)
    rig.step()
    c, d = rig.submit(prompt(20, 103), 5), rig.submit(prompt(30, 104), 5)
    plan = rig.step()
    assert plan is not None
    assert [(s.sequence.generation.rid, s.count) for s in plan.shares] == [(a, 1), (b, 1), (c, 16)]
    rig.step()
    rig.step()
    assert counts(rig)[2:] == [[1, 1, 4, 12], [1, 1, 1, 16]]
    assert d in rig.scheduler.rids()


def test_the_batch_is_never_larger_than_the_engine_takes() -> None:
    rig = Rig(endless(), Limits(max_running=8, step_tokens=10, prefill_chunk=10, prefill_chunk_busy=10))
    for i in range(8):
        rig.submit(prompt(12, 101 + i), 40)
    rig.run()
    assert max(map(sum, counts(rig))) == 10


def test_no_more_run_than_may() -> None:
    rig = Rig(endless(), Limits(max_running=2))
    rids = [rig.submit(prompt(3, 101 + i), 5, n=1 + (i == 0)) for i in range(3)]
    rig.step()
    assert [s.generation.rid for s in rig.scheduler.running] == [rids[0], rids[0]]
    assert [s.generation.rid for s in rig.scheduler.waiting] == rids[1:]
    rig.run()


def test_the_queue_is_served_in_order() -> None:
    rig = Rig(endless(), Limits(max_running=1))
    rids = [rig.submit(prompt(3 + i % 3, 101 + i), 2) for i in range(8)]
    rig.run()
    assert [p[0] - 101 for p in rig.engine.prompts] == list(range(8))
    assert list(rig.transcript.over) == rids


def test_a_draw_names_its_random_number() -> None:
    rig = Rig(endless())
    sampling = Sampling(temperature=0.7, seed=40)
    rig.submit(prompt(5), 3, n=2, sampling=sampling)
    rig.run()
    draws = rig.engine.draws
    assert {(d.seed, d.position) for d in draws} == {(40 + i, 5 + k) for i in range(2) for k in range(3)}
    assert all(d.prompt == 5 and d.sampling == sampling for d in draws)


def test_chunks_say_where_they_start() -> None:
    rig = Rig(LETTERS, Limits(prefill_chunk=4))
    rig.submit([1, 2, 3, 4, 5, 6], 2)
    plan = rig.scheduler.plan(0.0)
    assert plan is not None
    assert plan.tokens == 4
    rig.scheduler.begin(plan, 0.0)
    (chunk,) = rig.scheduler.chunks(plan)
    assert chunk == Chunk(chunk.slot, 0, [1, 2, 3, 4], None)
    rig.scheduler.apply(plan, rig.engine.step([chunk]), 0.0, 0.0)
    plan = rig.scheduler.plan(0.0)
    assert plan is not None
    rig.scheduler.begin(plan, 0.0)
    (last,) = rig.scheduler.chunks(plan)
    assert last == Chunk(chunk.slot, 4, [5, 6], Draw(GREEDY, 0, 6, [1, 2, 3, 4, 5, 6], 6))


# --- time


def test_marks_are_the_moments_they_name() -> None:
    clock = ManualClock()

    def wait(seconds: float) -> bool:
        clock.advance(seconds)
        return False

    rig = Rig([[b"\xf0\x9f"], [b"\x94\xa5"], [b"!"]], clock=clock, wait=wait, prefill_s=2.0, step_s=0.5)
    clock.now = 1.0
    rid = rig.submit(prompt(5), 3)
    clock.now = 4.0
    rig.run()
    deltas = rig.transcript.deltas[rid, 0]
    assert [d.text for d in deltas] == ["🔥", "!"]
    assert deltas[0].marks == Marks(queued=1.0, scheduled=4.0, restored=4.0, prefilled=6.0, sampled=6.5)
    assert deltas[1].marks is None
    assert [d.tokens for d in deltas] == [2, 1]


class Watch:
    """Steps a rig in virtual time and notes when each generation's text came."""

    def __init__(self, limits: Limits, script: Script) -> None:
        self.clock = ManualClock()
        self.rig = Rig(script, limits, cells=8192, clock=self.clock, wait=self._wait, step_s=0.01, prefill_s=0.1)
        self.times: dict[int, list[float]] = {}
        self.prefilled_at: dict[int, list[float]] = {}

    def _wait(self, seconds: float) -> bool:
        self.clock.advance(seconds)
        return False

    def step(self) -> bool:
        said = {key: len(deltas) for key, deltas in self.rig.transcript.deltas.items()}
        plan = self.rig.step()
        if plan is None:
            return False
        for share in plan.shares:
            s = share.sequence
            if s.computed <= len(s.generation.prompt):
                self.prefilled_at.setdefault(s.generation.rid, []).append(self.clock())
        for (rid, index), deltas in self.rig.transcript.deltas.items():
            if len(deltas) > said.get((rid, index), 0):
                self.times.setdefault(rid, []).append(self.clock())
        return True

    def gaps(self, rid: int) -> list[float]:
        times = self.times[rid]
        return [b - a for a, b in pairwise(times)]


def test_a_long_prefill_does_not_stop_a_running_stream() -> None:
    limits = Limits(max_running=2, prefill_chunk=128, prefill_chunk_busy=128)
    alone = Watch(limits, endless())
    b = alone.rig.submit(prompt(30 * 128), 1)
    while alone.step():
        pass
    ttft_alone = alone.times[b][0]
    assert ttft_alone == pytest.approx(3.0)

    watch = Watch(limits, endless())
    a = watch.rig.submit(prompt(10, 101), 80)
    while len(watch.times.get(a, ())) < 20:
        watch.step()
    asked = watch.clock()
    b = watch.rig.submit(prompt(30 * 128), 1)
    while watch.step():
        pass
    assert watch.rig.transcript.text(a) == "abcdefgh" * 10
    assert max(watch.gaps(a)) == pytest.approx(0.11)
    assert watch.times[b][0] - asked == pytest.approx(3.3)
    assert watch.times[b][0] - asked <= 2 * ttft_alone
    chunks = watch.prefilled_at[b]
    assert len(chunks) == 30
    for start, end in pairwise(chunks):
        assert any(start < t <= end for t in watch.times[a]), "a reader gets a token between two chunks"


def test_a_short_prompt_behind_a_long_one_gets_its_turn() -> None:
    watch = Watch(Limits(prefill_chunk=128, prefill_chunk_busy=128), endless())
    long = watch.rig.submit(prompt(30 * 128), 2)
    short = watch.rig.submit(prompt(10, 101), 2)
    while watch.step():
        pass
    assert watch.times[long][0] == pytest.approx(3.0)
    assert watch.times[short][0] <= watch.times[long][0] + 0.21, "first come, first served"


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    rig = Rig(endless(), Limits(max_running=4, prefill_chunk=64, prefill_chunk_busy=32), cells=2048)
    long = rig.submit(prompt(640, 150), 4)
    for i in range(200):
        if i % 2 == 0:
            rig.submit(prompt(20, 200 + i), 3)
        rig.step()
        if rig.transcript.over.get(long):
            break
    assert rig.transcript.over[long] == "finished"
    assert rig.steps <= 640 // 32 + 4


# --- shared prefixes


SYSTEM = list(range(1000, 1300))


def test_a_prefix_of_many_is_computed_once() -> None:
    rig = Rig(endless(), Limits(prefill_chunk=128, prefill_chunk_busy=64))
    for i in range(8):
        rig.submit([*SYSTEM, 500 + i, 600 + i], 4)
    rig.run()
    assert rig.scheduler.prompt_tokens == len(SYSTEM) + 8 * 2
    assert rig.scheduler.cached_tokens == 7 * len(SYSTEM)
    assert sum(map(sum, counts(rig))) == len(SYSTEM) + 8 * 2 + 8 * 3
    assert set(rig.transcript.texts.values()) == {"abcd"}
    rig.check_empty()


def test_choices_share_their_prompt() -> None:
    rig = Rig(endless())
    rid = rig.submit(SYSTEM, 4, n=5)
    rig.run()
    assert rig.scheduler.prompt_tokens == len(SYSTEM) + 4, "each but the first computes the last token only"
    assert [rig.transcript.text(rid, i) for i in range(5)] == ["abcd"] * 5
    assert [rig.transcript.cached[rid, i] for i in range(5)] == [0] + [len(SYSTEM) - 1] * 4


def test_who_waits_for_a_prefix_takes_over_when_its_provider_is_cancelled() -> None:
    rig = Rig(endless(), Limits(prefill_chunk=64))
    provider = rig.submit([*SYSTEM, 1], 4)
    others = [rig.submit([*SYSTEM, 2 + i], 4) for i in range(3)]
    rig.step()
    rig.step()
    assert len(rig.scheduler.running) == 1
    rig.cancel(provider)
    assert rig.pool.used == 0, "half a prompt is not kept"
    rig.run()
    assert all(rig.transcript.text(rid) == "abcd" for rid in others)
    assert rig.scheduler.prompt_tokens == 128 + len(SYSTEM) + 3


def test_who_waits_for_a_prefix_takes_over_when_its_provider_is_paused() -> None:
    rig = Rig(endless(), Limits(prefill_chunk=64))
    provider = rig.submit([*SYSTEM, 1], 4)
    other = rig.submit([*SYSTEM, 2], 4)
    rig.step()
    rig.pause(provider)
    rig.run()
    assert rig.transcript.text(other) == "abcd"
    assert rig.transcript.cached[other, 0] == 64
    rig.pause(provider, False)
    rig.run()
    assert rig.transcript.text(provider) == "abcd"


def test_who_waits_for_a_prefix_is_passed_by_others() -> None:
    rig = Rig(endless(), Limits(prefill_chunk=256))
    rids = [rig.submit([*SYSTEM, 1], 4), rig.submit([*SYSTEM, 2], 4), rig.submit(prompt(50, 101), 4)]
    rig.step()
    rig.step()
    assert [s.generation.rid for s in rig.scheduler.running] == [rids[0], rids[2]]
    rig.step()
    assert {s.generation.rid for s in rig.scheduler.running} == set(rids)
    rig.run()


def test_nobody_waits_for_a_prefix_that_will_not_be_kept() -> None:
    rig = Rig(endless(), Limits(prefill_chunk=400))
    rids = [rig.submit([*SYSTEM, 1], 4, cache=False), rig.submit([*SYSTEM, 2], 4)]
    rig.step()
    assert [s.generation.rid for s in rig.scheduler.running] == rids
    rig.run()


def test_short_or_foreign_prefixes_are_not_waited_for() -> None:
    rig = Rig(endless(), Limits(prefill_chunk=128))
    rig.submit(prompt(300, 1), 1)
    rig.step()
    rig.submit(prompt(300, 9), 1)
    rig.submit([*prompt(300, 1)[:20], *range(7000, 7010)], 1)
    rig.step()
    assert len(rig.scheduler.running) == 1, "the budget went to the first"
    rig.step()
    assert [s.computed for s in rig.scheduler.running] == [84]
    assert rig.scheduler.waiting
    rig.run()


def test_a_running_sequence_gives_its_prefix_too() -> None:
    rig = Rig(endless())
    first = rig.submit([*SYSTEM, 1], 50)
    rig.step()
    second = rig.submit([*SYSTEM, 2], 2)
    rig.step()
    assert rig.transcript.cached[second, 0] == len(SYSTEM)
    assert rig.transcript.over.get(first) is None
    rig.run()


def test_the_last_token_of_a_known_prompt_is_computed_for_its_logits() -> None:
    rig = Rig(endless())
    rig.submit(prompt(50), 3)
    rig.run()
    again = rig.submit(prompt(50), 3)
    rig.run()
    assert rig.transcript.cached[again, 0] == 49
    assert rig.transcript.text(again) == "abc"
    one = rig.submit([1], 1)
    rig.run()
    assert rig.transcript.cached[one, 0] == 0


def test_the_next_turn_finds_prompt_and_answer() -> None:
    rig = Rig([[b"x"], [b"y"], [END]])
    rig.submit(prompt(10), 9)
    rig.run()
    x, y = (rig.engine.tokenizer.word(w) for w in (b"x", b"y"))
    turn = rig.submit([*prompt(10), x, y, 900, 901], 9)
    rig.run()
    assert rig.transcript.cached[turn, 0] == 12


def test_without_cache_nothing_is_read_or_left() -> None:
    rig = Rig(endless())
    rig.submit(prompt(50), 3)
    rig.run()
    used = rig.pool.used
    rid = rig.submit(prompt(50), 3, cache=False)
    rig.run()
    assert rig.transcript.cached[rid, 0] == 0
    assert rig.pool.used == used
    other = rig.submit(prompt(60, 9), 3, n=2, cache=False)
    rig.run()
    assert [rig.transcript.cached[other, i] for i in range(2)] == [0, 0]
    assert rig.pool.used == used


def test_the_prefix_cache_can_be_switched_off() -> None:
    rig = Rig(endless(), Limits(prefix_cache=False))
    rig.submit(SYSTEM, 3)
    rid = rig.submit(SYSTEM, 3)
    rig.run()
    assert rig.transcript.cached[rid, 0] == 0
    assert (rig.pool.used, rig.scheduler.cached_tokens) == (0, 0)


# --- cancelling, pausing


def test_a_cancelled_prefill_leaves_nothing() -> None:
    rig = Rig(endless(), Limits(prefill_chunk=100))
    for _ in range(50):
        rid = rig.submit(prompt(4000), 4)
        rig.step()
        rig.step()
        rig.cancel(rid)
        assert (rig.pool.used, rig.pool.slots_free) == (0, 16)
        assert rig.index.match(prompt(4000)) == (0, None)
    follower = rig.submit(prompt(100), 1)
    assert rig.run() == 1
    assert rig.transcript.cached[follower, 0] == 0


def test_what_a_cancelled_answer_computed_is_reused() -> None:
    rig = Rig(endless())
    rid = rig.submit(prompt(50), 30)
    for _ in range(5):
        rig.step()
    rig.cancel(rid)
    assert rig.pool.held == 0
    again = rig.submit(prompt(50), 2)
    rig.run()
    assert rig.transcript.cached[again, 0] == 49


def test_cancel_ends_every_choice_waiting_or_running() -> None:
    rig = Rig(endless(), Limits(max_running=2))
    rid = rig.submit(prompt(5), 30, n=4)
    rig.step()
    rig.cancel(rid)
    assert rig.scheduler.rids() == set()
    assert rig.step() is None
    rig.cancel(rid)
    rig.cancel(12345)


def test_a_paused_generation_gets_nothing_and_the_others_go_on() -> None:
    rig = Rig(endless())
    a, b = rig.submit(prompt(5, 101), 30), rig.submit(prompt(5, 102), 30)
    rig.step()
    rig.pause(a)
    for _ in range(5):
        rig.step()
    assert (rig.transcript.text(a), rig.transcript.text(b)) == ("a", "abcdef")
    rig.pause(a, False)
    rig.run()
    assert rig.transcript.text(a) == rig.transcript.text(b)


def test_a_generation_paused_in_the_queue_is_passed() -> None:
    rig = Rig(endless())
    a, b = rig.submit(prompt(5, 101), 3), rig.submit(prompt(5, 102), 3)
    rig.pause(a)
    rig.run()
    assert (rig.transcript.text(a), rig.transcript.text(b)) == ("", "abc")
    rig.pause(a, False)
    rig.run()
    assert rig.transcript.text(a) == "abc"


# --- room


def test_a_newcomer_waits_for_cells() -> None:
    rig = Rig(endless(), cells=100)
    a = rig.submit(prompt(60, 101), 10)
    b = rig.submit(prompt(60, 102), 10)
    c = rig.submit(prompt(10, 103), 10)
    rig.step()
    assert [s.generation.rid for s in rig.scheduler.running] == [a], "nobody overtakes who waits for room"
    rig.run()
    assert list(rig.transcript.over) == [a, b, c]
    assert rig.scheduler.preemptions == 0


def test_two_admissions_that_share_one_cached_prefix_are_both_counted() -> None:
    rig = Rig(endless(), cells=100)
    stem = prompt(60)
    rig.submit(stem, 1)
    rig.run()
    rig.submit([*stem[:10], *range(500, 530)], 1)
    rig.submit([*stem, *range(600, 635)], 1)
    rig.step()
    assert len(rig.scheduler.running) + len(rig.transcript.over) == 2
    rig.run()
    assert rig.scheduler.preemptions == 0
    rig.check_empty()


def test_two_admissions_that_share_one_cached_prefix_count_it_once() -> None:
    rig = Rig(endless(), cells=100)
    stem = prompt(60)
    rig.submit(stem, 1)
    rig.run()
    a, b = rig.submit([*stem, 700], 5), rig.submit([*stem, 701], 5)
    rig.step()
    assert {s.generation.rid for s in rig.scheduler.running} == {a, b}


def test_an_admission_never_takes_the_slot_another_one_copies_from() -> None:
    rig = Rig(endless(), Limits(max_running=3), slots=3)
    for i in range(3):
        rig.submit(prompt(40, 101 + i), 1)
    rig.run()
    assert rig.pool.slots_free == 0
    rids = [rig.submit([*prompt(40, 101 + i), 7], 2) for i in (2, 1, 0)]
    rig.run()
    assert [rig.transcript.text(rid) for rid in rids] == ["ab"] * 3
    assert rig.transcript.cached[rids[0], 0] == 40
    rig.check_empty()


def test_who_finds_no_slot_waits() -> None:
    rig = Rig(endless(), Limits(max_running=4), slots=2)
    rids = [rig.submit(prompt(5, 101 + i), 3) for i in range(4)]
    rig.step()
    assert len(rig.scheduler.running) == 2
    rig.run()
    assert list(rig.transcript.over) == rids


def test_the_only_slot_is_taken_although_it_holds_the_prefix() -> None:
    rig = Rig(endless(), Limits(max_running=1), slots=1)
    rig.submit(prompt(40), 1)
    rig.run()
    rid = rig.submit([*prompt(40), 7], 2)
    rig.run()
    assert rig.transcript.text(rid) == "ab"


def test_the_least_recently_used_goes_first() -> None:
    rig = Rig(endless(), Limits(idle_cells=100), cells=4096)
    for i in range(3):
        rig.submit(prompt(30, 101 + i), 1)
        rig.run()
    assert rig.pool.idle == 90
    rig.submit([*prompt(20, 101), *range(700, 710)], 1)  # uses the oldest
    rig.run()
    assert rig.pool.idle == 100
    rig.submit(prompt(30, 201), 1)
    rig.run()
    assert rig.index.match(prompt(30, 102))[0] == 0
    assert [rig.index.match(prompt(30, first))[0] for first in (101, 103, 201)] == [30, 30, 30]


def test_a_prefix_of_what_is_cached_is_not_kept_twice() -> None:
    rig = Rig(endless())
    for n in (20, 30, 25):
        rig.submit(prompt(n), 1)
        rig.run()
    assert rig.pool.used == 30
    assert rig.pool.slots_free == 15


def test_cached_cells_stay_within_their_bound_after_a_cancel_too() -> None:
    rig = Rig(endless(), Limits(idle_cells=50))
    rid = rig.submit(prompt(60), 9)
    rig.step()
    assert rig.pool.held == 60
    rig.cancel(rid)
    assert (rig.pool.idle, rig.pool.used) == (0, 0)


def test_cached_cells_give_way_to_running_ones() -> None:
    rig = Rig(endless(), cells=100)
    for i in range(3):
        rig.submit(prompt(30, 101 + i), 1)
        rig.run()
    rid = rig.submit(prompt(50, 201), 40)
    rig.run()
    assert len(rig.transcript.text(rid)) == 40
    assert rig.scheduler.preemptions == 0


def unshared(texts: Sequence[tuple[list[int], int]], cells: int) -> Rig:
    rig = Rig(endless(), cells=cells)
    for tokens, n in texts:
        rig.submit(tokens, n, sampling=Sampling(seed=5, logprobs=0))
    rig.run()
    return rig


def test_a_preempted_sequence_resumes_exactly() -> None:
    asked = [(prompt(40, 101), 50), (prompt(40, 102), 50)]
    roomy, tight = unshared(asked, 400), unshared(asked, 100)
    assert (roomy.scheduler.preemptions, tight.scheduler.preemptions) == (0, 1)
    assert tight.transcript.texts == roomy.transcript.texts
    assert tight.transcript.ends == roomy.transcript.ends

    def draws(rig: Rig) -> list[tuple[int, int, list[int]]]:
        return sorted((d.seed, d.position, list(d.history[: d.position])) for d in rig.engine.draws)

    assert draws(tight) == draws(roomy)
    assert all(e.tokens == 1 for deltas in tight.transcript.deltas.values() for e in deltas), "nothing is told twice"
    tight.check_empty()


def test_the_youngest_is_sent_back_and_comes_first_again() -> None:
    rig = Rig(endless(), cells=100)
    a, b = rig.submit(prompt(40, 101), 50), rig.submit(prompt(40, 102), 50)
    c = rig.submit(prompt(50, 103), 5)
    rig.run()
    assert list(rig.transcript.over) == [a, b, c]


def test_a_reader_that_does_not_keep_up_is_sent_back_first() -> None:
    rig = Rig(endless(), cells=100)
    a, b = rig.submit(prompt(40, 101), 50), rig.submit(prompt(40, 102), 50)
    rig.step()
    rig.pause(a)
    rig.run()
    assert rig.transcript.over == {b: "finished"}
    rig.pause(a, False)
    rig.run()
    assert rig.transcript.text(a) == rig.transcript.text(b)


def test_sending_back_a_sharer_of_cells_frees_only_its_own() -> None:
    rig = Rig(endless(), cells=102)
    stem = prompt(90)
    rids = [rig.submit([*stem, 500 + i], 6) for i in range(4)]
    rig.run()  # the rig sees to it that each step finds its cells
    assert rig.scheduler.preemptions >= 2
    assert [rig.transcript.text(rid) for rid in rids] == ["abcdef"] * 4


# --- when a step does not work out


def test_a_failed_step_ends_those_in_it_and_no_other() -> None:
    rig = Rig(endless(), Limits(max_running=3))
    done = rig.submit(prompt(5, 101), 1)
    rig.run()
    many = rig.submit(prompt(5, 102), 5, n=5)
    waits = rig.submit(prompt(5, 103), 5)
    rig.step()
    rig.step(StepFailed)
    assert rig.transcript.over == {done: "finished", many: "failed"}
    assert rig.pool.held == 0
    rig.run()
    assert rig.transcript.text(waits) == "abcde"
    rig.check_empty()


def test_a_failure_is_said_once_a_generation() -> None:
    rig = Rig(endless())
    a, b = rig.submit(prompt(5, 101), 5, n=2), rig.submit(prompt(5, 102), 5)
    plan = rig.scheduler.plan(0.0)
    assert plan is not None
    rig.scheduler.begin(plan, 0.0)
    assert rig.scheduler.fail(plan, "why") == [Failed(a, "engine_failed", "why"), Failed(b, "engine_failed", "why")]


def test_an_aborted_step_is_done_again() -> None:
    rig = Rig(endless())
    rid = rig.submit(prompt(5), 3)
    for _ in range(3):
        rig.step(StepAborted)
        rig.step(StepAborted)
        rig.step()
    rig.run()
    assert rig.transcript.text(rid) == "abc"
    assert counts(rig) == [[5], [1], [1]]


def test_operations_leave_in_order_and_once() -> None:
    rig = Rig(endless(), Limits(idle_cells=0))
    first = rig.submit(SYSTEM, 9)
    rig.step()
    rig.submit([*SYSTEM, 1], 9)
    plan = rig.scheduler.plan(0.0)
    assert plan is not None
    rig.scheduler.begin(plan, 0.0)
    rig.scheduler.cancel(first)
    ops = rig.scheduler.take_ops()
    assert [type(op) for op in ops] == [Copy, Trim]
    assert isinstance(ops[0], Copy)
    assert (ops[0].length, ops[1]) == (len(SYSTEM), Trim(ops[0].source, 0))
    assert rig.scheduler.take_ops() == []


# --- how an answer ends


@pytest.mark.parametrize(
    ("script", "stop", "max_tokens", "text", "reason", "tokens"),
    [
        ([[b"A"], [b"B"], [END], [b"C"]], (), 9, "AB", "stop", 3),
        ([[b"A"], [b"B"]], (), 9, "AB", "stop", 3),
        ([[b"A"], [b"B"]], (), 2, "AB", "length", 2),
        ([[b"A"], [END]], (), 2, "A", "stop", 2),
        ([[END]], (), 9, "", "stop", 1),
        ([[b"x "], [b"EN"], [b"D O"], [b"F"], [b" y"]], ("END OF",), 9, "x ", "stop", 4),
        ([[b"UNO "], [b"DUE "], [b"TR"], [b"E"], [END]], ("TRE\nAAAA",), 9, "UNO DUE TRE", "stop", 5),
        ([[b"UNO "], [b"DUE "], [b"TR"], [b"E"]], ("TRE\nAAAA",), 4, "UNO DUE TRE", "length", 4),
        ([[b"A", b"B", END, b"C", b"D"]], (), 9, "AB", "stop", 3),
        ([[b"A", b"B", b"STOP", b"C"]], ("STOP",), 9, "AB", "stop", 3),
        ([[b"A", b"B", b"C", b"D"], [b"E", b"F", b"G", b"H"]], (), 6, "ABCDEF", "length", 6),
        ([[b"a", b"b", b"c"], [b""], [b"d"], [b"e"]], (), 5, "abcd", "length", 5),
        ([[b"\xf0"], [b"\x9f"], [b"\x94"], [b"\xa5"]], (), 3, "", "length", 3),
    ],
)
def test_endings(script: Script, stop: tuple[str, ...], max_tokens: int, text: str, reason: str, tokens: int) -> None:
    rig = Rig(script, bursts=True)
    rid = rig.submit(prompt(5), max_tokens, n=2, stop=stop)
    rig.run()
    for index in range(2):
        end = rig.transcript.ends[rid, index]
        assert (rig.transcript.text(rid, index), end.reason, end.completion_tokens) == (text, reason, tokens)
    assert rig.scheduler.completion_tokens == 2 * tokens
    rig.check_empty()


@pytest.mark.parametrize("script", [[[b"A", b"B", END, b"C", b"D"]], [[b"A", b"B", b"STOP", b"C"]]])
def test_what_a_burst_computed_past_the_end_is_not_cached(script: Script) -> None:
    rig = Rig(script, bursts=True)
    rig.submit(prompt(5), 9, stop=("STOP",))
    rig.run()
    a, b, c, d = (rig.engine.tokenizer.word(w) for w in (b"A", b"B", b"C", b"D"))
    end = rig.engine.tokenizer.word(script[0][2])
    assert rig.index.match([*prompt(5), a, b, end, c, d]) == (7, rig.index.match(prompt(5))[1])
    rid = rig.submit([*prompt(5), a, b, end, c, d], 1)
    rig.run()
    assert rig.transcript.cached[rid, 0] == 7


def test_logprobs_belong_to_the_tokens_that_are_told() -> None:
    rig = Rig([[b"x"], [b"EN"], [b"D!"], [b"\xc3"], [b"\xa9"], [END]], bursts=True)
    rid = rig.submit(prompt(5), 9, stop=("END OF",), sampling=Sampling(logprobs=2))
    rig.run()
    deltas = rig.transcript.deltas[rid, 0]
    assert [d.text for d in deltas] == ["x", "", "END!", "", "é"]
    assert [[p.piece for p in d.logprobs] for d in deltas] == [[b"x"], [b"EN"], [b"D!"], [b"\xc3"], [b"\xa9"]]
    assert all(len(p.top) == 2 for d in deltas for p in d.logprobs)
    assert [d.marks is not None for d in deltas] == [True, False, False, False, False]
    assert rig.transcript.ends[rid, 0].completion_tokens == 6


def test_logprobs_of_a_burst_stop_at_max_tokens() -> None:
    rig = Rig([[b"A", b"B", b"C", b"D"], [b"E", b"F", b"G", b"H"]], bursts=True)
    rid = rig.submit(prompt(5), 6, sampling=Sampling(logprobs=0))
    rig.run()
    deltas = rig.transcript.deltas[rid, 0]
    assert [len(d.logprobs) for d in deltas] == [4, 2]
    assert [d.tokens for d in deltas] == [4, 2]


def test_a_delta_counts_the_tokens_since_the_last_one() -> None:
    rig = Rig([[b"\xf0"], [b"\x9f"], [b"\x94"], [b"\xa5"], [b""], [b"a"], [END]])
    rid = rig.submit(prompt(5), 9)
    rig.run()
    assert rig.transcript.deltas[rid, 0] == [
        Delta(rid, 0, "🔥", 4, marks=Marks(0.0, 0.0, 0.0, 0.0, 0.0), ids=tuple("🔥".encode())),
        Delta(rid, 0, "a", 2, ids=(rig.engine.tokenizer.word(b""), ord("a"))),
    ]


def test_it_says_what_it_has() -> None:
    rig = Rig(endless(), Limits(max_running=1))
    rig.submit(prompt(5, 101), 1)
    rig.run()
    rig.submit(prompt(5, 102), 9)
    rig.submit(prompt(5, 103), 9)
    rig.step()
    assert repr(rig.scheduler).startswith("<Scheduler [1 running, 1 waiting, <Residency [1 idle slots, 0 saved")


@pytest.mark.parametrize("fuse", [True, False])
def test_who_is_put_back_after_a_crash_joins_beyond_the_batch(fuse: bool) -> None:
    """Its reader was being served; newcomers that have burnt their fuse would take all places before it."""
    rig = Rig(endless(), Limits(max_batch=2, max_running=4, pace=Pace(fuse=0.1), fuse=fuse))
    for rid in range(1, 6):
        generation = Generation(rid, prompt(10, 100 + rid), 50, sampling=GREEDY, resume=((97, 98),))
        rig.transcript.ask(generation)
        rig.transcript.texts[rid, 0] = "ab"
        rig.scheduler.submit(generation, 0.0)
    rig.step()
    assert len(rig.scheduler.running) == 2
    rig.clock.advance(0.1)
    rig.step()
    assert len(rig.scheduler.running) == (4 if fuse else 2)


def timed(clock: ManualClock) -> Callable[[float], bool]:
    """A step takes as long as the engine says."""

    def wait(seconds: float) -> bool:
        clock.advance(seconds)
        return False

    return wait


def test_the_share_of_decodes_is_that_of_the_readers_of_now() -> None:
    clock = ManualClock()
    limits = Limits(max_batch=16, pace=Pace())
    rig = Rig(endless(), limits, clock=clock, wait=timed(clock), step_s=0.02, prefill_s=0.05)
    readers = [rig.submit(prompt(10, 100 + i), 400) for i in range(8)]
    for _ in range(4):
        rig.step()
    rig.submit(prompt(2000, 99), 1)
    for _ in range(8):
        rig.step()
    share = rig.scheduler.decode_share
    assert share > 0.0
    for rid in readers[2:]:
        rig.cancel(rid)
    assert rig.scheduler.decode_share == pytest.approx(share / 4)
    for rid in readers[:2]:
        rig.cancel(rid)
    assert rig.scheduler.decode_share == 0.0
