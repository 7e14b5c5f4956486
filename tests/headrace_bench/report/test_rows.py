from __future__ import annotations

import pytest

from bench_runs import failed, health, records, schedule
from headrace_bench.figures.paired import Comparison
from headrace_bench.figures.schema import Figures, Value
from headrace_bench.figures.slo import PROFILES
from headrace_bench.figures.summary import summarise
from headrace_bench.report import rows
from headrace_bench.report.rows import Compared, interval, number, share

MANY = summarise(schedule(400), records(400), health(), PROFILES["chat"])
NONE = summarise(schedule(2), [failed(0, 0.0), failed(1, 0.1, "timeout", None)], health(), PROFILES["chat"])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.04, "0.04"),
        (0.423, "0.42"),
        (9.87, "9.87"),
        (98.7, "98.7"),
        (1234.4, "1,234"),
        (-12.34, "-12.3"),
    ],
)
def test_numbers(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_an_interval_says_which_end_is_missing() -> None:
    assert interval(Value(198.0, 184.0, 210.0)) == "198 [184–210]"
    assert interval(Value(198.0, 184.0, None)) == "198 [184–]"
    assert interval(Value(198.0)) == "198"
    assert interval(None) == "–"
    assert share(Value(0.972, 0.95, None)) == "97.2 % [95.0 %, –]"
    assert share(None) == "–"


def test_every_figure_of_the_schema_has_a_row() -> None:
    assert {entry[0] for entry in rows.FIGURES} == set(Figures.__struct_fields__)
    assert set(rows.GLANCE) <= {entry[0] for entry in rows.FIGURES}


def test_rows_of_a_run() -> None:
    shown = {row.name: row for row in rows.rows(MANY.figures, rows.GLANCE)}
    assert list(shown) == list(rows.GLANCE)
    count, p50, *_, p99, longest = shown["ttft_ms"].cells()
    assert int(count) == MANY.counts.completed
    assert "[" in p50
    assert p99 != "–"
    assert longest == number(MANY.figures.ttft_ms.max)
    assert [row.name for row in rows.parts(MANY)][:4] == ["client", "network", "server", "receive"]


def test_nothing_measured_is_no_row_and_a_blank_line() -> None:
    assert rows.rows(NONE.figures) == []
    assert rows.parts(NONE) == []
    assert rows.failures(NONE) == "http 1 (503: 1), timeout 1"
    lines = rows.table(NONE)
    assert [line["figure"] for line in lines] == [entry[0] for entry in rows.FIGURES]
    assert all(line["count"] == 0 and line["p50"] is None and line["max"] is None for line in lines)


def test_what_is_compared() -> None:
    found = Comparison(1.07, 1.031, None, 0.002, "worse", 12, 0, 0.02)
    row = Compared("TTFT p50", "ms", 100.0, 107.0, found)
    assert row.effect() == "+7.0 % [+3.1 %, –]"
    assert row.floor() == "±2.0 %"
    few = Compared("stalls", "", None, None, Comparison(None, None, None, None, "too few", 2, 0, None, "difference"))
    assert (few.effect(), few.floor()) == ("–", "–")
    apart = Compared("stalls", "", 0.0, 0.5, Comparison(0.5, 0.25, 0.75, 0.01, "worse", 9, 0, 0.1, "difference"))
    assert (apart.effect(), apart.floor()) == ("+0.5 [+0.25, +0.75]", "±0.1")
