from __future__ import annotations

import pytest

from headrace.core.events import Marks
from headrace.core.timeline import STAGES, Timeline

MARKS = Marks(queued=103.9, scheduled=104.0, restored=108.0, prefilled=116.0, sampled=132.0)


def whole() -> Timeline:
    timeline = Timeline(first_byte=1.0, body=1.5, routed=2.5, tokenized=3.0)
    timeline.mark(MARKS, offset=-100.0)
    timeline.delivered = 64.0
    timeline.cached_tokens, timeline.prompt_tokens = 7, 9
    return timeline


def test_each_stage_is_the_time_between_two_stamps() -> None:
    assert whole().stages() == {
        "receive": 500.0,
        "route": 1000.0,
        "tokenize": 500.0,
        "queue": 1000.0,
        "restore": 4000.0,
        "prefill": 8000.0,
        "sample": 16000.0,
        "deliver": 32000.0,
    }


def test_the_stages_add_up_to_ttft() -> None:
    timeline = whole()
    assert sum(timeline.stages().values()) == pytest.approx(timeline.ttft())
    assert timeline.ttft() == 63000.0
    assert tuple(timeline.stages()) == STAGES


@pytest.mark.parametrize("reached", range(9))
def test_a_request_that_ended_early_has_the_stages_it_passed(reached: int) -> None:
    stamps = ("body", "routed", "tokenized", "scheduled", "restored", "prefilled", "sampled", "delivered")
    timeline = Timeline(first_byte=0.0)
    for i, name in enumerate(stamps[:reached]):
        setattr(timeline, name, float(i + 1))
    assert tuple(timeline.stages()) == STAGES[:reached]
    assert (timeline.ttft() is not None) == (reached == 8)
    assert (timeline.report()["ttft"] is not None) == (reached == 8)


def test_marks_of_a_later_text_say_nothing_of_the_first_delivery() -> None:
    timeline = Timeline(first_byte=1.0, body=1.5, routed=2.5, tokenized=3.0, delivered=4.0)
    timeline.mark(MARKS, offset=-100.0)
    assert (timeline.scheduled, timeline.sampled) == (None, None)
    assert timeline.ttft() == 3000.0


def test_a_hole_ends_the_list() -> None:
    timeline = Timeline(first_byte=0.0, body=1.0, tokenized=3.0)
    assert timeline.stages() == {"receive": 1000.0}


def test_server_timing() -> None:
    assert whole().server_timing() == (
        "receive;dur=500.00, route;dur=1000.00, tokenize;dur=500.00, queue;dur=1000.00, restore;dur=4000.00, "
        "prefill;dur=8000.00, sample;dur=16000.00, deliver;dur=32000.00, ttft;dur=63000.00"
    )
    assert Timeline(first_byte=0.0).server_timing() == ""


def test_the_report_is_rounded_and_names_the_cached_tokens() -> None:
    timeline = whole()
    timeline.body = 1.0001234
    report = timeline.report()
    assert report["receive"] == 0.123
    assert list(report) == [*STAGES, "ttft", "cached_tokens"]
    assert (report["ttft"], report["cached_tokens"]) == (63000.0, 7)


def test_pacing_is_told_beside_the_stages_and_no_part_of_them() -> None:
    timeline = whole()
    plain = timeline.report()
    timeline.pace = (0.0251, 0.06672)
    assert timeline.report() == {**plain, "pace": {"mean_ms": 25.1, "max_ms": 66.72}}
    assert sum(timeline.stages().values()) == pytest.approx(timeline.ttft())
