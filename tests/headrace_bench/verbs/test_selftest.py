from __future__ import annotations

import argparse

import pytest

from headrace_bench.client import rehearsal
from headrace_bench.client.golden import CASES
from headrace_bench.client.rehearsal import Played
from headrace_bench.fault import Misuse
from headrace_bench.verbs import selftest


def ran(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    selftest.add(parser)
    return selftest.run(parser.parse_args(flags))


def test_a_case_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    # No times in this one, so it does not depend on the machine.
    assert ran("--only", "m, oc-62d", "--quick") == 0
    said = capsys.readouterr().out
    assert "2 of 2 cases are as they should be" in said
    assert "by its own stamps: ±2 ms" in said
    assert "m       429 and 503" in said
    assert "by_status 429 1, 503 2 (429 1, 503 2)" in said


def test_a_case_that_differs_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rehearsal, "TOLERANCE_S", -1.0)  # nothing is as near as that
    monkeypatch.setattr(rehearsal, "NOISE_S", 60.0)
    assert ran("--only", "c", "--quick") == 1
    said = capsys.readouterr().out
    assert "DIFFERS in ttft" in said
    assert "0 of 1 cases" in said


def test_misuse() -> None:
    with pytest.raises(Misuse, match="--only z: there are a, b"):
        ran("--only", "z")
    for seconds in ("0", "-1", "inf", "nan", "1e300"):
        with pytest.raises(Misuse, match=r"--seconds .*: give a number above 0, and at most 600"):
            ran("--seconds", seconds)


def test_a_line_says_what_was_found_and_what_was_wanted() -> None:
    case = CASES[0]
    played = Played(case, {"ttft": 0.1, "tpot": None, "gaps": (0.1,) * 9}, {"ttft": 0.2}, 0.003, 0.004)
    assert selftest.line(played) == (
        f"a       {case.what:40} DIFFERS in ttft, gaps; server late 3.00 ms; waited 4.00 ms for a processor\n"
        "        found (wanted): ttft 200.00 ms (100.00 ms); tpot none (none); "
        "gaps none ([100.00 ms, 100.00 ms, 100.00 ms, … 9 in all])"
    )
