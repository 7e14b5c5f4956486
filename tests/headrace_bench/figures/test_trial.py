from __future__ import annotations

import msgspec
import pytest

from headrace_bench.figures.slo import Slo
from headrace_bench.figures.summary import summarise
from headrace_bench.figures.trial import ANSWERED, FIGURES, Place, reduce, sample
from made_runs import health, record, schedule

PLACE = Place("pair", 0, 0, "a")
CHAT = Slo("x", ttft=0.25)


def test_figures_of_a_run_with_known_times() -> None:
    asked = schedule(n=4, duration=2.0)
    records = [record(i, i * 0.5, ttft, gap=0.1) for i, ttft in enumerate((0.1, 0.2, 0.3, 0.4))]
    trial = reduce("fast", PLACE, asked, records, health(), CHAT)
    assert trial.figures == pytest.approx(
        {
            "ttft_p50": 0.2,
            "ttft_p90": 0.4,
            "ttft_p95": 0.4,
            "tpot_p50": 0.1,
            "gap_p99": 0.1,
            "gap_longest": 0.1,
            "stall": 0.0,
            "e2e_p50": 0.6,
            "tokens_per_s": 8.0,
            "goodput": 1.0,
            "attainment": 0.5,
        }
    )
    # Of the last answer one token came inside the window, four in the drain: 16 in 2 s.
    assert trial.ttfts == pytest.approx((0.1, 0.2, 0.3, 0.4))
    assert len(trial.gaps) == 16
    assert (trial.scheduled, trial.outcomes, trial.seed, trial.invalid) == (4, {"ok": 4}, 1, ())


def test_tokens_are_counted_as_a_summary_counts_them() -> None:
    asked = schedule(n=3, duration=2.0)
    records = [
        record(0, 0.0, 0.1),
        msgspec.structs.replace(record(1, 1.0, 0.75, gap=0.5), completion_tokens=9),  # of five chunks one is inside
        record(2, 1.5, 0.1, outcome="truncated"),
    ]
    seen = sample(asked, records, CHAT)
    assert seen.tokens == 5 + 2
    assert summarise(asked, records, health(), CHAT).rates.tokens_per_s == seen.tokens / 2


def test_what_did_not_end_well_is_in_attainment_and_in_no_latency() -> None:
    asked = schedule(n=4, duration=2.0)
    records = [record(0, 0.0, 0.2), record(1, 0.5, 0.001, outcome="http"), record(2, 1.0, 0.2)]  # and one never sent
    trial = reduce("s", PLACE, asked, records, health("late"), CHAT)
    assert trial.figures["ttft_p50"] == pytest.approx(0.2)
    assert trial.figures["attainment"] == 0.5
    assert trial.outcomes == {"ok": 2, "http": 1}
    assert trial.invalid == ("late",)


def test_nothing_is_none_and_not_zero() -> None:
    asked = schedule(n=2)
    trial = reduce("s", PLACE, asked, [record(0, 0.0, 0.1, outcome="connect")], health(), ANSWERED)
    assert {name for name, value in trial.figures.items() if value is not None} == {"goodput", "attainment"}
    assert trial.figures["attainment"] == 0.0


def test_warm_up_does_not_count_and_a_closed_loop_counts_what_was_begun() -> None:
    asked = schedule(n=4)
    warm = msgspec.structs.replace(asked.requests[0], phase="warmup")
    asked = msgspec.structs.replace(asked, requests=(warm, *asked.requests[1:]))
    later = [msgspec.structs.replace(one, at=None) for one in asked.requests[1:]]
    records = [msgspec.structs.replace(record(0, 0.0, 9.0), phase="warmup"), record(1, 1.0, 0.1)]
    assert sample(asked, records, ANSWERED).scheduled == 3
    closed = sample(msgspec.structs.replace(asked, users=2, requests=tuple(later)), records, ANSWERED)
    assert (closed.scheduled, closed.met, len(closed.good)) == (1, 1, 1)


def test_names_are_unique_and_what_guards_is_named() -> None:
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    assert [figure.name for figure in FIGURES if figure.guards] == ["attainment"]
