from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_bench.duel import Duel, Side, duel
from headrace_bench.figures.claim import Claim, Merged, conclude
from headrace_bench.figures.trial import FIGURES
from headrace_bench.report import versus
from made_runs import A, B, Servers, schedule

FEW = tuple(figure for figure in FIGURES if figure.name in ("ttft_p50", "stall", "attainment"))


def judged(pairs: int) -> tuple[Duel, Claim]:
    them = Servers({A.url: 0.2, B.url: 0.1})
    made = duel(Side("old", A), Side("new", B), schedule, pairs=pairs, seed=1, run=them.run, check=lambda target: None)
    return made, conclude("old", "new", made.pairs, made.floor, FEW, "ttft_p50", 1)


def written(tmp_path: Path, pairs: int) -> dict[str, Any]:
    made, claim = judged(pairs)
    dropped = [{"kind": "pair", "pair": 3, "reasons": ["sent late"]}]
    told = versus.document("old", "new", claim, made.pairs, made.floor, dropped, ["a note"], {"seed": 1})
    versus.write(tmp_path, told)
    text = (tmp_path / versus.NAME).read_bytes()
    assert b"NaN" not in text
    assert b"Infinity" not in text
    return msgspec.json.decode(text, type=dict[str, Any])


def test_json_has_milliseconds_and_per_cent(tmp_path: Path) -> None:
    told = written(tmp_path, 6)
    assert told["figures"]["ttft_p50_ms"]["a"] == pytest.approx(200, rel=0.1)
    assert told["figures"]["ttft_p50_ms"]["effect"] == pytest.approx(0.5, rel=0.1)
    assert told["figures"]["attainment_percent"]["a"] == 100
    assert told["figures"]["stall_ms"]["scale"] == "difference"
    assert (len(told["pairs"]), len(told["floor"])) == (6, 6)
    assert told["pairs"][0][1]["side"] == "new"
    assert told["pairs"][0][1]["figures"]["ttft_p50_ms"] == pytest.approx(100, rel=0.2)
    assert told["dropped"] == [{"kind": "pair", "pair": 3, "reasons": ["sent late"]}]
    assert told["merged"]["ttft_p99_ms"]["a"] is None, "240 requests are too few for a p99"


def test_what_is_not_known_is_null(tmp_path: Path) -> None:
    told = written(tmp_path, 1)
    assert told["figures"]["ttft_p50_ms"]["effect"] is None
    assert told["figures"]["ttft_p50_ms"]["verdict"] == "too few"
    assert told["claimed"] is False


def test_the_primary_is_marked_and_differences_are_in_the_unit_shown() -> None:
    _, claim = judged(6)
    rows = versus.compared(claim)
    assert [row.label for row in rows] == ["ttft_p50 (primary)", "stall", "attainment"]
    assert rows[0].unit == "ms"
    assert rows[2].effect() == "+0 [+0, +0]"


def test_a_merged_p99_in_a_line() -> None:
    assert versus.merged(Merged("ttft_p99", 0.8, 0.64, 0.8, 0.7, 0.9)) == (
        "ttft_p99 of all requests together: 800 ms and 640 ms, ratio 0.80 [0.70, 0.90]"
    )
    assert versus.merged(Merged("ttft_p99", None, None, None, None, None)).endswith("too few to tell")
