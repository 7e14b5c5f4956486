from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from headrace_bench.figures.paired import Comparison, Pair, compare, floor, holm, sign_flip_p


def shifted(n: int, effect: float, noise: float, seed: int) -> list[Pair]:
    rng = np.random.default_rng(seed)
    runs = rng.normal(0, noise, size=(n, 2))
    return [Pair(100 * math.exp(a), 100 * effect * math.exp(b)) for a, b in runs]


def test_the_sign_flip_test_is_that_of_all_signs() -> None:
    effects = np.array([0.3, -0.1, 0.7, 0.7, 0.0, 0.2, 0.5, -0.4])
    sizes = np.abs(effects)
    ranks = np.array([(sizes < s).sum() + ((sizes == s).sum() + 1) / 2 for s in sizes])
    moving = effects != 0
    seen = abs((np.sign(effects) * ranks).sum())
    sums = [abs(np.dot(signs, ranks[moving])) for signs in product((-1, 1), repeat=int(moving.sum()))]
    assert sign_flip_p(effects) == pytest.approx(np.mean([total >= seen - 1e-9 for total in sums]))
    assert sign_flip_p([0.1] * 6) == 2 / 64
    assert sign_flip_p([0.0] * 6) == 1.0


def test_twenty_percent_is_found_with_twelve_pairs() -> None:
    found = [compare(shifted(12, 1.2, 0.07, seed), floor=0.05, seed=seed, resamples=1000) for seed in range(40)]
    assert sum(one.verdict == "worse" for one in found) >= 38
    assert sum(one.low is not None and one.high is not None and one.low <= 1.2 <= one.high for one in found) >= 37


def test_the_direction_is_the_figure_s() -> None:
    pairs = shifted(10, 1.3, 0.02, 1)
    assert compare(pairs).verdict == "worse"
    assert compare(pairs, more_is_better=True).verdict == "better"
    swapped = [Pair(pair.b, pair.a) for pair in pairs]
    assert compare(swapped).verdict == "better"
    one, other = compare(pairs), compare(swapped)
    assert one.ratio is not None
    assert other.ratio is not None
    assert one.ratio * other.ratio == pytest.approx(1)


def test_what_is_within_the_floor_is_no_difference() -> None:
    pairs = shifted(12, 1.03, 0.002, 3)
    assert compare(pairs, floor=0.01).verdict == "worse"
    assert compare(pairs, floor=0.05).verdict == "no difference"
    # And downwards: 1/1.03 is as far.
    assert compare([Pair(pair.b, pair.a) for pair in pairs], floor=0.029).verdict == "better"


def test_below_six_pairs_nothing_is_claimed() -> None:
    found = compare([*shifted(5, 2.0, 0.01, 1), Pair(None, 3.0), Pair(0.0, 1.0)])
    assert found == Comparison(None, None, None, None, "too few", pairs=5, dropped=2, floor=None)
    assert compare([]).verdict == "too few"
    assert compare(shifted(6, 2.0, 0.01, 1)).verdict == "worse"


def test_equal_runs() -> None:
    found = compare([Pair(1.0, 1.0)] * 8 + [Pair(0.0, 0.0)] * 2, floor=0.0)
    assert (found.ratio, found.low, found.high, found.p, found.verdict) == (1.0, 1.0, 1.0, 1.0, "no difference")
    assert floor([Pair(0.5, 0.5)] * 8) == 0.0


def test_figures_that_can_be_0_are_compared_by_difference() -> None:
    pairs = [Pair(0.0, 3.0 + i / 10) for i in range(8)]
    assert compare(pairs).verdict == "too few"
    found = compare(pairs, floor=1.0, scale="difference")
    assert found.verdict == "worse"
    assert found.ratio == pytest.approx(3.35)
    assert compare(pairs, floor=4.0, scale="difference").verdict == "no difference"


def test_one_seed_one_result() -> None:
    pairs = shifted(10, 1.05, 0.05, 2)
    assert compare(pairs, seed=3) == compare(pairs, seed=3)
    assert floor(pairs, seed=3) == floor(pairs, seed=3)


def test_one_wild_pair_does_not_decide() -> None:
    pairs = [*shifted(13, 1.2, 0.03, 4), Pair(100, 5)]
    found = compare(pairs)
    assert found.verdict == "worse"
    assert found.ratio == pytest.approx(1.2, rel=0.05)


def test_the_floor_is_how_far_the_same_figure_strays() -> None:
    quiet, noisy = (floor(shifted(12, 1.0, noise, 7)) for noise in (0.01, 0.1))
    assert quiet is not None
    assert noisy is not None
    # The middle of 12 differences of spread 0.01·√2 strays 1.96 · 0.0141 / √12 = 0.8 %.
    assert 0.004 < quiet < 0.012
    assert 0.04 < noisy < 0.13
    assert floor(shifted(5, 1.0, 0.1, 7)) is None
    more = floor(shifted(12, 1.0, 0.1, 7), count=48)
    assert more is not None
    assert more < noisy


def test_side_figures_pay_for_their_number() -> None:
    def found(p: float) -> Comparison:
        return Comparison(1.2, 1.1, 1.3, p, "worse", pairs=12, dropped=0, floor=0.02)

    four = {"ttft": found(0.015), "gap": found(0.001), "e2e": found(0.006), "tpot": found(0.008)}
    adjusted = holm(four, primary="ttft")
    # 3 · 0.001, then 2 · 0.006, then 0.008, which may not be below the one before it.
    assert {name: one.p for name, one in adjusted.items()} == pytest.approx(
        {"ttft": 0.015, "gap": 0.003, "e2e": 0.012, "tpot": 0.012}
    )
    assert {one.verdict for one in adjusted.values()} == {"worse"}
    adjusted = holm({"ttft": found(0.015), "gap": found(0.015), "e2e": found(0.015)}, primary="ttft")
    assert [one.verdict for one in adjusted.values()] == ["worse", "no difference", "no difference"]
    assert holm({"ttft": found(0.01), "rate": found(0.01)}, "ttft", {"rate": True})["rate"].verdict == "better"
    few = compare([])
    assert holm({"ttft": found(0.01), "gap": few}, "ttft")["gap"] == few
    with pytest.raises(ValueError, match="'p99' is not among ttft"):
        holm({"ttft": found(0.01)}, "p99")


def test_words() -> None:
    found = Comparison(1.07, 1.031, 1.112, 0.002, "worse", pairs=12, dropped=0, floor=0.02)
    assert found.text() == "7.0 % more [+3.1 %, +11.2 %], 12 pairs, p 0.002, A/A floor ±2.0 %: worse"
    difference = Comparison(-3.5, -5.0, -2.0, 0.01, "better", pairs=9, dropped=0, floor=None, scale="difference")
    assert difference.text() == "-3.5 [-5, -2], 9 pairs, p 0.01: better"
    assert compare([]).text() == "0 pairs: too few"


RECORDED = json.loads((Path(__file__).parents[1] / "data" / "recorded_ttft.json").read_text())


def run_median(requests: list[float], size: int, rng: np.random.Generator) -> float:
    """The median TTFT of a run as it could have been: neighbours stay neighbours, so a wave of slow ones does too."""
    start = int(rng.integers(len(requests)))
    return float(np.median([requests[(start + i) % len(requests)] for i in range(size)]))


def recorded_pairs(scenario: str, size: int, n: int, rng: np.random.Generator) -> list[Pair]:
    chosen = [RECORDED[scenario][int(rng.integers(len(RECORDED[scenario])))] for _ in range(n)]
    return [Pair(run_median(requests, size, rng), run_median(requests, size, rng)) for requests in chosen]


@pytest.mark.parametrize(("scenario", "size"), [("alone", 4), ("crowd", 16)])
@pytest.mark.parametrize("with_floor", [True, False], ids=["floor", "no floor"])
def test_a_server_does_not_differ_from_itself(scenario: str, size: int, with_floor: bool) -> None:
    """100 comparisons of recorded runs with others of the same server: at least 95 find no difference."""
    verdicts = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        noise = floor(recorded_pairs(scenario, size, 10, rng), seed, resamples=1000) if with_floor else None
        found = compare(recorded_pairs(scenario, size, 10, rng), noise, seed=seed, resamples=1000)
        verdicts.append(found.verdict)
    assert verdicts.count("no difference") >= 95


def test_a_fifth_more_is_seen_in_recorded_runs() -> None:
    seen = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        noise = floor(recorded_pairs("alone", 4, 10, rng), seed, resamples=1000)
        slower = [Pair(p.a, p.b * 1.2) for p in recorded_pairs("alone", 4, 12, rng) if p.b is not None]
        seen += compare(slower, noise, seed=seed, resamples=1000).verdict == "worse"
    assert seen >= 38
