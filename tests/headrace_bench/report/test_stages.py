from __future__ import annotations

import random

import msgspec
import pytest

from bench_runs import answered, failed
from headrace_bench.record import Record
from headrace_bench.report.stages import NETWORK, REST, UNTOLD, split


def ns(record: Record) -> int:
    start = record.dispatched if record.scheduled is None else record.scheduled
    return round(record.chunks[0].at * 1e9) - round(start * 1e9)


def test_every_part_of_a_told_ttft() -> None:
    record = answered(0, 2.0, ttft=0.2)
    parts = split(record)
    assert parts is not None
    assert parts.told
    got = {name: round(ms, 6) for name, ms in parts.by_name().items()}
    server = {name: ms for name, ms in (record.server or {}).items() if ms and name != "ttft"}
    assert got == {
        "lag": 1.0, "connect": 1.0, "send": 0.5, "network": pytest.approx(200 - 2.5 - sum(server.values())), **server
    }  # fmt: skip
    assert [stage.side for stage in parts.stages] == ["client"] * 3 + ["network"] + ["server"] * 8
    assert parts.side_ms("client") == 2.5
    assert parts.ttft_ms == pytest.approx(200.0, abs=1e-9)


def test_another_server_has_one_part() -> None:
    parts = split(answered(0, 0.0, told=False))
    assert parts is not None
    assert not parts.told
    assert [stage.name for stage in parts.stages] == ["lag", "connect", "send", UNTOLD]
    assert parts.by_name()[UNTOLD] == pytest.approx(197.5)


def test_nothing_to_split_without_a_token() -> None:
    assert split(failed(0, 1.0)) is None


def test_a_closed_loop_begins_when_its_task_does() -> None:
    parts = split(msgspec.structs.replace(answered(0, 5.0), scheduled=None))
    assert parts is not None
    assert parts.by_name()["lag"] == 0
    assert parts.ttft_ms == pytest.approx(199.0)


def test_a_server_longer_than_the_wait_for_it_is_an_overlap() -> None:
    record = msgspec.structs.replace(answered(0, 0.0, ttft=0.1), server={"receive": 0.2, "prefill": 97.6, "ttft": 97.8})
    parts = split(record)
    assert parts is not None
    assert parts.overlap_ms == pytest.approx(0.3)
    assert parts.by_name()[NETWORK] == 0
    assert parts.by_name()["send"] == pytest.approx(0.2)
    assert parts.by_name()["prefill"] == pytest.approx(97.6)
    assert parts.ttft_ms == pytest.approx(100)


def test_a_server_longer_than_everything_still_adds_up() -> None:
    record = msgspec.structs.replace(answered(0, 0.0, ttft=0.1), server={"queue": 50.0, "prefill": 300.0})
    parts = split(record)
    assert parts is not None
    assert parts.ttft_ms == pytest.approx(100)
    assert parts.by_name() == {
        "lag": 0, "connect": 0, "send": 0, "network": 0, "queue": 0, "prefill": pytest.approx(100)
    }  # fmt: skip
    assert parts.overlap_ms == pytest.approx(252.5)


def test_what_the_stages_leave_out_is_rest_but_rounding_is_not() -> None:
    record = answered(0, 0.0)
    part = split(msgspec.structs.replace(record, server={"prefill": 100.0, "ttft": 130.0}))
    assert part is not None
    assert part.by_name()[REST] == 30
    close = split(msgspec.structs.replace(record, server={"prefill": 100.0, "ttft": 100.004}))
    assert close is not None
    assert REST not in close.by_name()
    assert split(msgspec.structs.replace(record, server={"ttft": None, "cached_tokens": 3.0})).told is False  # type: ignore[union-attr]


def test_sums_are_exact_and_parts_never_negative() -> None:
    draw = random.Random(3)
    for i in range(500):
        record = answered(i, draw.uniform(0, 1e4), ttft=draw.uniform(0.0001, 2.0))
        stamps = {
            name: draw.choice((None, record.dispatched + draw.uniform(-0.1, 0.3))) for name in ("connected", "sent")
        }
        server = {name: draw.uniform(0, draw.choice((0.1, 500))) for name in ("queue", "prefill", "deliver")}
        parts = split(msgspec.structs.replace(record, **stamps, server=draw.choice((server, None))))
        assert parts is not None
        assert sum(stage.ns for stage in parts.stages) == ns(record)
        assert all(stage.ns >= 0 for stage in parts.stages)
