from __future__ import annotations

import msgspec
import pytest

from bench_runs import answered, failed
from headrace_bench.report.series import points, slowest


def test_a_point_is_in_milliseconds() -> None:
    [point] = points([answered(3, 2.0, ttft=0.2, gaps=(0.01, 0.03))])
    assert point.ttft == pytest.approx(200)
    assert point.service == pytest.approx(197.5)
    assert point.e2e == pytest.approx(240)
    assert [round(ms, 6) for _, ms in point.gaps] == [10, 30]
    assert [round(at, 6) for at, _ in point.gaps] == [2.21, 2.24]


def test_they_are_in_order_of_time_and_a_closed_loop_has_one_too() -> None:
    closed = msgspec.structs.replace(answered(0, 5.0), scheduled=None)
    assert [point.index for point in points([closed, answered(1, 5.0005), failed(2, 1.0)])] == [2, 1, 0]


def test_a_cache_is_told_by_either_side() -> None:
    record = answered(0, 0.0)
    told = msgspec.structs.replace(record, server={**(record.server or {}), "cached_tokens": 7.0})
    usage = msgspec.structs.replace(record, server=None, cached_tokens=5)
    assert [points([one])[0].cached_tokens for one in (told, usage, record)] == [7, 5, 0]


def test_the_slowest_come_first_and_failures_never() -> None:
    ends = [answered(i, i, ttft=0.1 * (1 + i % 3) + 0.01 * i) for i in range(6)]
    assert [point.index for point in slowest(points([*ends, failed(9, 9.0)]), 3)] == [5, 2, 4]
