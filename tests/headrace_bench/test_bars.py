from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.assembly import PROFILES
from headrace_bench.bars import (
    FIGURES,
    ITL_HARD_MS,
    JUDGED,
    SCENARIOS,
    STALL_MS,
    best,
    cells,
    judge,
    judged,
    middle,
    number,
    ratio,
    table,
)

BY_NAME = {(figure.scenario, figure.name): figure for figure in FIGURES}
SINGLE = BY_NAME["single", "TTFT p50, ms"]
RATE = BY_NAME["full", "chunks per second"]
LEAVE = BY_NAME["leave", "TTFT after hang-up ÷ alone"]


def result(x: float) -> dict[str, Any]:
    """All that the load client prints, each figure `x`."""
    return {
        "single": {"ttft": {"p50": x}},
        "shared": {"cold": {"p95": x}, "warm": {"p95": x}, "warm_alone": {"p50": x}},
        "mixed": {"reader_gap": {"max": x}, "long_ttft": x},
        "long_alone": {"long_ttft": 10.0},
        "behind": {"short_ttft": {"p95": x}},
        "full": {"chunks_per_s": x, "ttft": {"p95": x}, "gap": {"p99": x, "max": x}, "failed": 0},
        "leave": {"ttft_alone": 10.0, "ttft_after_hang_up": x},
    }


def test_the_bars() -> None:
    assert [(f.scenario, f.path[-1], f.sign, f.bar, f.alone) for f in FIGURES] == [
        ("mixed", "max", "<=", pytest.approx(149.5), True),
        ("mixed", "max", "<=", 0.5, False),
        ("mixed", "long_ttft", "<=", 1.6, False),
        ("mixed", "long_ttft", "<=", 2.2, True),
        ("behind", "p95", "<=", 0.12, False),
        ("shared", "p95", "<=", 0.3, False),
        ("shared", "p95", "<=", 0.75, False),
        ("shared", "p50", "<=", 0.6, False),
        ("shared", "p50", "<=", 2.2, True),
        ("single", "p50", "<=", 1.0, False),
        ("full", "chunks_per_s", ">=", 1.05, False),
        ("full", "p95", "<=", 0.7, False),
        ("full", "p99", "<=", 580.0, True),
        ("full", "max", "<=", pytest.approx(667.0), True),
        ("leave", "ttft_after_hang_up", "<=", 1.2, True),
    ]
    assert set().union(*(f.scenarios for f in FIGURES)) == set(SCENARIOS)


def test_absolute_bars_are_those_of_the_profile() -> None:
    _, _, hard, stall = PROFILES["chat"]
    assert (hard * 1e3, stall * 1e3) == (ITL_HARD_MS, STALL_MS)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f"{f.scenario} {f.name}")
def test_every_figure_is_where_the_client_puts_it(figure: Any) -> None:
    divisor = {"single": 5.0}.get(figure.over[0], 10.0) if figure.over else 1.0
    assert figure.value(result(5.0)) == 5.0 / divisor
    assert figure.value({figure.scenario: {"failed": "Failed: no text"}}) is None
    assert figure.value({"failed": "the server did not start"}) is None


def test_a_figure_over_two_scenarios_needs_both() -> None:
    ours = {"mixed": {"reader_gap": {"max": 1.0}, "long_ttft": 20.0}, "long_alone": {"long_ttft": 10.0}}
    assert ratio({"ours": ours}, BY_NAME["mixed", "long prompt's TTFT ÷ alone"], "ours") == 2.0
    _, lines = cells([{"ours": ours}], "ours", ["mixed"])
    assert "long prompt's TTFT ÷ alone" not in [line[1] for line in lines]


def test_a_figure_that_is_judged_itself() -> None:
    gap = BY_NAME["full", "gap p99, ms: itself"]
    assert judge([{"ours": result(580.0), "a": result(1.0)}], gap, "ours").verdict == "met"
    assert judge([{"ours": result(581.0)}], gap, "ours").verdict == "MISSED"
    assert judge([{"ours": {"failed": "x"}}], gap, "ours").verdict == "MISSED"


def test_ours_in_another_way_is_no_peer() -> None:
    round_ = {"headrace": result(2.0), "headrace-off": result(1.0), "a": result(4.0)}
    assert best(round_, SINGLE, "headrace") == ("a", 4.0)


def test_the_bars_are_against_who_serves_many_at_once() -> None:
    names = ["headrace", "headrace-off", "llama-server", "llama-server-tuned", "server.py", "llama_cpp.server", "vllm"]
    (kept,) = judged([dict.fromkeys(names, result(1.0))], "headrace")
    assert list(kept) == ["headrace", *JUDGED]


def test_the_best_peer_is_not_us() -> None:
    round_ = {"ours": result(1.0), "a": result(3.0), "b": result(2.0)}
    assert best(round_, SINGLE, "ours") == ("b", 2.0)
    assert best(round_, RATE, "ours") == ("a", 3.0)
    assert best({"ours": result(1.0)}, SINGLE, "ours") is None


def test_the_ratio_is_to_the_best_peer_of_the_round() -> None:
    round_ = {"ours": result(1.0), "a": result(4.0), "b": result(2.0)}
    assert ratio(round_, SINGLE, "ours") == 0.5
    assert ratio(round_, RATE, "ours") == 0.25
    assert ratio({"ours": result(1.0)}, SINGLE, "ours") is None
    assert ratio({"a": result(1.0)}, SINGLE, "ours") is None


def test_a_figure_of_our_own_needs_no_peer() -> None:
    assert ratio({"ours": result(12.0), "a": result(700.0)}, LEAVE, "ours") == 1.2
    assert ratio({"ours": result(12.0)}, LEAVE, "ours") == 1.2
    assert judge([{"ours": result(12.0)}], LEAVE, "ours").verdict == "met"


def test_failing_is_the_worst_there_is_and_a_failed_peer_is_left_out() -> None:
    failed = {"failed": "x"}
    assert ratio({"ours": failed, "a": result(1.0)}, SINGLE, "ours") == math.inf
    assert ratio({"ours": failed, "a": result(1.0)}, RATE, "ours") == 0.0
    assert ratio({"ours": result(1.0), "a": failed, "b": result(2.0)}, SINGLE, "ours") == 0.5
    row = judge([{"ours": failed, "a": result(1.0)}], SINGLE, "ours")
    assert (row.verdict, number(row.ratio)) == ("MISSED", "failed")


def test_rounds_are_compared_within_themselves() -> None:
    rounds = [
        {"ours": result(1.0), "a": result(2.0), "b": result(3.0)},
        {"ours": result(90.0), "a": result(200.0), "b": result(100.0)},
        {"ours": result(7.0), "a": result(10.0), "b": result(20.0)},
    ]
    row = judge(rounds, SINGLE, "ours")
    assert row.rounds == [0.5, 0.9, 0.7]
    assert row.ratio == 0.7
    assert row.values == {"ours": 7.0, "a": 10.0, "b": 20.0}
    assert row.best == "a"


@pytest.mark.parametrize(
    ("values", "more", "expected"), [([], False, None), ([3, 1, 2], False, 2), ([1, 2], False, 2), ([1, 2], True, 1)]
)
def test_of_two_in_the_middle_the_worse_counts(values: list[float], more: bool, expected: float | None) -> None:
    assert middle(values, more) == expected


def test_the_bar_itself_is_met() -> None:
    at_the_bar = [{"ours": result(20.0), "a": result(20.0)}]
    assert judge(at_the_bar, SINGLE, "ours").verdict == "met"
    assert judge([{"ours": result(21.0), "a": result(20.0)}], RATE, "ours").verdict == "met"
    assert judge([{"ours": result(20.1), "a": result(20.0)}], SINGLE, "ours").verdict == "MISSED"
    assert judge([{"ours": result(20.9), "a": result(20.0)}], RATE, "ours").verdict == "MISSED"
    assert judge([], SINGLE, "ours").verdict == "not measured"


def test_the_table() -> None:
    rounds = [{"ours": result(1.0), "a": result(4.0), "b": {"failed": "x"}}]
    assert table(rounds, "ours", ["single", "leave"]).splitlines() == [
        "| scenario | figure | ours | a | b | best peer | ratio | rounds | bar |  |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| single | TTFT p50, ms | 1 | 4 | – | a | 0.25 | 0.25 | <= 1 | met |",
        "| leave | TTFT after hang-up ÷ alone | 0.1 | 0.4 | – | – | 0.1 | 0.1 | <= 1.2 | met |",
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (math.inf, "failed"), (0.12345, "0.123"), (5033.4, "5,033"), (99.96, "100")]
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text
