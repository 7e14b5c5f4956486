from __future__ import annotations

from pathlib import Path

from headrace_bench.ablation import Leg, Turn, conclude
from headrace_bench.exhibits import SWITCHES
from headrace_bench.figures.slo import parse
from headrace_bench.report import ablations
from headrace_bench.report.machine import machine
from headrace_bench.report.table import Table, read, write


def leg(value: float) -> Leg:
    return Leg(value=value, seen=(), good=3, scheduled=4, failed=1, invalid=())


def row(switch: str, on: float, off: float) -> dict[str, object]:
    turns = [Turn(i // 2, leg(on * (1 + i / 100)), leg(off * (1 + i / 90))) for i in range(8)]
    return ablations.row(conclude(SWITCHES[switch], turns, ["busy"], parse("chat"), 61.25, 1))


def test_times_are_in_ms_and_the_effect_is_a_ratio() -> None:
    made = row("optimizations.tiers", 0.1, 0.4)
    assert made["unit"] == "ms"
    assert 99 < float(str(made["on"])) < 110
    assert made["verdict"] == "helps"
    assert "×0.25" in ablations.effect(made) or "×0.24" in ablations.effect(made)


def test_a_share_is_compared_in_points() -> None:
    made = row("optimizations.admission", 0.6, 0.2)
    assert made["unit"] == "%"
    assert made["verdict"] == "helps"
    assert ablations.effect(made).startswith("+4")
    assert "points" in ablations.effect(made)


def made(rows: list[dict[str, object]]) -> Table:
    return ablations.table(
        rows, command="headrace-bench ablate", wall="2026-01-01T00:00:00Z", machine=machine(), versions={"python": "3"}
    )


def test_the_table_holds_every_switch_also_one_that_failed() -> None:
    table = made([row("optimizations.mined_templates", 0.1, 0.1), ablations.failed("engine.x", "it did not start")])
    first, second = table.rows
    assert "**no difference**" in first
    assert "8 (and 1 dropped)" in first
    assert second[1] == "not measured: it did not start"
    assert len(first) == len(second) == len(table.columns)
    assert table.verb == "ablate"
    loads = table.notes[1:]
    assert len(loads) == 1
    assert loads[0].startswith("`optimizations.mined_templates`: a system prompt")
    assert "with `tiers.ram_mib=16`" in loads[0]


def test_it_is_kept_with_the_figures_behind_it(tmp_path: Path) -> None:
    table = made([row("optimizations.admission", 0.5, 0.5)])
    write(tmp_path, table)
    assert read(tmp_path) == table
    assert table.figures["switches"][0]["switch"] == "optimizations.admission"
