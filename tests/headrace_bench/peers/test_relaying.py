from __future__ import annotations

from typing import Any

import pytest

from headrace_bench.peers import relaying
from headrace_bench.peers.relaying import FIGURES, Round, ratios, rows, value, verdict

TTFT, GAP, CPU = FIGURES[0], FIGURES[3], FIGURES[4]
LOAD = "100 streams"


def block(ttft: float, gap: float, cpu: float | None = None, **more: Any) -> dict[str, Any]:
    found = {"ttft": {"p50": ttft, "p95": ttft}, "gap": {"p50": 0.0, "p99": gap}, "invalid": [], **more}
    return found if cpu is None else {**found, "cpu_us": cpu, "rss_mb": 50.0}


def round_(ours: tuple[float, float, float], other: tuple[float, float, float] | None = None, **more: Any) -> Round:
    found = {"direct": block(0.1, 0.2), "headrace": block(*ours, **more)}
    return {LOAD: found if other is None else {**found, "litellm": block(*other)}}


def test_what_direct_has_too_is_taken_off() -> None:
    one = round_((0.6, 0.9, 40.0))
    assert value(one, LOAD, "headrace", TTFT) == pytest.approx(0.5)
    assert value(one, LOAD, "headrace", GAP) == pytest.approx(0.7)
    assert value(one, LOAD, "headrace", CPU) == 40.0
    assert value(one, LOAD, "direct", TTFT) == 0.1
    assert value(one, LOAD, "litellm", TTFT) is None


def test_a_block_that_does_not_count_is_in_no_figure() -> None:
    one = round_((0.6, 0.9, 40.0), (8.0, 9.0, 900.0), invalid=["late"])
    assert value(one, LOAD, "headrace", TTFT) is None
    assert value(one, LOAD, "litellm", TTFT) == pytest.approx(7.9)
    assert ratios([one], LOAD, TTFT, "headrace", "litellm") == []
    assert ratios([round_((0.6, 0.9, 40.0), (0.105, 9.0, 900.0))], LOAD, TTFT, "headrace", "litellm") == []
    direct = {LOAD: {"direct": block(0.1, 0.2, invalid=["late"]), "headrace": block(0.6, 0.9, 40.0)}}
    assert value(direct, LOAD, "headrace", TTFT) is None
    assert value(direct, LOAD, "headrace", CPU) == 40.0


@pytest.mark.parametrize(
    ("ours", "other", "says"),
    [
        ((0.6, 0.9, 40.0), (8.1, 9.2, 900.0), "met"),
        ((1.2, 0.9, 40.0), (8.1, 9.2, 900.0), "MISSED"),
        ((0.6, 0.9, 40.0), (1.1, 9.2, 900.0), "MISSED"),
        ((0.6, 0.9, 40.0), None, "met; against litellm not measured"),
        ((1.2, 0.9, 40.0), None, "MISSED"),
    ],
)
def test_a_bar_and_a_share(ours: Any, other: Any, says: str) -> None:
    assert verdict([round_(ours, other)], LOAD, TTFT, "headrace", ["litellm"]) == says


def test_the_worse_middle_round_decides() -> None:
    rounds = [round_((0.1 + added, 0.2, 40.0)) for added in (0.5, 1.5)]
    assert verdict(rounds, LOAD, TTFT, "headrace", []) == "MISSED"
    assert verdict([{LOAD: {}}], LOAD, TTFT, "headrace", []) == "not measured"
    assert verdict(rounds, LOAD, FIGURES[1], "headrace", []) == ""


def test_rows_and_bars() -> None:
    rounds = [round_((0.6, 0.9, 40.0), (10.1, 20.2, 900.0)), round_((0.7, 0.8, 80.0), (10.1, 20.2, 800.0))]
    both = [{**one, "one stream": one[LOAD]} for one in rounds]
    servers = ["direct", "headrace", "litellm"]
    assert relaying.columns(servers, "headrace") == (
        "load", "figure", "direct", "headrace", "litellm", "headrace ÷ litellm", "rounds", "bar", "",
    )  # fmt: skip
    found = rows(both, ["one stream", LOAD], servers, "headrace")
    assert len(found) == 2 * len(FIGURES)
    assert {row[-2:] for row in found[: len(FIGURES)]} == {("", "")}, "one stream has no bars"
    by_name = {row[1]: row for row in found[len(FIGURES) :]}
    assert by_name[TTFT.name][2:] == ("0.1", "0.6", "10", "0.06", "0.05–0.06", "<= 1, ratio <= 0.25", "met")
    assert by_name[CPU.name][3:] == ("80", "900", "0.1", "0.0444–0.1", "<= 60", "MISSED")
    assert by_name["memory, MB"][-2:] == ("", "")


def test_a_load_before_the_last_has_shares_only() -> None:
    one = round_((2.1, 0.9, 80.0), (10.1, 20.2, 900.0))
    found = rows(
        [{**one, "20 streams": one[LOAD]}], ["20 streams", LOAD], ["direct", "headrace", "litellm"], "headrace"
    )
    first, last = found[0], found[len(FIGURES)]
    assert first[-2:] == ("ratio <= 0.25", "met")
    assert last[-2:] == ("<= 1, ratio <= 0.25", "MISSED")
    assert found[4][-2:] == ("", "")


def test_notes_say_what_failed_and_what_this_machine_cannot_tell() -> None:
    found = {
        "direct": block(0.1, 1.5),
        "headrace": block(0.5, 0.5, 40.0, failed=2, lost=1, doubled=0, foreign=0, invalid=["late by\n3 ms"]),
        "litellm": {"failed": "NotReady: no\nport"},
        "other": block(900.0, 300.0, 800.0, cores=0.97, waited=0.031),
    }
    assert relaying.notes([{LOAD: found}]) == [
        "round 1: 100 streams: `headrace` does not count: late by 3 ms",
        "round 1: 100 streams: `headrace`: 2 failed, 1 lost (streams, tokens, tokens, characters)",
        "round 1: 100 streams: `litellm`: NotReady: no port",
        "round 1: 100 streams: `other` used 0.97 cores: it could not keep up",
        "round 1: 100 streams: `other` had no core for 3% of the block: others were using it",
        "round 1: 100 streams: without a gateway the gap p99 was 1.50 ms late: "
        "the machine itself is above a bar of 1 ms",
    ]
