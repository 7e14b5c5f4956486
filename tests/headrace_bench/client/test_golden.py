from __future__ import annotations

import re

import pytest

from headrace_bench.client.golden import CASES, CUT, SCRIPTS, SPLIT, Case, Times


def as_planned(case: Case) -> list[Times]:
    """What a punctual server would log: requests read when they are due."""
    times = []
    for at, name in case.asks:
        script = SCRIPTS[name]
        base = at if script.stalls is None else max(at, case.asks[0][0] + script.stalls)
        times.append(Times(at, at, tuple(base + piece for piece, _ in script.pieces)))
    return times


def wants(name: str) -> dict[str, object]:
    case = next(case for case in CASES if case.name == name)
    return dict(case.wants(as_planned(case)))


def test_every_case_is_there() -> None:
    names = [case.name for case in CASES]
    assert names[:13] == list("abcdefghijklm")
    assert {re.sub("[a-e]$", "", name) for name in names[13:]} == {"OC-59", "OC-60", "OC-61", "OC-62"}
    assert len(set(names)) == len(names)
    assert {script for case in CASES for _, script in case.asks} <= SCRIPTS.keys()


@pytest.mark.parametrize(
    ("name", "figure", "value"),
    [
        ("a", "ttft", 0.1),
        ("b", "tpot", 0.04),
        ("d", "ttft", 0.05),
        ("d", "ttfo", 0.5),
        ("e", "ttft", 0.1),
        ("e", "gaps", (0.1,)),
        ("f", "gaps", (0, 0.1)),
        ("g", "ttft", 0.2),
        ("h", "partial_ttft", 0.05),
        ("j", "e2e", 0.1),
        ("j", "e2e_closed", 0.4),
        ("k", "ttft_p99", 1.0),
        ("k", "late by 25 ms and more", 20),
        ("OC-59", "e2e_p50", 1.0),
        ("OC-60", "ttft", 0.2),
        ("OC-60", "gaps", (0.05, 0.05)),
        ("OC-60", "tpot", 0.05),
        ("OC-60", "e2e", 0.3),
        ("OC-61", "ttft", 0.1),
        ("OC-61", "tpot", 0.02),
        ("OC-61", "gap_mean", 0.1),
        ("OC-61", "itl_mean", 0.02),
        ("OC-62c", "ttft_p50", 0.05),
    ],
)
def test_a_punctual_server_would_be_found_so(name: str, figure: str, value: object) -> None:
    assert wants(name)[figure] == pytest.approx(value)


def test_all_wants_can_be_had_from_the_plan() -> None:
    for case in CASES:
        assert case.wants(as_planned(case))


def test_the_split_event_is_cut_inside_a_character() -> None:
    with pytest.raises(UnicodeDecodeError):
        SPLIT[:CUT].decode()
