from __future__ import annotations

import pytest

from headrace_bench.report.judged import Line, rows, verdict

AT_MOST, AT_LEAST, TOLD = Line("a", "x", "<=", 2.0), Line("b", "x", ">=", 2.0), Line("c", "x", unit=0.01)


@pytest.mark.parametrize(
    ("line", "found", "says"),
    [
        (AT_MOST, 2.0, "met"),
        (AT_MOST, 2.1, "MISSED"),
        (AT_LEAST, 2, "met"),
        (AT_LEAST, 1.9, "MISSED"),
        (AT_MOST, None, "not measured"),
        (TOLD, 2.0, ""),
    ],
)
def test_a_verdict(line: Line, found: float | None, says: str) -> None:
    assert verdict(line, {"x": found}) == says


def test_a_row_a_figure_and_none_for_what_was_not_asked() -> None:
    assert rows([AT_MOST, TOLD], {"x": 0.5}) == (("a", "0.5", "<= 2", "met"), ("c", "50", "", ""))
    assert rows([AT_MOST, TOLD], {}) == (("a", "–", "<= 2", "not measured"),)
