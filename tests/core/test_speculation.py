from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from headrace.core.speculation import (
    DRAFT_PRIORS,
    LOOKUP_PRIORS,
    MAX_GUESSES,
    Acceptance,
    Cost,
    Lookup,
    Outcome,
    Speculation,
    Speculator,
)

# --- what comes next?


def ready(tokens: list[int], prompt: int) -> Lookup:
    """A lookup that has indexed everything."""
    lookup = Lookup(tokens, prompt)
    for _ in range(len(tokens) // 512 + 1):
        lookup.review()
    return lookup


def test_it_says_what_followed_before() -> None:
    lookup = ready([1, 2, 3, 4, 5, 6, 7, 9, 9, 9, 2, 3, 4], 10)
    assert lookup.propose(4) == (5, 6, 7, 9)
    assert lookup.propose(1) == (5,)
    assert lookup.support == 3
    assert lookup.cost(60) == 0.0
    assert lookup.ready(0.0)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 7, 1, 2], [0, 0, 7, 7, 7]])
def test_nothing_is_said_of_what_is_new(tokens: list[int]) -> None:
    lookup = ready(tokens, 0)
    assert lookup.propose(4) == ()
    assert lookup.support is None


def test_the_longer_agreement_wins_over_the_later() -> None:
    assert ready([8, 1, 2, 3, 50, 7, 1, 2, 3, 60, 8, 1, 2, 3], 0).propose(1) == (50,)


def test_of_equal_agreements_the_later_wins() -> None:
    assert ready([8, 1, 2, 3, 50, 8, 1, 2, 3, 60, 8, 1, 2, 3], 0).propose(1) == (60,)


def test_a_text_that_goes_round_goes_on_going_round() -> None:
    assert ready([1, 2, 3, 4] * 2, 0).propose(10) == (1, 2, 3, 4, 1, 2, 3, 4, 1, 2)
    assert ready([5] * 5, 0).propose(3) == (5, 5, 5)


def test_what_the_prompt_repeats_is_no_support() -> None:
    assert ready([1, 2, 3, 4] * 4, 16).support == 0
    assert ready([1, 2, 3, 4] * 4, 14).support == 2
    assert ready([1, 2, 3, 4] * 4, 4).support == 12


def test_it_follows_its_source_and_tells_how_it_went() -> None:
    tokens = [*range(100, 140), 100, 101, 102]
    lookup = ready(tokens, 40)
    tokens += [103, 104]
    assert lookup.review() == [(3, True), (4, True)]
    assert lookup.support == 5
    tokens += [105, 7, 8]  # a burst: the rest behind the wrong one was nobody's guess
    assert lookup.review() == [(5, True), (6, False)]
    assert lookup.support is None
    tokens += [9]
    assert lookup.review() == []
    tokens += [120, 121, 122]
    assert lookup.review() == []
    assert lookup.propose(2) == (123, 124)


def test_a_long_prompt_is_indexed_in_slices() -> None:
    tokens = [*range(10, 3010), 1000, 1001, 1002]
    lookup = Lookup(tokens, 3000)
    tries = 0
    while lookup.support is None:
        assert lookup.review() == []
        tries += 1
    assert lookup.propose(2) == (1003, 1004)
    assert tries == 2, "992 tokens, 512 at a time"


def naive(tokens: list[int]) -> list[tuple[int, ...]]:
    """Continuations (8 long at most) of the places that agree longest, up to 16 tokens, in at least three."""
    n = len(tokens)
    found: dict[int, list[tuple[int, ...]]] = {}
    for end in range(1, n):
        length = 0
        while length < min(16, end) and tokens[end - 1 - length] == tokens[n - 1 - length]:
            length += 1
        found.setdefault(length, []).append(tuple(tokens[end : end + 8]))
    longest = max(found, default=0)
    return found[longest] if longest >= 3 else []


@pytest.mark.parametrize("seed", range(30))
def test_it_finds_what_a_scan_finds(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(5 if seed % 2 else 9) for _ in range(60)]
    lookup = ready(tokens, 60)
    asked = 0
    for _ in range(60):
        if lookup.support is None:
            assert len(naive(tokens)) == 0
        elif not asked:
            places = naive(tokens)
            if len(places) <= 8:
                guess = lookup.propose(8)
                assert any(guess[: len(p)] == p for p in places)
        asked = lookup.support or 0  # right guesses are followed, without looking elsewhere
        tokens.append(rng.randrange(5 if seed % 2 else 9))
        outcomes = lookup.review()
        asked = 0 if not outcomes or not outcomes[-1][1] else asked + 1


def test_the_same_is_said_however_the_tokens_came() -> None:
    rng = random.Random(3)
    text = [rng.randrange(4) for _ in range(400)]
    one, burst = list(text[:50]), list(text[:50])
    a, b = ready(one, 20), ready(burst, 20)
    for start in range(50, 400, 7):
        seen: list[Outcome] = []
        for token in text[start : start + 7]:
            one.append(token)
            seen += a.review()
        burst += text[start : start + 7]
        told = list(b.review())
        assert seen[: len(told)] == told, "behind a wrong guess a burst says nothing, single tokens find a new source"


# --- how sure is it?


def test_without_evidence_the_prior_speaks() -> None:
    assert Acceptance(LOOKUP_PRIORS, weight=4.0, keep=0.9).rates() == pytest.approx(LOOKUP_PRIORS)
    assert list(LOOKUP_PRIORS) == sorted(LOOKUP_PRIORS)
    assert len(DRAFT_PRIORS) == len(LOOKUP_PRIORS)


def test_it_learns_by_support() -> None:
    acceptance = Acceptance(LOOKUP_PRIORS, weight=4.0, keep=0.95)
    acceptance.learn([(3, True)] * 100 + [(1000, False)] * 100)
    rates = acceptance.rates()
    assert rates[1] > 0.85
    assert rates[-1] < 0.2
    assert rates[2:-1] == pytest.approx(LOOKUP_PRIORS[2:-1])


def test_one_learns_for_all_and_most_for_itself() -> None:
    shared = Acceptance(LOOKUP_PRIORS, weight=16.0, keep=0.995)
    mine, other = (Acceptance(shared, weight=6.0, keep=0.95) for _ in range(2))
    mine.learn([(12, False)] * 10)
    assert mine.rates()[5] < other.rates()[5] == pytest.approx(shared.rates()[5])
    assert shared.rates()[5] < LOOKUP_PRIORS[5]


def test_what_is_not_tried_is_forgotten() -> None:
    shared = Acceptance(DRAFT_PRIORS, weight=16.0, keep=0.995)
    mine = Acceptance(shared, weight=6.0, keep=0.95)
    mine.learn([(0, False)] * 50)
    low = mine.rates()[0]
    for _ in range(5000):
        mine.fade()
    assert low < 0.2 < 0.65 < mine.rates()[0]


@pytest.mark.parametrize("seed", range(5))
def test_a_chance_is_a_chance(seed: int) -> None:
    rng = random.Random(seed)
    acceptance = Acceptance(Acceptance(LOOKUP_PRIORS, weight=16.0, keep=0.995), weight=6.0, keep=0.95)
    for _ in range(300):
        acceptance.learn([(rng.randrange(100), rng.random() < 0.5) for _ in range(rng.randrange(5))])
        acceptance.fade()
        assert all(0.0 < rate < 1.0 for rate in acceptance.rates())


# --- does it pay?


def by_table(*rows: tuple[int, float]) -> Cost:
    """Seconds of a step with k guesses, between measured (rows, ms)."""

    def cost(k: int) -> float:
        n = k + 1
        for (a, x), (b, y) in pairwise(rows):
            if n <= b:
                return (x + (y - x) * (n - a) / (b - a)) / 1000
        raise AssertionError(f"{n} rows are more than were measured")

    return cost


# Two CPU cores, a model of 135M: rows of one sequence in a step.
SHALLOW = by_table((1, 7.0), (2, 11.0), (4, 17.0), (8, 31.0), (16, 47.0), (32, 110.0), (64, 180.0))
DEEP = by_table((1, 7.5), (2, 18.0), (4, 31.0), (8, 53.0), (16, 98.0), (32, 190.0), (64, 300.0))
FREE = by_table((1, 7.0), (64, 7.7))


class Oracle:
    """A proposer that is told what comes, and is right with a chance."""

    def __init__(self, tokens: Sequence[int], text: Sequence[int], right: float, token_s: float = 0.0) -> None:
        self._tokens, self._text = tokens, text
        self._right, self._token_s = right, token_s
        self._rng = random.Random(5)
        self._last: tuple[int, tuple[int, ...]] = (0, ())
        self.support: int | None = 0
        self.is_ready = True
        self.asked = 0

    def review(self) -> Sequence[Outcome]:
        at, guesses = self._last
        self._last = (0, ())
        outcomes: list[Outcome] = []
        for guess, token in zip(guesses, self._tokens[at:], strict=False):
            outcomes.append((0, guess == token))
            if guess != token:
                break
        return outcomes

    def ready(self, allowed: float) -> bool:
        return self.is_ready

    def cost(self, k: int) -> float:
        return k * self._token_s

    def propose(self, k: int) -> tuple[int, ...]:
        self.asked += 1
        at = len(self._tokens)
        guesses = tuple(t if self._rng.random() < self._right else t + 1 for t in self._text[at : at + k])
        self._last = (at, guesses)
        return guesses


class Run:
    """An answer in virtual time, with guesses; `gain`: how many times sooner it was there than without."""

    def __init__(
        self,
        prompt: list[int],
        answer: list[int],
        cost: Cost,
        speculation: Speculation | None = None,
        *,
        allowed: float = 10.0,
        draft_s: float = 0.0,
    ) -> None:
        self.speculation = speculation or Speculation()
        tokens = list(prompt)
        self.speculator = self.speculation.begin(tokens, len(prompt))
        self.bursts: list[tuple[int, int]] = []
        spent, at = 0.0, 0
        while at < len(answer):
            most = min(MAX_GUESSES, len(answer) - at - 1)
            guesses = self.speculator.guess(cost, allowed=allowed, most=most)
            assert len(guesses) <= most
            assert cost(len(guesses)) - cost(0) <= allowed
            right = 0
            while right < len(guesses) and guesses[right] == answer[at + right]:
                right += 1
            spent += cost(len(guesses)) + draft_s * len(guesses)
            tokens += answer[at : at + right + 1]
            at += right + 1
            self.bursts.append((len(guesses), right))
            self.speculator.observe(len(guesses), right)
        assert tokens == prompt + answer
        self.drafted = sum(proposed for proposed, _ in self.bursts)
        self.gain = len(answer) * cost(0) / spent


WORDS = range(2000)
FREQUENCIES = [1 / (i + 3) for i in WORDS]


def prose(rng: random.Random, n: int) -> list[int]:
    """Words by Zipf's law, some with a favourite successor: three in a row are often not new."""
    favourite: dict[int, int] = {}
    out = [0]
    while len(out) <= n:
        word = rng.choices(WORDS, FREQUENCIES)[0]
        out.append(favourite.setdefault(out[-1], word) if rng.random() < 0.45 else word)
    return out[1:]


def copied(rng: random.Random, source: list[int], n: int, span: tuple[int, int], gap: tuple[int, int]) -> list[int]:
    """Passages of a source with something new between them."""
    out: list[int] = []
    while len(out) < n:
        out += [rng.randrange(3000, 9000) for _ in range(rng.randint(*gap))]
        length = rng.randint(*span)
        at = rng.randrange(len(source) - length)
        out += source[at : at + length]
    return out[:n]


def gain(cost: Cost, answer: Callable[[random.Random, list[int]], list[int]], *, runs: int = 10) -> float:
    """Of some requests of the kind in turn."""
    speculation = Speculation()
    times = 0.0
    for seed in range(runs):
        rng = random.Random(seed)
        prompt = prose(rng, 500)
        times += 1 / Run(prompt, answer(rng, prompt), cost, speculation).gain
    return runs / times


def test_copying_is_half_as_fast_again() -> None:
    assert gain(SHALLOW, lambda rng, p: copied(rng, p, 300, (60, 160), (5, 15))) >= 1.5
    assert gain(SHALLOW, lambda rng, p: p[100:400]) >= 2.0


def test_copying_with_changes_gains_too() -> None:
    assert gain(SHALLOW, lambda rng, p: copied(rng, p, 300, (10, 30), (1, 3))) >= 1.2


@pytest.mark.parametrize("cost", [SHALLOW, DEEP, FREE])
def test_prose_loses_nothing(cost: Cost) -> None:
    assert gain(cost, lambda rng, _: prose(rng, 300)) >= 0.99
    assert gain(cost, lambda rng, _: [rng.randrange(9000) for _ in range(300)]) >= 0.999


def test_where_rows_cost_little_drafts_are_long() -> None:
    assert gain(FREE, lambda rng, p: copied(rng, p, 300, (60, 160), (5, 15))) >= 4.0


def test_where_rows_cost_much_nothing_is_lost() -> None:
    assert gain(DEEP, lambda rng, p: copied(rng, p, 300, (60, 160), (5, 15))) >= 0.98
    prompt = prose(random.Random(1), 500)
    assert Run(prompt, prompt[100:400], by_table((1, 7.0), (64, 448.0))).drafted == 0


@pytest.mark.parametrize("seed", range(6))
def test_who_lures_it_costs_little(seed: int) -> None:
    """Passages that break off just when the next draft would pay: what was earned may go, not more."""
    rng = random.Random(seed)
    prompt = prose(rng, 500)
    answer: list[int] = []
    while len(answer) < 400:
        at = rng.randrange(400)
        answer += [*prompt[at : at + rng.randint(9, 16)], *(rng.randrange(3000, 9000) for _ in range(3))]
    for cost in (SHALLOW, DEEP):
        run = Run(prompt, answer, cost)
        assert run.gain >= 1 / 1.03, "a hundredth, and the grant of four steps in 400"


def test_drafts_grow_as_they_prove_right_and_start_small_again() -> None:
    prompt = prose(random.Random(1), 500)
    sizes = [k for k, _ in Run(prompt, prompt[:450], SHALLOW).bursts if k]
    assert sizes[0] <= 7
    assert max(sizes) >= 15
    grown = sizes[: sizes.index(max(sizes)) + 1]
    assert grown == sorted(grown)


def test_no_draft_makes_a_step_longer_than_allowed() -> None:
    prompt = prose(random.Random(1), 500)
    for allowed in (0.0, 0.003, 0.012, 0.030):  # Run asserts it
        run = Run(prompt, prompt[:200], SHALLOW, allowed=allowed)
        assert run.gain >= 1.0
    assert Run(prompt, prompt[:200], SHALLOW, allowed=0.003).drafted == 0, "two rows take 4 ms more"


def copying(answered: int) -> tuple[Speculator, Speculation]:
    """A speculator in the middle of a copy."""
    speculation = Speculation()
    tokens = list(range(500, 800))
    speculator = speculation.begin(tokens, 300)
    for token in range(500, 500 + answered):
        assert speculator.guess(FREE, allowed=0.0, most=0) == ()
        tokens.append(token)
    return speculator, speculation


def test_there_are_never_more_guesses_than_room() -> None:
    for most in range(70):
        speculator, _ = copying(60)
        guesses = speculator.guess(FREE, allowed=1.0, most=most)
        assert guesses == tuple(range(560, 560 + min(most, MAX_GUESSES)))


def test_a_step_that_was_given_up_is_planned_again() -> None:
    speculator, speculation = copying(40)
    guesses = speculator.guess(FREE, allowed=1.0, most=20)
    assert guesses == speculator.guess(FREE, allowed=1.0, most=20)
    assert (speculation.steps, speculation.proposed, speculation.accepted) == (0, 0, 0)


def test_planning_again_does_not_earn() -> None:
    """The account grows with the tokens, not with the questions."""
    tokens = list(range(500, 1100))
    speculator = Speculation().begin(tokens, 600)
    steep = by_table((1, 7.0), (2, 56.0), (64, 57.0))  # 49 ms more, seven steps; the grant is four
    for token in range(500, 530):
        tokens.append(token)
        assert speculator.guess(steep, allowed=1.0, most=60) == ()
    for _ in range(1000):
        assert speculator.guess(steep, allowed=1.0, most=60) == ()
    more = 0
    for token in range(530, 1000):
        tokens.append(token)
        more += 1
        if speculator.guess(steep, allowed=1.0, most=60):
            break
    assert 260 < more < 280, "with the 30 before: three steps, a hundredth at a time"


def test_the_totals() -> None:
    speculator, speculation = copying(40)
    n = len(speculator.guess(FREE, allowed=1.0, most=20))
    speculator.observe(n, 5)
    speculator.observe(0, 0)
    assert (speculation.steps, speculation.proposed, speculation.accepted) == (1, n, 5)


def test_reports_without_a_guess_are_harmless() -> None:
    Speculation().begin([1, 2, 3], 2).observe(3, 1)


# --- a draft model as well


def drafted(right: float, *, token_s: float, cost: Cost = SHALLOW, n: int = 400) -> tuple[Run, Oracle]:
    rng = random.Random(9)
    prompt, answer = prose(rng, 100), [rng.randrange(9000) for _ in range(n)]
    oracles: list[Oracle] = []

    def draft(tokens: Sequence[int]) -> Oracle:
        oracles.append(Oracle(tokens, prompt + answer, right, token_s))
        return oracles[-1]

    run = Run(prompt, answer, cost, Speculation(draft), draft_s=token_s)
    return run, oracles[0]


def test_a_good_and_cheap_draft_model_pays() -> None:
    run, _ = drafted(0.97, token_s=0.0005)
    assert run.gain > 1.3


def test_a_bad_one_is_left_alone_soon() -> None:
    run, oracle = drafted(0.1, token_s=0.0005)
    assert run.gain > 0.97
    assert oracle.asked < 10


def test_a_dear_one_is_not_asked() -> None:
    run, oracle = drafted(1.0, token_s=0.006)
    assert run.drafted == 0
    assert oracle.asked == 0


def test_a_bad_one_is_tried_again_some_day() -> None:
    run, oracle = drafted(0.1, token_s=0.0, n=6000)
    early = sum(1 for proposed, _ in run.bursts[:1000] if proposed)
    assert early < oracle.asked < 60
    assert run.gain > 0.98


def test_one_that_is_not_ready_is_waited_for() -> None:
    oracles: list[Oracle] = []
    text = list(range(100, 200))

    def draft(tokens: Sequence[int]) -> Oracle:
        oracles.append(Oracle(tokens, text, 1.0))
        return oracles[-1]

    speculator = Speculation(draft).begin(text[:10], 10)
    oracles[0].is_ready = False
    assert speculator.guess(FREE, allowed=1.0, most=8) == ()
    oracles[0].is_ready = True
    assert len(speculator.guess(FREE, allowed=1.0, most=8)) > 0
    oracles[0].support = None
    assert speculator.guess(FREE, allowed=1.0, most=8) == ()


def test_the_better_of_two_is_taken() -> None:
    oracles: list[Oracle] = []

    def draft(tokens: Sequence[int]) -> Oracle:
        oracles.append(Oracle(tokens, [7] * 500, 1.0))
        return oracles[-1]

    tokens = [*range(500, 600), *range(500, 560)]
    speculator = Speculation(draft).begin(tokens, 100)
    assert speculator.guess(FREE, allowed=1.0, most=20)[:3] == (560, 561, 562)
    assert oracles[0].asked == 0
