from __future__ import annotations

import math
from typing import Any

from headrace_bench.bars import SCENARIOS
from headrace_bench.peers.standing import FIGURES, columns, failures, figures, rows


def result(ms: float) -> dict[str, Any]:
    four = {"p50": ms, "p95": ms, "p99": ms, "max": ms}
    return {"single": {"ttft": four, "gap": four}, "full": {"chunks_per_s": ms, "ttft": four, "gap": four, "failed": 0}}


def test_a_row_that_we_lose_is_a_row() -> None:
    rounds = [{"headrace": result(20), "a": result(10), "b": result(40)}, {"headrace": result(30), "a": result(10)}]
    found = {row[:2]: row[2:] for row in rows(rounds, ["headrace", "a", "b"], "headrace", ["single", "full"])}
    # Of two rounds the worse is the median; every ratio is of its own round.
    assert found["single", "TTFT p50, ms"] == ("30", "**10**", "40", "a", "3", "2–3")
    assert found["full", "chunks per second"] == ("20", "10", "**40**", "b", "0.5", "0.5–3")
    assert len(next(iter(found.values()))) + 2 == len(columns(["headrace", "a", "b"], "headrace"))
    assert not [scenario for scenario, _ in found if scenario not in ("single", "full")]


def test_everything_off_stands_beside_everything_on() -> None:
    rounds = [{"headrace": result(20), "headrace-off": result(5), "a": result(10)}]
    servers = ["headrace", "headrace-off", "a"]
    found = {row[:2]: row[2:] for row in rows(rounds, servers, "headrace", ["single"])}
    assert found["single", "TTFT p50, ms"] == ("20", "**5**", "10", "a", "2", "2–2", "4")
    assert columns(servers, "headrace")[-1] == "headrace ÷ headrace-off"
    lone = [{"headrace": result(20), "a": result(10)}]
    assert rows(lone, servers, "headrace", ["single"])[0][-1] == "–"


def test_every_scenario_has_its_rows() -> None:
    assert {figure.scenario for figure in FIGURES} == set(SCENARIOS)


def test_a_server_that_failed_is_blank_and_named() -> None:
    rounds = [{"headrace": result(20), "a": {"failed": "NotReady: a\ndid not start"}}]
    found = rows(rounds, ["headrace", "a"], "headrace", ["single"])
    assert found[0][2:] == ("**20**", "–", "–", "–", "–")
    assert failures(rounds, ["single"]) == ["round 1: `a`: NotReady: a did not start"]


def test_requests_that_failed_are_named() -> None:
    some = result(1) | {"full": {"failed": 3}, "single": {"failed": "Failed: HTTP 500"}}
    assert failures([{"a": some}], ["single", "full"]) == [
        "round 1: `a`: single: Failed: HTTP 500",
        "round 1: `a`: full: 3 requests failed",
    ]


def test_what_is_no_number_is_null() -> None:
    assert figures([{"a": {"x": {"y": math.inf, "z": 1.0}}}]) == [{"a": {"x": {"y": None, "z": 1.0}}}]


def test_a_failure_names_no_place_of_this_machine() -> None:
    rounds: list[dict[str, dict[str, Any]]] = [
        {"a": {"failed": "NotReady: a:\n cannot open /home/me/m.gguf"}, "b": {"single": {"failed": "at /x/y/z"}}}
    ]
    assert failures(rounds, ["single"]) == [
        "round 1: `a`: NotReady: a: cannot open m.gguf",
        "round 1: `b`: single: at z",
    ]
