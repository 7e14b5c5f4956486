from __future__ import annotations

import math
from typing import Any

import pytest

from core.overload import Kind, offer
from headrace.core.admission import BLOCK, BLOCKS, EARLY, LATE, TRUST, Backlog, Bounds, Overlap
from headrace.core.errors import Overloaded
from headrace.core.events import Admitted, Delta
from headrace.core.request import BATCH, INTERACTIVE, Generation

MS = 0.001


def prompt(rid: int, tokens: int = 1000, **fields: Any) -> Generation:
    return Generation(rid, [rid] * tokens, 1, **fields)


def backlog(*, share: float = 0.0, reported: int = 0, **bounds: Any) -> Backlog:
    """Of an engine that takes 1 ms a prompt token."""
    one = Backlog(Bounds(**bounds))
    one.learn(MS, share, reported)
    return one


def refusal(one: Backlog, generation: Generation, now: float = 0.0) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        one.add(generation, now)
    return caught.value


def ahead(one: Backlog, tokens: int) -> float:
    """Seconds until it is the turn of a prompt."""
    return one.predict(tokens, INTERACTIVE, 0.0, reuses=False) - tokens * MS


# Hard limits.


def test_a_full_queue_refuses_and_says_both_numbers() -> None:
    one = Backlog(Bounds(max_waiting=2))
    one.add(prompt(1), 0.0)
    one.add(prompt(2), 0.0)
    error = refusal(one, prompt(3))
    assert (error.reason, error.retry_after) == ("queue_full", 1)
    assert "2 requests are waiting, the limit is 2" in error.message
    one.book(Admitted(1, 0, 0), 0.0)
    one.add(prompt(3), 0.0)
    assert one.waiting == 2


def test_a_full_queue_says_when_one_of_it_will_have_begun() -> None:
    one = backlog(max_waiting=2)
    one.add(prompt(1, 3000), 0.0)
    one.add(prompt(2, 5000), 0.0)
    assert refusal(one, prompt(3, 1)).retry_after == 4


def test_who_finds_a_place_does_not_wait() -> None:
    one = Backlog(Bounds(max_waiting=1, places=2))
    for rid in (1, 2, 3):
        one.add(prompt(rid), 0.0)
    assert refusal(one, prompt(4)).reason == "queue_full"
    one.book(Admitted(1, 0, 0), 0.0)
    assert refusal(one, prompt(4)).reason == "queue_full", "it holds its place while it runs"
    one.book(Delta(1, 0, "x", 1), 0.0)
    assert refusal(one, prompt(4)).reason == "queue_full"
    one.remove(1, 0.0)
    one.add(prompt(4), 0.0)


def test_choices_take_a_place_each_and_nobody_passes_who_waits_for_several() -> None:
    one = Backlog(Bounds(max_waiting=2, places=3))
    one.add(prompt(1, n=2), 0.0)
    one.add(prompt(2, n=2), 0.0)
    one.add(prompt(3), 0.0)
    assert refusal(one, prompt(4)).reason == "queue_full"


def test_without_a_queue_only_free_places_are_given() -> None:
    one = Backlog(Bounds(max_waiting=0, places=1))
    one.add(prompt(1), 0.0)
    assert refusal(one, prompt(2)).reason == "queue_full"


def test_waiting_tokens_are_bounded() -> None:
    one = backlog(max_waiting_tokens=2500, places=1)
    one.add(prompt(1, 9000), 0.0)
    one.add(prompt(2, 1500), 0.0)
    one.add(prompt(3, 1000), 0.0)
    error = refusal(one, prompt(4, 1200))
    assert (error.reason, error.retry_after) == ("queue_tokens", 2)
    assert "2500 prompt tokens are waiting and this request has 1200, the limit is 2500" in error.message
    one.book(Admitted(1, 0, 0), 0.0)
    one.remove(1, 0.0)
    one.add(prompt(4, 1000), 0.0)


def test_a_prompt_beyond_the_token_limit_is_taken_when_nobody_waits() -> None:
    one = Backlog(Bounds(max_waiting_tokens=10))
    one.add(prompt(1, 9000), 0.0)


# Predictions.


def test_an_engine_of_unknown_speed_refuses_no_deadline() -> None:
    one = Backlog(Bounds(queue_timeout_s=0.001))
    for rid in range(10):
        one.add(prompt(rid, deadline=0.001), 0.0)
    assert one.predict(1000, INTERACTIVE, 0.0) == pytest.approx(0.0)


def test_off_means_hard_limits_only() -> None:
    one = backlog(predict=False, max_waiting=3, queue_timeout_s=0.001)
    for rid in range(3):
        one.add(prompt(rid, deadline=0.001), 0.0)
    assert refusal(one, prompt(4)).reason == "queue_full"


@pytest.mark.parametrize(("share", "seconds"), [(0.0, 1.0), (0.5, 2.0), (0.9, 10.0), (1.0, 20.0), (-1.0, 1.0)])
def test_decodes_take_their_share(share: float, seconds: float) -> None:
    assert backlog(share=share).predict(1000, INTERACTIVE, 0.0) == pytest.approx(seconds)


def test_shorter_ones_go_first_longer_ones_do_not() -> None:
    one = backlog()
    one.add(prompt(1, 300), 0.0)
    one.add(prompt(2, 2000), 0.0)
    assert one.predict(1000, INTERACTIVE, 0.0) == pytest.approx(1.3)
    assert one.predict(100, INTERACTIVE, 0.0) == pytest.approx(0.1)
    assert one.predict(5000, INTERACTIVE, 0.0) == pytest.approx(7.3)


def test_waiting_moves_a_long_one_forward() -> None:
    one = backlog()
    one.add(prompt(1, 2000), 0.0)
    assert one.predict(1000, INTERACTIVE, 3.9) == pytest.approx(1.0)
    assert one.predict(1000, INTERACTIVE, 4.1) == pytest.approx(3.0)


def test_batch_waits_for_all_interactive_and_they_never_for_it() -> None:
    one = backlog()
    one.add(prompt(1, 4000), 0.0)
    one.add(prompt(2, 500, priority=BATCH), 0.0)
    assert one.predict(1000, BATCH, 0.0) == pytest.approx(5.5)
    assert one.predict(1000, INTERACTIVE, 100.0) == pytest.approx(5.0)


def test_a_running_prefill_counts_with_what_is_left_of_it() -> None:
    one = backlog()
    one.add(prompt(1, 1000), 0.0)
    one.book(Admitted(1, 0, 200), 0.0)
    for left in (800, 300):
        one.learn(MS, 0.0, left)
        assert ahead(one, 5000) == pytest.approx(left * MS)
    one.book(Delta(1, 0, "x", 1), 0.0)
    one.learn(MS, 0.0, 0)
    assert ahead(one, 5000) == pytest.approx(0.0)


def test_those_that_wait_are_not_counted_twice() -> None:
    one = backlog()
    one.add(prompt(1, 1000), 0.0)
    one.book(Admitted(1, 0, 0), 0.0)
    one.add(prompt(2, 500), 0.0)
    one.learn(MS, 0.0, 400)
    assert ahead(one, 5000) == pytest.approx(0.9)


def test_a_burst_is_counted_before_the_engine_has_heard_of_it() -> None:
    one = backlog()
    for rid in range(5):
        one.add(prompt(rid, deadline=5.0), 0.0)
    assert refusal(one, prompt(9, deadline=5.0)).retry_after == 1


def test_work_of_which_only_the_engine_knows_goes_first() -> None:
    one = backlog()
    start(one, 1, 0.0)
    one.learn(MS, 0.0, 700)
    assert ahead(one, 10) == pytest.approx(0.7), "its reader waits for it again: it had to start again"


def test_what_an_idle_engine_does_for_itself_is_not_waited_for() -> None:
    assert ahead(backlog(reported=700), 10) == pytest.approx(0.0)


@pytest.mark.parametrize("begun", [True, False])
def test_who_has_left_is_not_waited_for_although_the_engine_still_counts_it(begun: bool) -> None:
    one = backlog()
    one.add(prompt(1, 1000), 0.0)
    one.add(prompt(2, 400), 0.0)
    if begun:
        one.book(Admitted(1, 0, 0), 0.0)
    one.learn(MS, 0.0, 1000 * begun)
    one.remove(1, 0.0)
    assert ahead(one, 5000) == pytest.approx(0.4)
    one.remove(1, 0.0)
    one.remove(2, 0.0)
    assert ahead(one, 5000) == pytest.approx(0.0)


def test_prompts_are_expected_to_be_cached_as_those_before() -> None:
    one = backlog()
    assert one.hit_ratio == pytest.approx(0.0)
    one.add(prompt(1), 0.0)
    one.book(Admitted(1, 0, 800), 0.0)
    one.book(Admitted(1, 1, 0), 0.0)  # its second choice shares the prompt
    assert one.hit_ratio == pytest.approx(0.8)
    one.remove(1, 0.0)
    assert one.predict(1000, INTERACTIVE, 0.0) == pytest.approx(0.2)
    assert one.predict(1000, INTERACTIVE, 0.0, reuses=False) == pytest.approx(1.0)
    for rid in range(2, 200):
        one.add(prompt(rid), 0.0)
        one.book(Admitted(rid, 0, 0), 0.0)
        one.remove(rid, 0.0)
    assert one.hit_ratio < 0.001


def test_who_does_not_reuse_says_nothing_about_the_cache() -> None:
    one = backlog()
    one.add(prompt(1, cache=False), 0.0)
    one.book(Admitted(1, 0, 0), 0.0)
    one.add(prompt(2), 0.0)
    one.book(Admitted(2, 0, 500), 0.0)
    assert one.hit_ratio == pytest.approx(0.5)


def test_a_wholly_cached_prompt_still_costs_its_last_token() -> None:
    one = backlog()
    one.add(prompt(1), 0.0)
    one.book(Admitted(1, 0, 1000), 0.0)
    one.remove(1, 0.0)
    assert one.predict(1000, INTERACTIVE, 0.0) == pytest.approx(MS)


# Deadlines.


def test_a_deadline_that_cannot_be_met_is_refused_with_both_numbers() -> None:
    one = backlog()
    for rid in (1, 2, 3):
        one.add(prompt(rid, 2000), 0.0)
    error = refusal(one, prompt(4, 3000, deadline=5.5))
    assert error.reason == "deadline"
    assert error.retry_after == math.ceil(9.0 - 5.5)
    assert "9.0 s, its deadline is 5.5 s; try again in 4 s" in error.message
    one.add(prompt(4, 3000, deadline=9.0), 0.0)


def test_trying_again_when_told_helps() -> None:
    one = backlog()
    for rid in range(4):
        one.add(prompt(rid, 2000), 0.0)
        one.book(Admitted(rid, 0, 0), 0.0)
    one.learn(MS, 0.0, 8000)
    late = prompt(9, 3000, deadline=5.0)
    wait = refusal(one, late).retry_after
    assert wait == 6
    one.learn(MS, 0.0, 8000 - wait * 1000)
    one.add(late, float(wait))


def test_alone_only_an_impossible_deadline_is_refused() -> None:
    one = backlog(queue_timeout_s=30.0)
    one.add(prompt(1, 100_000), 0.0)
    one.remove(1, 0.0)
    one.add(prompt(1, 1000, deadline=1.0), 0.0)
    one.remove(1, 0.0)
    assert refusal(one, prompt(2, 1001, deadline=1.0)).retry_after == 1


@pytest.mark.parametrize("deadline", [None, 100.0])
def test_who_would_have_to_wait_longer_than_the_queue_lets_is_refused_at_once(deadline: float | None) -> None:
    one = backlog(queue_timeout_s=3.0)
    one.add(prompt(1, 2000), 0.0)
    one.add(prompt(2, 1500), 0.0)
    error = refusal(one, prompt(3, 9000, deadline=deadline))
    assert (error.reason, error.retry_after) == ("deadline", 1)
    assert "3.5 s, the limit is 3 s" in error.message
    one.add(prompt(3, 1000, deadline=deadline), 0.0)


def test_what_is_not_known_here_is_passed_over() -> None:
    one = backlog()
    one.book(Delta(7, 0, "x", 1), 0.0)
    one.remove(7, 0.0)
    assert repr(one) == "<Backlog [0 live, 0 waiting]>"


def arrive(one: Backlog, rid: int, took: float) -> None:
    """A prompt of 1 s comes behind one of 2 s; its first token takes that long."""
    one.add(Generation(0, [100_000 + rid] * 2000, 1), -1000.0)
    one.add(prompt(rid, 1000), 0.0)
    one.book(Admitted(rid, 0, 0), 0.0)
    one.book(Delta(rid, 0, "x", 1), took)
    one.book(Delta(rid, 0, "y", 1), took + 100.0)
    one.remove(rid, 0.0)
    one.remove(0, 0.0)


def crowded(**bounds: Any) -> Backlog:
    """Somebody always waits: the queue that the correction is learned from is not over."""
    one = backlog(**bounds)
    one.add(prompt(10**6, 1, priority=BATCH), 0.0)
    return one


def test_waits_are_corrected_by_those_before() -> None:
    one = crowded()
    arrive(one, 1, 3.1)
    assert one.correction == LATE
    one.add(prompt(2, 2000), -1000.0)
    assert one.predict(1000, INTERACTIVE, 0.0) == pytest.approx(1.0 + LATE * 2.0), "its own work is not"
    one.remove(2, 0.0)
    arrive(one, 3, 3.0)
    assert one.correction == pytest.approx(LATE * EARLY)


def test_one_in_ten_may_be_late() -> None:
    assert math.log(LATE) + 9 * math.log(EARLY) == pytest.approx(0.0, abs=0.002)


@pytest.mark.parametrize(("took", "bound"), [(99.0, 4.0), (0.1, 0.5)])
def test_a_correction_has_its_bounds(took: float, bound: float) -> None:
    one = crowded()
    for rid in range(1, 200):
        arrive(one, rid, took)
    assert one.correction == bound


def test_nothing_is_learned_from_who_did_not_wait() -> None:
    one = backlog()
    one.add(prompt(0, 99), 0.0)
    one.add(prompt(1), 0.0)
    one.book(Delta(1, 0, "x", 1), 50.0)
    unknown = Backlog(Bounds())
    arrive(unknown, 1, 50.0)
    assert one.correction == unknown.correction == 1.0


# Places.


def held(hold_s: float, **bounds: Any) -> Backlog:
    """An engine whose answers hold their places that long, with prompts of no weight."""
    one = backlog(**bounds)
    one.add(prompt(0, 1), -hold_s)
    one.book(Admitted(0, 0, 0), -hold_s)
    one.book(Delta(0, 0, "x", 1), -hold_s)
    one.remove(0, 0.0)
    return one


def start(one: Backlog, rid: int, now: float, **fields: Any) -> None:
    one.add(prompt(rid, 1, **fields), now)
    one.book(Admitted(rid, 0, 0), now)
    one.book(Delta(rid, 0, "x", 1), now)


def place(one: Backlog, now: float = 0.0, priority: int = INTERACTIVE) -> float:
    """Seconds until a place is free for a prompt."""
    return one.predict(1, priority, now, reuses=False) - MS


def test_a_place_comes_free_when_its_holder_has_had_its_time() -> None:
    one = held(5.0, places=1)
    assert place(one) == pytest.approx(0.0)
    start(one, 1, 0.0)
    assert place(one) == pytest.approx(5.0)
    assert place(one, 3.0) == pytest.approx(2.0)
    assert place(one, 9.0) == pytest.approx(0.0), "it must be over any moment"
    one.remove(1, 9.0)
    assert place(one, 9.0) == pytest.approx(0.0)


def test_several_places_come_free_one_after_the_other() -> None:
    one = held(4.0, places=4)
    for rid in range(1, 4):
        start(one, rid, 0.0)
    assert place(one) == pytest.approx(0.0)
    start(one, 4, 0.0)
    assert place(one) == pytest.approx(1.0)
    one.add(prompt(5, 1, n=2), 0.0)
    assert place(one) == pytest.approx(3.0, abs=0.01)
    one.add(prompt(6, 1, priority=BATCH), 0.0)
    assert place(one) == pytest.approx(3.0, abs=0.01)
    assert place(one, priority=BATCH) == pytest.approx(4.0, abs=0.01)
    assert place(one, 3.5) == pytest.approx(2.5, abs=0.01), "the oldest holder is nearly done"


def test_the_longer_of_both_waits_counts() -> None:
    one = held(5.0, places=1)
    start(one, 1, 0.0)
    one.add(prompt(2, 30), 0.0)
    one.learn(MS, 0.0, 0)
    assert ahead(one, 9000) == pytest.approx(10.0)
    one.learn(MS, 0.0, 20_000)
    assert ahead(one, 9000) == pytest.approx(20.03)


@pytest.mark.parametrize("bounds", [{"places": 0}, {"places": 1, "predict": False}])
def test_nobody_waits_for_places_that_are_not_known(bounds: dict[str, Any]) -> None:
    one = held(5.0, **bounds)
    start(one, 1, 0.0)
    one.add(prompt(2, 1, deadline=1.0), 0.0)


def test_what_was_given_up_before_it_had_a_place_held_none() -> None:
    one = held(5.0, places=1)
    start(one, 1, 0.0)
    one.add(prompt(2, 1), 0.0)
    one.remove(2, 1000.0)
    assert place(one) == pytest.approx(5.0)


def test_places_of_unknown_duration_refuse_nobody() -> None:
    one = backlog(places=1)
    start(one, 1, 0.0)
    one.add(prompt(2, 1, deadline=1.0), 0.0)


# Goodput.

MIXED = (100, 200, 400, 1600)


@pytest.mark.parametrize(
    "kind",
    [
        *(Kind(sizes, error=error) for sizes in ((400,), MIXED) for error in (1.0, 0.7, 1.4)),
        Kind((40,), places=1, answer_s=0.5),
        Kind((40,), places=4, answer_s=1.5),
        Kind(MIXED, places=8, answer_s=3.0),
    ],
    ids=str,
)
def test_goodput_stays_flat_under_overload_and_collapses_without_admission(kind: Kind) -> None:
    loads = (0.5, 1.0, 2.0, 4.0)
    kept = {load: offer(kind, load, predict=True) for load in loads}
    lost = {load: offer(kind, load, predict=False) for load in loads}
    best = max(run.goodput for run in kept.values())
    assert kept[0.5].refused <= 1, "no need, no refusal"
    assert kept[2.0].goodput >= kept[1.0].goodput
    assert kept[4.0].goodput >= 0.9 * best
    assert lost[4.0].goodput <= 0.4 * max(run.goodput for run in lost.values())
    assert kept[4.0].late <= 0.15 * kept[4.0].taken, "what was taken is mostly in time"


def shared_prompt(rid: int, n: int, *, salt: str = "", cache: bool = True) -> Generation:
    return Generation(rid, [*range(1000), *range(2000, 2000 + n), rid], 4, salt=salt, cache=cache)


def test_what_prompts_have_in_common_counts_once() -> None:
    """Eight users come at once with one long system prompt: it is computed once, and nobody has to be refused."""
    one = backlog()
    one.add(shared_prompt(1, 20), 0.0)
    for rid in range(2, 9):
        one.add(shared_prompt(rid, 20), 0.0)
    left = 1021 - 15 * BLOCK
    assert one.predict(2000, INTERACTIVE, 0.0) == pytest.approx((1021 + 7 * left + 2000) * 1e-3)


def test_what_is_not_shared_is_not_counted_as_such() -> None:
    overlap = Overlap()
    overlap.add(shared_prompt(1, 20))
    assert overlap.of(shared_prompt(2, 20)) == 15 * BLOCK
    assert overlap.of(shared_prompt(2, 20, salt="other")) == 0
    assert overlap.of(shared_prompt(2, 20, cache=False)) == 0
    assert overlap.of(Generation(3, [7, *range(1, 1000)], 4)) == 0
    for i in range(BLOCKS):
        overlap.add(Generation(4, [5000 + i] * BLOCK, 4))
    assert overlap.of(shared_prompt(2, 20)) == 0, "only the latest are remembered"


# Figures of before.


def test_eight_at_once_find_an_idle_engine_whatever_was_before() -> None:
    """A server was so busy that everybody came late. Then it has nothing to do, and eight users come with long prompts
    of their own: they are computed in 8 s, and nobody may wait for longer than 30 s."""
    one = crowded()
    for rid in range(1, 200):
        arrive(one, rid, 99.0)
    assert one.correction > 3.9
    one.remove(10**6, 0.0)
    one.learn(MS, 0.0, 0)
    one.bounds = Bounds(queue_timeout_s=20.0)
    for rid in range(1001, 1009):
        one.add(prompt(rid), 1.0)
    assert one.correction == 1.0


def test_a_reader_alone_keeps_no_queue_alive() -> None:
    one = crowded(places=16)
    for rid in range(1, 200):
        arrive(one, rid, 99.0)
    one.book(Admitted(10**6, 0, 0), 0.0)
    one.book(Delta(10**6, 0, "x", 1), 0.0)
    one.add(prompt(2), 0.0)
    assert one.correction == 1.0


def test_what_waits_for_a_shared_prefix_is_counted_here_alone() -> None:
    """The engine knows each of them as a whole prompt until it is the turn of it."""
    one = backlog()
    for rid in range(1, 9):
        one.add(shared_prompt(rid, 20), 0.0)
    one.book(Admitted(1, 0, 0), 0.0)
    one.learn(MS, 0.0, 521)
    left = 1021 - 15 * BLOCK
    assert ahead(one, 9000) == pytest.approx((521 + 7 * left) * MS)


def test_figures_that_refuse_everybody_are_put_to_the_test() -> None:
    """The engine's figures are ten times too high, and only a prompt that is computed can show that."""
    one = backlog()
    for rid in range(TRUST):
        refusal(one, prompt(rid, deadline=0.5))
    one.add(prompt(100, deadline=0.5), 0.0)
    refusal(one, prompt(101, deadline=0.5))
    one.remove(100, 1.0)
    for rid in range(TRUST):
        refusal(one, prompt(rid, deadline=0.5))
    one.add(prompt(102, deadline=0.5), 0.0)
