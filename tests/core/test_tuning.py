from __future__ import annotations

import random

import msgspec
import pytest

from headrace.core.quantisation import SOURCE, Loss
from headrace.core.tuning import (
    MIXTURE,
    Candidate,
    Figures,
    PromptStep,
    Trial,
    choose,
    combined,
    faster,
    passed_over,
    prompt_seconds,
    survivors,
    variants,
    waited,
)

OWN = Candidate(SOURCE, 2, True, 512)
ITL = 0.1


def weights(name: str) -> Candidate:
    return msgspec.structs.replace(OWN, weights=name)


def figures(ttft: float, one: float = 0.01, many: float = 0.06) -> Figures:
    return Figures(tuple((tokens, ttft) for tokens, _ in MIXTURE), one, many, 10**8, 100)


def trial(candidate: Candidate, *ttfts: float, size: int = 100, loss: Loss = Loss.NOTHING, many: float = 0.06) -> Trial:
    return Trial(candidate, size, loss, tuple(figures(ttft, many=many) for ttft in ttfts))


# --- figures


def test_the_mean_is_over_the_mixture_and_leaves_out_what_the_model_cannot_hold() -> None:
    assert sum(share for _, share in MIXTURE) == pytest.approx(1.0)
    all_of_it = Figures(((64, 1.0), (512, 2.0), (2048, 10.0)), 0.01, 0.06, 0)
    assert all_of_it.ttft == pytest.approx(0.5 + 0.7 + 1.5)
    assert Figures(((64, 1.0), (512, 2.0)), 0.01, 0.06, 0).ttft == pytest.approx((0.5 + 0.7) / 0.85)


def test_a_prompt_is_as_long_as_its_steps_say_and_beyond() -> None:
    def cost(start: int, count: int) -> float:
        return sum(0.002 + 1e-6 * position for position in range(start, start + count))

    steps = [PromptStep(start, 64, cost(start, 64)) for start in range(0, 512, 64)]
    for tokens in (64, 300, 512, 2048):
        assert prompt_seconds(steps, tokens) == pytest.approx(cost(0, tokens), rel=1e-3)
    assert prompt_seconds(steps[:1], 128) == pytest.approx(2 * steps[0].seconds)


def test_some_steps_that_were_disturbed_change_little() -> None:
    clean = [PromptStep(start, 64, 0.128 + start * 64e-6) for start in range(0, 1024, 64)]
    disturbed = [
        msgspec.structs.replace(step, seconds=step.seconds * 5) if at in (3, 8, 15) else step
        for at, step in enumerate(clean)
    ]
    assert prompt_seconds(disturbed, 2048) == pytest.approx(prompt_seconds(clean, 2048), rel=0.05)


def test_noise_alone_never_makes_later_tokens_cheaper() -> None:
    falling = [PromptStep(0, 64, 0.2), PromptStep(64, 64, 0.1)]
    assert prompt_seconds(falling, 2048) == pytest.approx(2048 * 0.15 / 64)


# --- who is faster


def test_faster_is_by_the_median_and_in_every_round() -> None:
    assert faster(trial(weights("f16"), 0.8, 0.9, 0.85), trial(OWN, 1.0, 1.0, 1.0))
    assert not faster(trial(weights("f16"), 0.8, 1.01, 0.85), trial(OWN, 1.0, 1.0, 1.0)), "one round contradicts"
    assert not faster(trial(weights("f16"), 0.99, 0.98, 0.99), trial(OWN, 1.0, 1.0, 1.0)), "within the margin"
    assert not faster(trial(weights("f16")), trial(OWN, 1.0))


def test_few_rounds_must_differ_by_more() -> None:
    for rounds, enough in ((1, 0.84), (2, 0.92), (3, 0.94), (10, 0.96)):
        usual = trial(OWN, *[1.0] * rounds)
        assert faster(trial(weights("f16"), *[enough] * rounds), usual)
        assert not faster(trial(weights("f16"), *[enough + 0.02] * rounds), usual)


def test_rounds_are_compared_in_pairs() -> None:
    """A machine that is twice as slow for one round slows both: it says nothing about either."""
    assert faster(trial(weights("f16"), 0.9, 1.8, 0.9), trial(OWN, 1.0, 2.0, 1.0))


def test_the_clearly_slower_end_after_the_first_round() -> None:
    slow, near, fast, lossy = weights("a"), weights("b"), weights("c"), weights("d")
    first = [
        trial(OWN, 2.0),
        trial(slow, 1.3),
        trial(near, 1.2),
        trial(fast, 1.0),
        trial(lossy, 0.5, loss=Loss.AGAIN),
        Trial(weights("e"), 1, failure="died"),
    ]
    left = survivors(first, OWN, ITL, allow_loss=False)
    assert [one.candidate for one in left] == [OWN, near, fast, lossy], "the user's own stays: all are compared with it"
    assert [one.candidate for one in survivors(first, OWN, ITL, allow_loss=True)] == [OWN, lossy]


def test_one_that_misses_the_target_rules_nobody_out() -> None:
    first = [trial(OWN, 1.0), trial(weights("a"), 0.5, many=0.2)]
    assert [one.candidate for one in survivors(first, OWN, ITL, allow_loss=False)] == [OWN, weights("a")]


# --- the choice


def test_the_fastest_within_the_target_is_chosen() -> None:
    trials = [trial(OWN, 1.0, 1.0), trial(weights("f16"), 0.5, 0.5), trial(weights("q8_0"), 0.3, 0.3, many=0.15)]
    decision = choose(trials, OWN, ITL)
    assert decision is not None
    assert decision.chosen.candidate.weights == "f16"
    assert decision.met
    assert any("50% less than what is used untuned" in reason for reason in decision.reasons)
    said = list(passed_over(trials, decision.chosen, ITL, allow_loss=False))
    assert len(said) == 1
    assert "q8_0" in said[0]
    assert "150 ms for a step" in said[0]


def test_a_step_of_one_reader_counts_as_well() -> None:
    slow = Trial(weights("f16"), 1, Loss.NOTHING, (figures(0.1, one=0.2, many=0.05),))
    decision = choose([trial(OWN, 1.0), slow], OWN, ITL)
    assert decision is not None
    assert decision.chosen.candidate == OWN


def test_a_tie_stays_with_what_is_used() -> None:
    for seed in range(200):
        noise = random.Random(seed)
        names = [OWN, *(weights(name) for name in ("q8_0", "q4_0", "f16"))]
        trials = [trial(one, *(noise.gauss(1.0, 0.01) for _ in range(3)), size=50) for one in names]
        decision = choose(trials, OWN, ITL)
        assert decision is not None
        assert decision.chosen.candidate == OWN


def test_a_real_difference_is_found_in_noise() -> None:
    found = 0
    for seed in range(100):
        noise = random.Random(seed)
        pace = [noise.lognormvariate(0.0, 0.3) for _ in range(3)]
        own = trial(OWN, *(p * noise.gauss(1.0, 0.05) for p in pace))
        other = trial(weights("f16"), *(p * 0.75 * noise.gauss(1.0, 0.05) for p in pace))
        decision = choose([own, other], OWN, ITL)
        assert decision is not None
        found += decision.chosen is other
    assert found >= 95


def test_of_two_that_tie_the_smaller_file_is_taken() -> None:
    trials = [
        trial(OWN, 1.0, 1.0),
        trial(weights("f16"), 0.50, 0.49, size=270),
        trial(weights("q8_0"), 0.49, 0.5, size=140),
    ]
    decision = choose(trials, OWN, ITL)
    assert decision is not None
    assert decision.chosen.candidate.weights == "q8_0"
    other = choose([trials[0], trial(weights("f16"), 0.495, 0.48, size=270), trials[2]], OWN, ITL)
    assert other is not None
    assert other.chosen.candidate.weights == "q8_0"
    assert any(reason.startswith("f16") and "noise" in reason for reason in other.reasons)


def test_a_tie_of_settings_goes_to_the_users_own_file_and_fewest_changes() -> None:
    fast = msgspec.structs.replace(OWN, threads=1)
    twice = msgspec.structs.replace(fast, step_tokens=64)
    decision = choose([trial(OWN, 1.0), trial(twice, 0.5), trial(fast, 0.5), trial(weights("f16"), 0.5)], OWN, ITL)
    assert decision is not None
    assert decision.chosen.candidate == fast


def test_what_loses_precision_is_chosen_only_if_allowed() -> None:
    lossy = trial(weights("q4_0"), 0.3, 0.3, loss=Loss.AGAIN)
    rounded = trial(weights("q8_0"), 0.6, 0.6, loss=Loss.ROUNDING)
    trials = [trial(OWN, 1.0, 1.0), lossy, rounded]
    careful, bold = choose(trials, OWN, ITL), choose(trials, OWN, ITL, allow_loss=True)
    assert careful is not None
    assert bold is not None
    assert (careful.chosen, bold.chosen) == (rounded, lossy)
    assert "only with --allow-loss" in next(iter(passed_over(trials, rounded, ITL, allow_loss=False)))


def test_where_none_meets_the_target_the_nearest_is_taken_and_that_is_said() -> None:
    trials = [trial(OWN, 1.0, many=0.3), trial(weights("f16"), 0.5, many=0.4), trial(weights("q8_0"), 2.0, many=0.2)]
    decision = choose(trials, OWN, ITL)
    assert decision is not None
    assert decision.chosen.candidate.weights == "q8_0"
    assert not decision.met
    assert "none keeps" in decision.reasons[0]
    assert "200 ms" in decision.reasons[0]


def test_where_none_meets_the_target_a_hair_s_breadth_does_not_decide() -> None:
    """A large model, whose readers' steps are all far too long: what is five times slower to the first token is not
    taken for 1 % of such a step."""
    trials = [trial(OWN, 10.0, many=0.9), trial(weights("f16"), 50.0, many=0.89), trial(weights("q8_0"), 2.0, many=1.9)]
    decision = choose(trials, OWN, ITL)
    assert decision is not None
    assert decision.chosen.candidate == OWN
    assert not decision.met


def test_one_that_was_given_up_early_is_not_chosen_for_its_one_good_round() -> None:
    decision = choose([trial(OWN, 1.0, 1.0, 1.0), trial(weights("f16"), 0.5)], OWN, ITL)
    assert decision is not None
    assert decision.chosen.candidate == OWN


def test_of_those_as_near_to_the_target_the_users_own_stays_unless_one_is_faster() -> None:
    own = trial(OWN, 1.0, many=0.300)
    same = trial(weights("f16"), 0.98, many=0.296)
    fast = trial(weights("q8_0"), 0.5, many=0.310)
    slow = trial(weights("bf16"), 0.1, many=0.500)
    decision = choose([own, same], OWN, ITL)
    assert decision is not None
    assert (decision.chosen, decision.met) == (own, False)
    decision = choose([own, same, fast, slow], OWN, ITL)
    assert decision is not None
    assert decision.chosen is fast


def test_without_figures_there_is_no_choice() -> None:
    assert choose([Trial(OWN, 1, failure="died")], OWN, ITL) is None
    assert choose([trial(weights("q4_0"), 1.0, loss=Loss.AGAIN)], OWN, ITL) is None


# --- what is tried


def test_each_variant_changes_one_thing_that_can_matter() -> None:
    found = variants(OWN, 8, 100)
    assert all(one.changes(OWN) == 1 for one in found)
    assert [one.threads for one in found if one.threads != 2] == [8, 7, 4]
    assert [one.step_tokens for one in found if one.step_tokens != 512] == [64], "steps were of 100 at most anyway"
    assert sum(not one.flash_attention for one in found) == 1
    assert sum(not one.extra_buffers for one in found) == 1


def test_a_limit_that_was_reached_may_be_raised() -> None:
    assert [one.step_tokens for one in variants(OWN, 2, 512) if one.step_tokens != 512] == [64, 128, 256, 1024]


def test_there_are_never_more_threads_than_cores_nor_none() -> None:
    single = msgspec.structs.replace(OWN, threads=1)
    assert {one.threads for one in variants(single, 1, 0)} == {1}
    assert {one.threads for one in variants(OWN, 2, 0)} == {1, 2}


def test_what_the_user_set_is_not_varied() -> None:
    assert variants(OWN, 8, 512, frozenset({"threads", "flash_attention", "extra_buffers", "step_tokens"})) == []


def test_changes_that_helped_alone_are_tried_together() -> None:
    base = trial(OWN, 1.0, 1.0)
    threads = msgspec.structs.replace(OWN, threads=1)
    flash = msgspec.structs.replace(OWN, flash_attention=False)
    step = msgspec.structs.replace(OWN, step_tokens=64)
    good = [trial(threads, 0.8, 0.8), trial(flash, 0.9, 0.9), trial(step, 1.0, 1.0)]
    assert combined(base, good, ITL) == Candidate(SOURCE, 1, False, 512)
    assert combined(base, good[:1], ITL) is None
    assert combined(base, [good[0], trial(flash, 0.5, 0.5, many=0.2)], ITL) is None, "that one breaks the target"


def test_how_busy_the_machine_was() -> None:
    shares = [msgspec.structs.replace(figures(1.0), waited=share) for share in (0.0, 0.5, 0.2)]
    assert waited([Trial(OWN, 1, rounds=tuple(shares))]) == 0.2
    assert waited([]) == 0.0


def test_a_candidate_is_told_in_words() -> None:
    assert str(OWN) == "source, 2 threads, steps of 512"
    assert str(Candidate("f16", 1, False, 64)) == "f16, 1 thread, steps of 64, no flash attention"
