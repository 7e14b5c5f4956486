from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_bench.figures import slo
from headrace_bench.figures.schema import Spread
from headrace_bench.figures.summary import Summary, decode, encode, summarise
from headrace_bench.load.schedule import Planned, Schedule
from headrace_bench.record import Chunk, Health, Outcome, Record

HEALTH = Health(
    lag_p50=0.0001,
    lag_p99=0.001,
    lag_max=0.002,
    loop_lag_p99=0.0005,
    loop_lag_max=0.003,
    cpu=0.2,
    gc_pauses=2,
    gc_longest=0.004,
    load_average=1.5,
    steal=None,
    asked_rate=1.0,
    sent_rate=1.0,
)
CHAT = slo.parse("chat")


def answer(index: int, *ms: float, outcome: Outcome = "ok", **fields: Any) -> Record:
    """A request due at `index` seconds whose tokens come so many ms later."""
    chunks = tuple(Chunk(index + at / 1000, "text", 4) for at in ms)
    known: dict[str, Any] = {"scheduled": float(index), "dispatched": index + 0.001, "sent": index + 0.002}
    closed = chunks[-1].at + 0.01 if chunks else index + 0.05
    return Record(
        index=index, outcome=outcome, chunks=chunks, **(known | {"closed": closed, "max_tokens": 16} | fields)
    )


def plan(n: int, users: int | None = None, **fields: Any) -> Schedule:
    requests = tuple(
        Planned(index=i, at=None if users else float(i), messages=(), max_tokens=16, prompt_tokens=40) for i in range(n)
    )
    known: dict[str, Any] = {"duration": float(n), "warmup": 0.0, "requests": requests}
    return Schedule(seed=1, kind="constant 1/s", users=users, **(known | fields))


def summary(*records: Record, schedule: Schedule | None = None, **fields: Any) -> Summary:
    made = summarise(schedule or plan(len(records)), records, HEALTH, CHAT, **fields)
    assert decode(encode(made)) == made
    assert "NaN" not in encode(made).decode()
    return made


def p50(spread: Spread) -> float | None:
    return spread.p50.value if spread.p50 else None


def test_failures_are_not_fast_successes() -> None:
    good = [answer(i, *range(100, 1001, 100), completion_tokens=10) for i in range(5)]
    bad = [
        answer(5, outcome="http", status=503),
        answer(6, outcome="http", status=429),
        answer(7, 30, 40, outcome="stream_error", status=200),
        answer(8, 30, 40, outcome="stream_error", status=200),
        answer(9, 30, 40, 50, outcome="truncated", status=200),
    ]
    made = summary(*good, *bad)
    assert (made.counts.scheduled, made.counts.completed, made.counts.failed) == (10, 5, 5)
    assert made.counts.by_outcome == {"http": 2, "stream_error": 2, "truncated": 1}
    assert made.counts.by_status == {"429": 1, "503": 1}
    assert made.counts.tokens == 50
    assert p50(made.figures.e2e_ms) == pytest.approx(1000)
    assert p50(made.figures.ttft_ms) == pytest.approx(100)
    assert made.figures.ttft_ms.count == made.figures.tpot_ms.count == 5
    assert made.figures.gap_ms.count == 45
    assert made.counts.partial_ttft_ms.count == 3
    assert p50(made.counts.partial_ttft_ms) == pytest.approx(30)
    assert made.attainment.attainment is not None
    assert made.attainment.attainment.value == 0.5
    assert made.attainment.goodput_per_s == 0.5
    assert {name: limit.attainment.value for name, limit in made.attainment.limits.items() if limit.attainment} == {
        "ttft": 0.5,
        "tpot": 0.5,
        "stall": 0.5,
    }


def test_all_failed() -> None:
    made = summary(*(answer(i, outcome="connect", sent=None) for i in range(4)))
    assert (made.counts.completed, made.counts.failed) == (0, 4)
    assert made.figures.ttft_ms == Spread(count=0)
    assert made.effective is None
    assert made.attainment.goodput_per_s == 0
    assert made.attainment.apdex == 0


def test_one_token_each() -> None:
    made = summary(*(answer(i, 100, completion_tokens=1) for i in range(4)))
    assert (made.figures.ttft_ms.count, made.figures.tpot_ms.count, made.figures.gap_ms.count) == (4, 0, 0)
    assert made.figures.tpot_ms == made.figures.gap_ms == made.figures.itl_est_ms == Spread(count=0)
    assert made.attainment.good == 4


def test_one_request_of_two_tokens() -> None:
    made = summary(answer(0, 100, 150, completion_tokens=2))
    for spread in (made.figures.tpot_ms, made.figures.gap_ms, made.figures.longest_gap_ms):
        assert spread.p50 is not None
        assert (spread.p50.value, spread.max) == pytest.approx((50, 50))
        assert (spread.p50.low, spread.p50.high, spread.p99) == (None, None, None)
        assert spread.p50 == spread.p95


def test_an_empty_answer_is_completed_and_not_good() -> None:
    made = summary(answer(0, completion_tokens=0, finish="stop"), answer(1, 100, 150))
    assert (made.counts.completed, made.counts.empty, made.counts.failed) == (2, 1, 0)
    assert made.figures.ttft_ms.count == 1
    assert made.attainment.good == 1


def test_nothing_at_all() -> None:
    made = summary(schedule=plan(0))
    assert made.counts.scheduled == 0
    assert made.attainment.attainment is None
    assert (made.attainment.goodput_per_s, made.rates.sent_per_s, made.rates.tokens_per_s) == (None, None, None)
    assert (made.attainment.apdex, made.chunks.mean, made.cache.share, made.split) == (None, None, None, None)


def test_due_and_never_sent_is_a_failure() -> None:
    made = summary(answer(0, 100), schedule=plan(4))
    assert (made.counts.scheduled, made.counts.failed, made.counts.by_outcome) == (4, 3, {"never_sent": 3})
    assert made.attainment.attainment is not None
    assert made.attainment.attainment.value == 0.25
    assert made.attainment.apdex == 0.25


def test_a_closed_loop_owes_only_what_it_began() -> None:
    made = summary(answer(0, 100, scheduled=None), schedule=plan(4, users=1))
    assert (made.loop, made.counts.scheduled, made.rates.asked_per_s) == ("closed", 1, None)
    assert p50(made.figures.ttft_ms) == pytest.approx(99)
    assert [one.offered for one in made.arrivals] == [None] * 3


def test_warm_up_counts_nowhere() -> None:
    schedule = plan(20)
    first = tuple(msgspec.structs.replace(p, phase="warmup") if p.index < 10 else p for p in schedule.requests)
    schedule = msgspec.structs.replace(schedule, requests=first, warmup=10.0, duration=10.0)
    records = [answer(i, 900 if i < 10 else 100, phase="warmup" if i < 10 else "measure") for i in range(20)]
    made = summary(*records, schedule=schedule)
    assert (made.counts.scheduled, made.figures.ttft_ms.count) == (10, 10)
    assert made.figures.ttft_ms.max == pytest.approx(100)
    assert (made.rates.asked_per_s, made.rates.sent_per_s) == (1.0, 1.0)
    assert (made.warmup_s, made.window_s) == (10.0, 10.0)


def test_rates_count_what_came_inside_the_window() -> None:
    records = [answer(0, 100, 200), answer(1, 500, 1500, completion_tokens=9)]
    made = summary(*records, schedule=plan(2, duration=2.0))
    # Of nine tokens in two chunks, of which one came in time, half: 4.
    assert made.rates.completed_per_s == 0.5
    assert made.rates.tokens_per_s == (2 + 4) / 2


def test_a_99th_percentile_needs_368_requests() -> None:
    rng = random.Random(1)
    records = [answer(i, t := 100 + rng.random() * 50, t + 10, t + 20) for i in range(368)]
    assert summary(*records[:-1]).figures.ttft_ms.p99 is None
    made = summary(*records)
    for p in (made.figures.ttft_ms.p50, made.figures.ttft_ms.p90, made.figures.ttft_ms.p95, made.figures.ttft_ms.p99):
        assert p is not None
        assert p.low is not None
        assert p.high is not None
        assert p.low <= p.value <= p.high
    assert made.figures.gap_ms.p99 is not None
    assert made.figures.gap_ms.p99.high is not None


def test_each_part_of_a_load_by_itself() -> None:
    records = [
        answer(0, 100, tag="reader"),
        answer(1, 900, tag="long"),
        answer(2, 100, outcome="truncated", tag="long"),
    ]
    made = summary(*records)
    assert list(made.tags) == ["long", "reader"]
    assert (made.tags["long"].counts.scheduled, made.tags["long"].counts.failed) == (2, 1)
    assert p50(made.tags["long"].figures.ttft_ms) == pytest.approx(900)
    assert made.tags["reader"].attainment.good == 1
    assert summary(answer(0, 100, tag="a"), answer(1, 100, tag="a")).tags == {}


def test_chunks_that_are_not_tokens_are_said_beside_every_gap() -> None:
    exact = [Chunk(0.1, "text", 4, 1), Chunk(0.2, "text", 20, 5), Chunk(0.3, "text", 20, 5)]
    made = summary(msgspec.structs.replace(answer(0, 100), chunks=tuple(exact)))
    assert made.chunks.tokens_per_chunk == {"1": 1, "5": 2}
    assert made.notes == ("chunks carry up to 5 tokens (p99): gaps are between chunks, not between tokens",)
    told = summary(answer(0, 100, 200, completion_tokens=8))
    assert (told.chunks.untold, told.chunks.tokens_per_chunk, told.chunks.mean) == (1, {}, 4.0)
    assert told.notes == ("4.00 tokens a chunk in the mean: gaps are between chunks, not between tokens",)
    assert summary(answer(0, 100, 200, completion_tokens=2)).notes == ()


def test_counts_that_differ_are_both_reported() -> None:
    made = summary(answer(0, 100, 200, completion_tokens=8), answer(1, 100), answer(2, 100, completion_tokens=1))
    tokens = made.tokens
    assert (tokens.usage, tokens.chunks, tokens.differ, tokens.by_usage, tokens.by_chunks) == (2, 1, 1, 8, 2)


def test_lengths_and_cache() -> None:
    made = summary(
        answer(0, 100, 200, completion_tokens=2, prompt_tokens=50, cached_tokens=20),
        answer(1, 100, 200, completion_tokens=2, prompt_tokens=30, cached_tokens=0),
        answer(2, 100, 200),
    )
    assert (p50(made.lengths.prompt_asked), made.lengths.prompt_counted.count, made.lengths.prompt_counted.max) == (
        40,
        2,
        50,
    )
    assert (p50(made.lengths.output_asked), p50(made.lengths.output_achieved)) == (16, 2)
    assert (made.cache.requests, made.cache.cached_tokens, made.cache.share) == (2, 20, 0.25)


def test_a_server_s_own_timeline_splits_the_first_token() -> None:
    timeline = {"queue": 10.0, "prefill": 60.0, "ttft": 70.0, "cached_tokens": 3.0, "sampled": None}
    made = summary(answer(0, 100, server=timeline), answer(1, 100))
    assert list(made.stages) == ["queue", "prefill"]
    assert p50(made.stages["prefill"]) == 60
    assert made.split is not None
    parts = (made.split.client_ms, made.split.network_ms, made.split.server_ms)
    assert [p50(part) for part in parts] == pytest.approx([2, 28, 70])
    assert [part.count for part in parts] == [1, 1, 1]


def test_arrivals_offered_and_achieved() -> None:
    rng = random.Random(5)
    records = [answer(i, 100, dispatched=i + (0.9 if rng.random() < 0.5 else 0.0)) for i in range(100)]
    one, ten, sixty = summary(*records).arrivals
    assert (one.window_s, one.offered, ten.offered, sixty.offered) == (1.0, 0.0, 0.0, None)
    assert one.achieved == 0.0


def test_later_turns_are_no_arrivals_of_an_open_loop() -> None:
    first = [answer(i, 100) for i in range(100)]
    later = [answer(i, 100, scheduled=None, dispatched=i - 99.5) for i in range(100, 110)]
    schedule = plan(100)
    turns = tuple(msgspec.structs.replace(schedule.requests[0], index=i, at=None, turn=1) for i in range(100, 110))
    schedule = msgspec.structs.replace(schedule, requests=(*schedule.requests, *turns))
    made = summary(*first, *later, schedule=schedule)
    assert made.counts.scheduled == 110
    assert made.rates.asked_per_s == made.rates.sent_per_s == 1.0
    assert [(one.offered, one.achieved) for one in made.arrivals[:2]] == [(0.0, 0.0)] * 2
    closed = summary(*first, *later, schedule=plan(110, users=3, duration=100.0))
    assert closed.rates.sent_per_s == 1.1
    assert (closed.arrivals[0].achieved or 0.0) > 0


def test_what_was_sent_again_is_counted() -> None:
    assert summary(answer(0, 100, resent=True), answer(1, 100)).counts.resent == 1
    before = encode(summary(answer(0, 100))).replace(b'"resent": 0,', b"")
    assert b"resent" not in before
    assert decode(before).counts.resent == 0  # a file from before there was such a count


def test_an_invalid_run_says_so_on_top() -> None:
    sick = msgspec.structs.replace(HEALTH, invalid=("sent 9 of 10 requests a second",))
    made = summarise(plan(1), [answer(0, 100)], sick, CHAT)
    assert (made.valid, made.invalid) == (False, ("sent 9 of 10 requests a second",))
    top = list(json.loads(encode(made)))
    assert top[:3] == ["schema", "valid", "invalid"]
    assert made.health.lag_p99_ms == 1.0


def test_another_schema_is_not_read_as_this_one() -> None:
    data = encode(summary(answer(0, 100))).replace(b'"counts"', b'"numbers"')
    with pytest.raises(msgspec.ValidationError):
        decode(data)


def test_every_field_is_explained_on_its_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "bench_summary.md").read_text()
    missing = sorted(name for name in _fields(msgspec.inspect.type_info(Summary)) if f"`{name}`" not in page)
    assert missing == []


def _fields(kind: msgspec.inspect.Type) -> set[str]:
    found = set[str]()
    if isinstance(kind, msgspec.inspect.StructType):
        for field in kind.fields:
            found |= {field.encode_name} | _fields(field.type)
    elif isinstance(kind, msgspec.inspect.UnionType):
        for one in kind.types:
            found |= _fields(one)
    elif isinstance(kind, msgspec.inspect.DictType):
        found |= _fields(kind.value_type)
    elif isinstance(kind, msgspec.inspect.VarTupleType):
        found |= _fields(kind.item_type)
    return found
