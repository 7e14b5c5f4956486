from __future__ import annotations

import json
import re
from pathlib import Path

from headrace_bench.first_token import _figures, streams
from headrace_bench.lab import Lab

ROOT = Path(__file__).parents[2]


def pair(ours: float, theirs: float) -> dict[str, object]:
    def one(x: float) -> dict[str, object]:
        return {
            "single": {"ttft": {"p50": x}, "gap": {"p50": x, "p99": x}},
            "shared": {"cold": {"p95": x}, "warm": {"p95": x}},
            "leave": {"ttft_alone": 10.0, "ttft_after_hang_up": x},
        }

    return {"headrace": one(ours), "llama-server": one(theirs)}


def test_a_figure_is_the_median_of_the_ratios_within_rounds() -> None:
    found = _figures([pair(1, 2), pair(30, 10), pair(10, 10)])
    assert found["single_ttft_p50"] == found["shared_cold_p95"] == 1.0
    assert found["leave"] == 1.0


def test_streams_are_measured_on_a_real_server(tmp_path: Path) -> None:
    found = streams(Lab(Path("none"), tmp_path), n=8, rate=200.0, tokens=20, idle_s=0.1)
    assert found["wrong"] == 0
    assert found["streams"] == 8
    assert json.dumps(found)


def test_the_laboratory_knows_nothing_of_the_server() -> None:
    for path in (ROOT / "src" / "headrace_bench").glob("*.py"):
        assert not re.search(r"^\s*(from|import) headrace\b", path.read_text(), re.M), path
