from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from headrace_bench.duel import Side, duel
from headrace_bench.figures.claim import conclude
from headrace_bench.figures.slo import Slo
from headrace_bench.figures.trial import FIGURES, Both, Place, Trial
from made_runs import A, B, Servers, schedule

FEW = tuple(figure for figure in FIGURES if figure.name in ("ttft_p50", "ttft_p90", "attainment"))
CHAT = Slo("x", ttft=0.3)


def pairs(
    n: int, b: float = 1.0, noise: float = 0.02, seed: int = 0, attained: tuple[float, float] = (1.0, 1.0)
) -> list[Both]:
    """Runs with a TTFT of 100 ms on side A and `b` times that on side B."""
    rng = np.random.default_rng(seed)

    def trial(which: str, level: float, share: float) -> Trial:
        level *= float(np.exp(rng.normal(0, noise)))
        figures: dict[str, float | None] = {figure.name: level for figure in FIGURES}
        figures["attainment"] = share + float(rng.normal(0, 0.001))
        times = tuple(level * x for x in rng.lognormal(0, 0.3, 60))
        return Trial(which, Place("pair", 0, 0, "a"), 1, 60, {"ok": 60}, (), figures, times, times)

    return [(trial("old", 0.1, attained[0]), trial("new", 0.1 * b, attained[1])) for _ in range(n)]


def claimed(real: Sequence[Both], flat: Sequence[Both]) -> tuple[bool, str]:
    claim = conclude("old", "new", real, flat, FEW, "ttft_p50", 1)
    return claim.claimed, claim.sentence


def test_a_gain_is_claimed_with_its_interval_and_its_floor() -> None:
    yes, sentence = claimed(pairs(12, 0.8), pairs(6, seed=1))
    assert yes
    assert sentence.startswith("ttft_p50 of new against old: ")
    assert sentence.endswith(": better")
    assert "% less [" in sentence
    assert "12 pairs" in sentence
    assert "A/A floor ±" in sentence


def test_a_loss_is_said_as_plainly() -> None:
    yes, sentence = claimed(pairs(12, 1.3), pairs(6, seed=1))
    assert yes
    assert sentence.endswith(": worse")


def test_no_difference_is_not_one() -> None:
    assert claimed(pairs(12), pairs(6, seed=1))[0] is False


def test_below_the_floor_nothing_is_claimed() -> None:
    yes, sentence = claimed(pairs(12, 0.9), pairs(6, noise=0.3, seed=1))
    assert not yes
    assert sentence.endswith("no difference")


def test_without_a_floor_nothing_is_claimed() -> None:
    yes, sentence = claimed(pairs(12, 0.8), [])
    assert not yes
    assert sentence.endswith("not claimed: there is no A/A floor to hold it against")


def test_a_gain_that_costs_attainment_is_not_claimed_and_a_loss_is() -> None:
    yes, sentence = claimed(pairs(12, 0.8, attained=(1.0, 0.9)), pairs(6, seed=1))
    assert not yes
    assert sentence.endswith("not claimed: attainment is worse")
    assert claimed(pairs(12, 1.3, attained=(1.0, 0.9)), pairs(6, seed=1))[0]


def test_too_few_pairs_say_so() -> None:
    yes, sentence = claimed(pairs(5, 0.5), pairs(6, seed=1))
    assert not yes
    assert sentence == "ttft_p50 of new against old: 5 pairs: too few"
    assert claimed([], [])[0] is False


def test_others_than_the_primary_pay_for_their_number() -> None:
    real, flat = pairs(7, 0.97, noise=0.02), pairs(6, noise=0.001, seed=1)
    claim = conclude("old", "new", real, flat, FEW, "ttft_p50", 1)
    by_name = {row.figure.name: row for row in claim.rows}
    assert by_name["ttft_p50"].found.p is not None
    assert by_name["ttft_p90"].found.p is not None
    assert by_name["ttft_p90"].found.p > by_name["ttft_p50"].found.p


def test_a_p99_over_runs_is_that_of_all_requests_together() -> None:
    real = pairs(8, 0.5)
    (ttft, gap) = conclude("old", "new", real, [], FEW, "ttft_p50", 1).merged
    everything = sorted(x for one, _ in real for x in one.ttfts)
    assert ttft.a == everything[-(-99 * len(everything) // 100) - 1]
    assert ttft.ratio is not None
    assert ttft.low is not None
    assert ttft.high is not None
    assert ttft.low <= ttft.ratio <= ttft.high < 1
    assert gap.figure == "gap_p99"


def test_a_p99_of_too_few_is_blank() -> None:
    (ttft, _) = conclude("old", "new", pairs(6), [], FEW, "ttft_p50", 1).merged
    assert (ttft.a, ttft.b, ttft.ratio, ttft.low, ttft.high) == (None,) * 5


@pytest.mark.parametrize(("fast", "verdict"), [(0.1, True), (0.2, False)])
def test_from_runs_to_a_claim(fast: float, verdict: bool) -> None:
    them = Servers({A.url: 0.2, B.url: fast})
    made = duel(
        Side("old", A), Side("new", B), schedule, pairs=12, seed=5, slo=CHAT, run=them.run, check=lambda target: None
    )
    claim = conclude("old", "new", made.pairs, made.floor, made.figures, "ttft_p50", 5)
    assert claim.claimed is verdict
