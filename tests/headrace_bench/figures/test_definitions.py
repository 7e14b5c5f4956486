from __future__ import annotations

from typing import Any

import pytest

from headrace_bench.figures.definitions import Pace, RequestFigures, figures, fluidity, qoe, stalled_gaps, tail
from headrace_bench.record import Chunk, Kind, Record


def chunk(ms: float, tokens: int | None = None, kind: Kind = "text") -> Chunk:
    return Chunk(at=ms / 1000, kind=kind, size=4, tokens=tokens)


def record(*chunks: Chunk, **fields: Any) -> Record:
    known: dict[str, Any] = {"index": 0, "scheduled": 0.0, "dispatched": 0.0, "sent": 0.0, "outcome": "ok"}
    return Record(chunks=chunks, **(known | fields))


def of(*chunks: Chunk, **fields: Any) -> RequestFigures:
    return figures(record(*chunks, **fields))


def test_ttft_counts_from_the_schedule_and_beside_it_from_sending() -> None:
    one = of(chunk(500), scheduled=0.1, dispatched=0.2, sent=0.25)
    assert (one.ttft, one.ttft_service) == pytest.approx((0.4, 0.25))


def test_in_a_closed_loop_it_counts_from_the_dispatch() -> None:
    one = of(chunk(500), chunk(600), scheduled=None, dispatched=0.2, sent=0.25, closed=0.7)
    assert (one.ttft, one.e2e, one.e2e_closed) == pytest.approx((0.3, 0.4, 0.5))


def test_a_token_is_not_a_chunk() -> None:
    """1, 4 and 1 tokens: three chunks, two gaps, five tokens after the first."""
    one = of(chunk(100, 1), chunk(200, 4), chunk(300, 1), completion_tokens=6)
    assert one.tpot == pytest.approx(0.2 / 5)
    assert one.gaps == pytest.approx((0.1, 0.1))
    assert one.itl_est == pytest.approx((0.025,) * 4 + (0.1,))
    assert (one.tokens, one.source, one.counted, one.tokens_per_chunk) == (6, "usage", 6, (1, 4, 1))


def test_several_tokens_a_chunk_and_only_the_total_known() -> None:
    one = of(chunk(100), *(chunk(ms) for ms in (200, 300, 400, 500)), completion_tokens=21)
    assert one.tokens == 21
    assert one.ttft == pytest.approx(0.1)
    assert one.tpot == pytest.approx(0.02)
    assert one.gaps == pytest.approx((0.1,) * 4)
    assert one.itl_est == pytest.approx((0.02,) * 4)
    assert one.tokens_per_chunk is None
    assert one.counted == 5


def test_the_first_chunk_s_own_tokens_are_not_divided_by() -> None:
    one = of(chunk(100, 3), chunk(200, 2), completion_tokens=5)
    assert one.tpot == pytest.approx(0.05)


def test_all_tokens_in_one_chunk_have_no_time_between_them() -> None:
    one = of(chunk(100), completion_tokens=5)
    assert (one.tpot, one.gaps, one.longest_gap, one.tail, one.stalls, one.stalled) == (
        None,
        (),
        None,
        None,
        None,
        None,
    )
    assert one.tokens_per_chunk == (5,)
    assert one.norm_latency == pytest.approx(0.02)


def test_reasoning_is_a_token_and_no_output() -> None:
    one = of(chunk(50, kind="reasoning"), chunk(500))
    assert (one.ttft, one.ttfo) == pytest.approx((0.05, 0.5))
    assert of(chunk(50, kind="reasoning")).ttfo is None
    assert of(chunk(50, kind="tool")).ttfo == pytest.approx(0.05)


def test_two_events_of_one_read_are_nothing_apart_and_both_kept() -> None:
    assert of(chunk(100), chunk(100), chunk(200)).gaps == pytest.approx((0.0, 0.1))


def test_a_late_usage_moves_the_closing_only() -> None:
    one = of(chunk(200), chunk(300), closed=0.6, completion_tokens=2)
    assert (one.e2e, one.e2e_closed) == pytest.approx((0.3, 0.6))


def test_a_count_of_chunks_says_that_it_is_one() -> None:
    one = of(chunk(100), chunk(200), chunk(300))
    assert (one.tokens, one.source, one.tokens_per_chunk) == (3, "chunks", (1, 1, 1))
    assert one.tpot == pytest.approx(0.1)


@pytest.mark.parametrize(
    "outcome", ["http", "stream_error", "truncated", "timeout", "protocol", "hung_up", "unfinished"]
)
def test_a_failed_answer_keeps_its_first_token_apart(outcome: Any) -> None:
    one = of(chunk(30), chunk(40), chunk(50), outcome=outcome, closed=0.05, completion_tokens=3)
    assert not one.whole
    assert one.ttft == pytest.approx(0.03)
    assert (one.tpot, one.e2e, one.e2e_closed, one.norm_latency) == (None, None, None, None)
    assert (one.itl_est, one.fluidity, one.qoe) == ((), None, None)


def test_an_empty_answer_is_whole_and_has_no_figure() -> None:
    one = of(completion_tokens=0, finish="stop", closed=0.3)
    assert one.whole
    assert (one.ttft, one.ttft_service, one.ttfo, one.tpot, one.e2e, one.norm_latency) == (None,) * 6
    assert (one.fluidity, one.qoe, one.tokens, one.tokens_per_chunk) == (None, None, 0, ())
    assert one.e2e_closed == pytest.approx(0.3)


def test_nothing_at_all() -> None:
    one = of(outcome="connect", sent=None)
    assert (one.tokens, one.source, one.counted) == (0, None, 0)
    assert (one.ttft, one.ttft_service) == (None, None)


def test_a_usage_below_the_chunks_divides_nothing_by_nothing() -> None:
    one = of(chunk(100), chunk(200), completion_tokens=1)
    assert (one.tpot, one.tokens, one.counted, one.itl_est) == (None, 1, 2, ())
    assert of(chunk(100), chunk(200), completion_tokens=0).norm_latency is None


def test_the_tail_is_the_mean_of_the_longest_tenth() -> None:
    assert tail((0.1,)) is None
    assert tail((0.1, 0.4)) == pytest.approx(0.4)
    assert tail(tuple(range(1, 21))) == pytest.approx(19.5)
    assert tail(tuple(range(1, 22))) == pytest.approx(20)


def test_a_stall_is_long_for_a_reader_and_for_this_answer() -> None:
    assert stalled_gaps((0.01, 0.01, 0.2, 0.21)) == [0.21]
    assert stalled_gaps((0.15, 0.15, 0.15, 0.44)) == []
    assert stalled_gaps((0.15, 0.15, 0.15, 0.46)) == [0.46]
    one = figures(record(chunk(0), chunk(10), chunk(20), chunk(120)), stall_s=0.05)
    assert (one.stalls, one.stalled) == pytest.approx((1, 0.1))


PACE = Pace(first=1.0, each=0.1)


@pytest.mark.parametrize(
    ("arrivals", "index"),
    [
        ([1.0, 1.1, 1.2], 1.0),
        # Early: 0.5 s banked, and spent by a gap of 0.6.
        ([0.5, 1.1, 1.2], 1.0),
        # 0.05 late: one deadline missed; the next counts from there.
        ([1.05, 1.15], 1 / 2),
        # 0.25 late: three deadlines passed.
        ([1.0, 1.35, 1.45], 2 / 5),
        # 2 s late from the start.
        ([3.05], 0.0),
        # Five at once bank four.
        ([1.0, 1.1, 1.1, 1.1, 1.1, 1.5], 1.0),
        ([1.0, 1.1, 1.1, 1.1, 1.1, 1.61], 5 / 7),
    ],
)
def test_fluidity_counts_deadlines(arrivals: list[float], index: float) -> None:
    assert fluidity(arrivals, PACE) == pytest.approx(index)


@pytest.mark.parametrize(
    ("arrivals", "quality"),
    [
        ([1.0, 1.1, 1.2], 1.0),
        ([0.1, 0.1, 0.1], 1.0),
        # Wanted 1.0, 1.1, came 1.1, 1.2: 0.2 behind of (1.2 - 1.0) + (1.2 - 1.1).
        ([1.1, 1.2], 1 - 0.2 / 0.3),
        # Nobody reads two at once: read at 1.5, 1.6.
        ([1.5, 1.5], 1 - 1.0 / (0.6 + 0.5)),
        ([2.0], 0.0),
        ([0.9], 1.0),
    ],
)
def test_quality_is_what_the_reader_is_not_kept_waiting(arrivals: list[float], quality: float) -> None:
    assert qoe(arrivals, PACE) == pytest.approx(quality)


def test_of_nothing_there_is_neither() -> None:
    assert (fluidity([], PACE), qoe([], PACE)) == (None, None)


def test_the_tokens_of_a_chunk_come_together() -> None:
    """Eleven tokens in the first second and a stop of 1.2 s, which the ten that were early pay for."""
    bundled = of(chunk(900, 12), chunk(2100, 1), completion_tokens=13)
    single = of(chunk(900, 1), chunk(2100, 1), completion_tokens=2)
    assert bundled.fluidity == 1.0
    assert single.fluidity is not None
    assert single.fluidity < 0.2
