from __future__ import annotations

import numpy as np
import pytest

from headrace_bench.load import lengths
from headrace_bench.load.lengths import AZURE_CODE, AZURE_CONV, QUANTILES, SHAREGPT, Sizes, Table


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("table", [AZURE_CONV, AZURE_CODE, SHAREGPT])
def test_tables_are_distributions_in_their_buckets(table: Table) -> None:
    assert sum(bucket.share for bucket in table) == pytest.approx(1.0)
    bounds = ((1, 63), (64, 256), (257, 1024), (1025, 10**6))
    for bucket, (low, high) in zip(table, bounds, strict=True):
        for values in (bucket.prompt, bucket.answer):
            assert len(values) == len(QUANTILES)
            assert list(values) == sorted(values)
        assert bucket.prompt[0] >= low
        assert bucket.prompt[-1] <= high


@pytest.mark.parametrize(
    ("table", "prompt", "answer"),
    [  # p50 and p90 of the recordings themselves
        (AZURE_CONV, (1032, 1990), (238, 436)),
        (AZURE_CODE, (1338, 4892), (13, 55)),
        (SHAREGPT, (1762, 5864), (408, 840)),
    ],
)
def test_draws_are_distributed_as_what_was_recorded(
    table: Table, prompt: tuple[int, int], answer: tuple[int, int]
) -> None:
    # between two quantiles the table has a straight line
    prompts, answers = lengths.mixed(rng(), (table,), 20_000)
    assert np.percentile(prompts, [50, 90]).tolist() == pytest.approx(prompt, rel=0.08)
    assert np.percentile(answers, [50, 90]).tolist() == pytest.approx(answer, rel=0.1)
    shares = np.histogram(prompts, bins=[0, 64, 257, 1025, 10**6])[0] / 20_000
    assert shares.tolist() == pytest.approx([bucket.share for bucket in table], abs=0.012)


def test_a_pair_comes_from_one_bucket() -> None:
    """Azure's shortest prompts have answers of at least 93 tokens: drawn apart, some would have fewer."""
    prompts, answers = lengths.mixed(rng(), (AZURE_CONV,), 20_000)
    assert answers[prompts < 64].min() >= 93
    assert answers.min() < 20


def test_reasoning_is_as_long_as_it_is() -> None:
    prompts, answers = lengths.reasoning(rng(), 20_000)
    assert np.percentile(prompts, [50, 90]).tolist() == pytest.approx([208, 2092], rel=0.08)
    assert np.percentile(answers, [50, 90]).tolist() == pytest.approx([792, 3432], rel=0.08)


def test_pairs_of_a_file_stay_pairs() -> None:
    prompts, answers = lengths.resampled(rng(), [(1, 10), (2, 20), (3, 30)], 500)
    assert set(zip(prompts.tolist(), answers.tolist(), strict=True)) == {(1, 10), (2, 20), (3, 30)}


def test_only_some_buckets() -> None:
    prompts, _ = lengths.mixed(rng(), (lengths.only(SHAREGPT, 0, 3),), 2_000)
    assert not ((prompts > 63) & (prompts < 1025)).any()
    assert (prompts < 64).any()


def test_sizes_divide_then_cut_and_say_so() -> None:
    sizes = Sizes(8.0, 100, 50)
    prompts, answers = sizes.fit(np.array([8, 80, 8000]), np.array([3, 80, 8000]))
    assert prompts.tolist() == [4, 10, 100]
    assert answers.tolist() == [2, 10, 50]
    assert sizes.note("chat") == "chat: lengths divided by 8, prompts cut at 100 tokens, answers at 50"
    assert "not scaled" in Sizes(1.0).note_answers("x")


def test_the_same_seed_draws_the_same() -> None:
    one, other = (lengths.mixed(rng(5), (SHAREGPT, AZURE_CONV), 100) for _ in range(2))
    assert np.array_equal(one, other)
