from __future__ import annotations

import json

from headrace_bench.ablation import Leg, Round, conclude
from headrace_bench.exhibits import SWITCHES
from headrace_bench.figures.slo import parse
from headrace_bench.report import ablations


def leg(value: float) -> Leg:
    return Leg(value=value, seen=(), good=3, scheduled=4, failed=1, invalid=())


def row(switch: str, on: float, off: float) -> dict[str, object]:
    rounds = [Round(i // 2, leg(on * (1 + i / 100)), leg(off * (1 + i / 90))) for i in range(8)]
    return ablations.row(conclude(SWITCHES[switch], rounds, ["busy"], parse("chat"), 61.25, 1))


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


def test_the_table_holds_every_switch_also_one_that_failed() -> None:
    rows = [row("optimizations.tiers", 0.1, 0.1), ablations.failed("engine.x", "it did not start")]
    table = ablations.markdown(rows)
    lines = table.splitlines()
    assert "**no difference**" in lines[2]
    assert "not measured: it did not start" in lines[3]
    assert {line.count("|") for line in lines[:4]} == {len(ablations.HEADS) + 1}
    assert "`optimizations.tiers` | four conversations" in table
    assert "8 (and 1 dropped)" in table


def test_the_document_is_strict_json() -> None:
    made = ablations.document([row("optimizations.admission", 0.5, 0.5)], model="m.gguf")
    text = json.dumps(made, allow_nan=False)
    assert json.loads(text)["schema"] == 1
    assert ablations.markdown(json.loads(text)["switches"]) == ablations.markdown(made["switches"])
