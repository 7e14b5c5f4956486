from __future__ import annotations

import math
import random

import pytest

from headrace.gateway.gate import Figures, Quantiles, Seen, agreement, judge


def figures(*seen: Seen) -> Figures:
    one = Figures()
    for each in seen:
        one.add(each)
    return one


def many(ttft: float, gap: float = 0.02, n: int = 10) -> Figures:
    return figures(*[Seen(True, ttft, (gap, gap))] * n)


def test_percentiles_are_within_a_percent() -> None:
    draw = random.Random(3)
    values = [draw.lognormvariate(-3.0, 1.5) for _ in range(5000)]
    quantiles = Quantiles()
    quantiles.add(values)
    values.sort()
    for share in (0.01, 0.5, 0.95, 0.99, 1.0):
        got = quantiles.at(share)
        assert got is not None
        assert got == pytest.approx(values[math.ceil(share * len(values)) - 1], rel=0.011)
    assert quantiles.count == 5000


def test_nothing_has_no_percentile() -> None:
    assert Quantiles().at(0.5) is None


def test_a_time_of_zero_is_a_time() -> None:
    quantiles = Quantiles()
    quantiles.add([0.0])
    assert quantiles.at(0.5) == pytest.approx(1e-6, rel=0.02)


@pytest.mark.parametrize(
    ("ttft", "gap", "decision"),
    [
        (0.100, 0.020, "promote"),
        (0.050, 0.010, "promote"),
        (0.108, 0.020, "promote"),
        (0.115, 0.020, "reject"),
        (0.100, 0.0225, "reject"),
    ],
)
def test_a_full_window_is_judged_by_both_tails(ttft: float, gap: float, decision: str) -> None:
    verdict = judge(many(0.1), many(ttft, gap), requests=10, tolerance=0.1)
    assert verdict.decision == decision
    assert "TTFT p95" in verdict.why
    assert "ITL p99" in verdict.why


def test_a_window_that_is_not_full_waits() -> None:
    verdict = judge(many(0.1, n=9), many(0.1, n=9), requests=10, tolerance=0.1)
    assert (verdict.decision, verdict.why) == ("waiting", "9 of 10 mirrored requests are done")


def test_one_error_is_enough() -> None:
    candidate = many(0.1, n=3)
    candidate.add(Seen(False, None))
    verdict = judge(many(0.1, n=4), candidate, requests=10, tolerance=0.1)
    assert (verdict.decision, verdict.why) == ("reject", "1 of 4 mirrored requests failed")


def test_without_streams_there_is_nothing_to_compare() -> None:
    whole = figures(*[Seen(True, None)] * 10)
    assert judge(whole, whole, requests=10, tolerance=0.1).decision == "reject"


def test_answers_of_one_piece_have_no_gaps_to_ask_for() -> None:
    short = figures(*[Seen(True, 0.1)] * 10)
    assert judge(short, short, requests=10, tolerance=0.1).decision == "promote"
    assert judge(many(0.1), short, requests=10, tolerance=0.1).decision == "reject", "the live side has some"


@pytest.mark.parametrize(
    ("live", "candidate", "share"),
    [
        ("", "", 1.0),
        ("abcd", "abcd", 1.0),
        ("abcd", "abXX", 0.5),
        ("abcd", "ab", 0.5),
        ("ab", "abcd", 0.5),
        ("x", "y", 0.0),
    ],
)
def test_agreement_is_the_common_beginning(live: str, candidate: str, share: float) -> None:
    assert agreement(live, candidate) == share
