from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headrace_bench.figures.backlog import backlog
from headrace_bench.load.schedule import Schedule
from headrace_bench.record import Record
from made_runs import record, schedule


def queue(rate: float, service: float, seed: int, seconds: float = 60.0) -> tuple[Schedule, list[Record]]:
    """One server, Poisson arrivals, exponential service; a warm-up of 20 s before the window."""
    rng = np.random.default_rng(seed)
    at, free = 0.0, 0.0
    found: list[Record] = []
    while (at := at + float(rng.exponential(1 / rate))) < 20.0 + seconds:
        free = max(free, at) + float(rng.exponential(service))
        found.append(record(len(found), at, free - at, gap=0.0, tokens=1))
    return msgspec.structs.replace(schedule(n=1, duration=seconds), warmup=20.0), found


def test_the_level_is_what_is_in_flight() -> None:
    asked = schedule(n=10, duration=10.0)
    found = backlog(asked, [record(i, float(i), 0.5, gap=0.0, tokens=1) for i in range(10)])
    assert found is not None
    assert found.mean == pytest.approx(0.5)
    assert not found.growing


def test_requests_that_never_end_pile_up() -> None:
    asked = schedule(n=40, duration=10.0)
    stuck = [msgspec.structs.replace(record(i, i / 4, 9.0), closed=None) for i in range(40)]
    found = backlog(asked, stuck)
    assert found is not None
    assert found.slope == pytest.approx(4.0, rel=0.05)
    assert found.growing


def test_an_answer_that_was_done_and_lingered_is_not_in_flight() -> None:
    asked = schedule(n=40, duration=10.0)
    whole = [record(i, i / 4, 0.5, gap=0.0, tokens=1) for i in range(40)]
    lingered = [msgspec.structs.replace(one, done=one.closed, closed=None) for one in whole]
    assert backlog(asked, lingered) == backlog(asked, whole)


def test_overload_grows_and_a_steady_queue_seldom_does() -> None:
    def share(rate: float) -> int:
        trends = [backlog(*queue(rate, 0.1, seed)) for seed in range(20)]
        return sum(trend is not None and trend.growing for trend in trends)

    assert share(14.0) >= 19
    assert share(5.0) <= 1
    assert share(7.0) <= 2


def test_users_have_no_backlog_and_nothing_has_no_trend() -> None:
    asked = schedule()
    assert backlog(asked, []) is None
    assert backlog(msgspec.structs.replace(asked, users=3), [record(0, 0.0, 0.1)]) is None
