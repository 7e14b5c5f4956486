from __future__ import annotations

import math
import random

import pytest

from headrace.kv.mining import HALF_LIFE_S, KEEP_USES, MAX_DEPTH, MIN_TOKENS, MIN_USES, Miner, Prefix
from naive import shared


class NaiveMiner:
    """Remembers every prompt."""

    def __init__(self) -> None:
        self.prompts: list[tuple[list[int], float]] = []

    def uses(self, prefix: tuple[int, ...], now: float) -> float:
        uses: float = sum(
            0.5 ** ((now - seen) / HALF_LIFE_S)
            for prompt, seen in self.prompts
            if tuple(prompt[: len(prefix)]) == prefix
        )
        return uses


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(length)]


def seen(miner: Miner, prefix: list[int], times: int, now: float = 0.0, *, tail: int = 40) -> None:
    """`times` prompts that have nothing but `prefix` in common."""
    for i in range(times):
        miner.observe(prefix + text(hash((tuple(prefix), now, i)), tail), now)


def chosen(found: tuple[Prefix, ...]) -> list[list[int]]:
    return [list(prefix.tokens) for prefix in found]


def test_nothing_is_chosen_from_nothing() -> None:
    miner = Miner()
    assert miner.choose(10, 0.0) == ()
    miner.observe([], 0.0)
    assert (miner.nodes, miner.tokens) == (0, 0)


def test_a_beginning_that_comes_again_is_chosen_without_what_follows() -> None:
    miner, hot = Miner(), text(1, 500)
    seen(miner, hot, 5)
    (prefix,) = miner.choose(10, 0.0)
    assert list(prefix.tokens) == hot
    assert prefix.uses == pytest.approx(5)
    assert prefix.saved == pytest.approx(2500)


@pytest.mark.parametrize(
    ("times", "length", "found"), [(2, 500, 0), (3, 500, 1), (9, MIN_TOKENS - 1, 0), (9, MIN_TOKENS, 1)]
)
def test_it_must_be_long_enough_and_seen_often_enough(times: int, length: int, found: int) -> None:
    miner = Miner()
    seen(miner, text(1, length), times)
    assert len(miner.choose(10, 0.0)) == found


def test_salted_prompts_teach_nothing() -> None:
    miner = Miner()
    for i in range(9):
        miner.observe([*text(1, 300), i], 0.0, salt="tenant")
    assert (miner.nodes, miner.choose(10, 0.0)) == (0, ())


def test_uses_fade() -> None:
    miner, hot = Miner(), text(1, 200)
    seen(miner, hot, 8)
    assert miner.uses(hot, HALF_LIFE_S) == pytest.approx(4)
    assert miner.uses(hot[:50], 3 * HALF_LIFE_S) == pytest.approx(1)
    assert miner.uses([*hot[:50], 7], 0.0) == 0.0
    assert miner.uses(text(2, 5), 0.0) == 0.0


def test_counts_survive_any_length_of_time() -> None:
    miner, hot = Miner(half_life_s=1.0), text(1, 200)
    for second in range(5000):
        miner.observe([*hot, second], float(second))
    assert miner.uses(hot, 4999.0) == pytest.approx(2.0)
    miner.observe(hot, 1e9)
    assert miner.uses(hot, 1e9) == pytest.approx(1.0)


def test_the_longer_of_two_nested_is_chosen_if_it_is_used_as_much() -> None:
    miner, stem = Miner(), text(1, 300)
    longer = stem + text(2, 300)
    seen(miner, stem, 4)
    seen(miner, longer, 10)
    assert chosen(miner.choose(10, 0.0)) == [longer], "it holds the shorter one too"


def test_branches_of_a_common_beginning_are_each_worth_their_own_part() -> None:
    miner, stem = Miner(), text(1, 300)
    left, right, short = stem + text(2, 100), stem + text(3, 200), stem + text(4, MIN_TOKENS - 1)
    for prefix in (left, right, short):
        seen(miner, prefix, 6)
    assert sorted(chosen(miner.choose(10, 0.0))) == sorted([left, right])


def test_a_few_common_words_after_a_hot_beginning_do_not_count() -> None:
    miner, stem = Miner(), text(1, 300)
    seen(miner, stem, 50)
    seen(miner, stem + text(2, 10), 4)
    assert chosen(miner.choose(10, 0.0)) == [stem]


def test_the_budget_goes_to_what_saves_most_for_its_kv() -> None:
    miner = Miner()
    small, middle, large = text(1, 70), text(2, 400), text(3, 2000)
    for prefix, times in ((small, 20), (middle, 12), (large, 11)):
        seen(miner, prefix, times)
    assert chosen(miner.choose(2, 0.0)) == [large, middle]
    assert chosen(miner.choose(0, 0.0)) == []


def test_cells_are_kept_to_and_shared_ones_count_once() -> None:
    miner, stem = Miner(), text(1, 300)
    left, right = stem + text(2, 100), stem + text(3, 100)
    seen(miner, left, 9)
    seen(miner, right, 5)
    assert sorted(chosen(miner.choose(10, 0.0, 500))) == sorted([left, right])
    assert chosen(miner.choose(10, 0.0, 499)) == [left]
    assert chosen(miner.choose(10, 0.0, 399)) == [stem]
    assert chosen(miner.choose(10, 0.0, 299)) == []


def test_what_is_pinned_stays_until_it_has_cooled() -> None:
    miner, hot = Miner(), text(1, 200)
    seen(miner, hot, 4)
    assert chosen(miner.choose(1, 0.0)) == [hot]
    just = HALF_LIFE_S * math.log2(4 / KEEP_USES)
    assert chosen(miner.choose(1, just - 1)) == [hot], "fewer uses than a new one would need"
    assert 4 * 0.5 ** ((just - 1) / HALF_LIFE_S) < MIN_USES
    assert chosen(miner.choose(1, just + 1)) == []


def test_two_of_nearly_the_same_worth_do_not_take_turns() -> None:
    miner, one, other = Miner(), text(1, 200), text(2, 200)
    seen(miner, one, 10)
    seen(miner, other, 9)
    assert chosen(miner.choose(1, 0.0)) == [one]
    changes = 0
    now = one
    for second in range(1, 60):
        seen(miner, other if second % 4 < 2 else one, 1, float(second))
        (found,) = chosen(miner.choose(1, float(second)))
        changes += found != now
        now = found
    assert changes == 0
    seen(miner, other, 40, 60.0)
    assert chosen(miner.choose(1, 60.0)) == [other]


def test_memory_is_bounded_and_a_flood_of_strangers_does_not_wash_the_common_away() -> None:
    miner, hot = Miner(max_nodes=200, max_tokens=20_000), text(1, 500)
    for i in range(3000):
        miner.observe(text(10_000 + i, 100), i * 0.01)
        if i % 150 == 0:
            miner.observe(hot + text(50_000 + i, 30), i * 0.01)
        assert miner.nodes <= 200
        assert miner.tokens <= 20_000
    assert chosen(miner.choose(5, 30.0)) == [hot]


def test_a_new_favourite_is_learned_with_a_memory_that_is_full_of_old_ones() -> None:
    miner = Miner(max_nodes=400, max_tokens=30_000)
    for i in range(200):
        seen(miner, text(i, 200), 2, float(i))
    hot = text(999, 300)
    seen(miner, hot, 5, 300.0)
    assert chosen(miner.choose(1, 300.0)) == [hot]
    assert miner.tokens <= 30_000


def test_a_prompt_larger_than_the_memory_is_not_kept() -> None:
    miner = Miner(max_tokens=1000)
    miner.observe(text(1, 2000), 0.0)
    assert miner.tokens == 0
    miner = Miner()
    miner.observe(text(1, MAX_DEPTH + 5), 0.0)
    assert miner.tokens == MAX_DEPTH


def test_it_equals_a_list_of_all_prompts_whatever_comes() -> None:
    for seed in range(25):
        rng = random.Random(seed)
        miner, naive = Miner(), NaiveMiner()
        stems = [text(rng.randrange(10**6), rng.randrange(10, 250)) for _ in range(3)]
        stems += [stem[: rng.randrange(1, len(stem))] + text(rng.randrange(10**6), 90) for stem in stems]
        now, pinned = 0.0, set[tuple[int, ...]]()
        for _ in range(40):
            now += rng.random() * 60
            stem = rng.choice(stems)
            prompt = stem[: rng.choice([len(stem), rng.randrange(1, len(stem) + 1)])] + text(
                rng.randrange(10**6), rng.randrange(30)
            )
            miner.observe(prompt, now)
            naive.prompts.append((prompt, now))
            probe = tuple(prompt[: rng.randrange(1, len(prompt) + 1)])
            assert miner.uses(probe, now) == pytest.approx(naive.uses(probe, now))
            if rng.random() < 0.3:
                budget, cells = rng.randrange(6), rng.choice([None, 100, 400])
                found = miner.choose(budget, now, cells)
                check(found, naive, now, budget, cells, pinned)
                pinned = {prefix.tokens for prefix in found}
        assert repr(miner).startswith(f"<Miner [{miner.nodes} nodes, {miner.tokens} tokens, ")


def check(
    found: tuple[Prefix, ...],
    naive: NaiveMiner,
    now: float,
    budget: int,
    cells: int | None,
    pinned: set[tuple[int, ...]],
) -> None:
    """All that holds of every choice."""
    assert len(found) <= budget
    trie: set[tuple[int, ...]] = set()
    for prefix in found:
        assert len(prefix.tokens) >= MIN_TOKENS
        assert prefix.uses == pytest.approx(naive.uses(prefix.tokens, now))
        was = max((shared(prefix.tokens, old) for old in pinned), default=0) >= len(prefix.tokens)
        assert prefix.uses >= (KEEP_USES if was else MIN_USES) - 1e-9
        saved = sum(naive.uses(prefix.tokens[:i], now) for i in range(1, len(prefix.tokens) + 1))
        assert prefix.saved == pytest.approx(saved)
        others = [shared(prefix.tokens, other.tokens) for other in found if other is not prefix]
        assert len(prefix.tokens) - max(others, default=0) >= MIN_TOKENS, "each adds something of its own"
        trie.update(prefix.tokens[:i] for i in range(1, len(prefix.tokens) + 1))
    assert cells is None or len(trie) <= cells
