from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import pytest

from headrace_bench.client.health import Machine, Monitor, judge, with_reasons
from headrace_bench.load.schedule import Planned, Schedule
from headrace_bench.record import Chunk, Record


def machine(**more: Any) -> Machine:
    quiet: dict[str, Any] = {
        "loop_lags": (0.0001,) * 100, "cpu": 0.2, "gc_pauses": (), "load_average": 0.5, "steal": 0.0
    }  # fmt: skip
    return Machine(**{**quiet, **more})


def schedule(count: int = 100, users: int | None = None) -> Schedule:
    """Ten a second, after one second of warming up."""
    requests = tuple(
        Planned(
            index=i, at=1 + i / 10 if users is None else None, messages=(), max_tokens=1, prompt_tokens=1
        )
        for i in range(count)
    )  # fmt: skip
    return Schedule(seed=1, kind="constant", users=users, duration=10.0, warmup=1.0, requests=requests)


def records(lag: float = 0.0001, ttft: float = 0.02, count: int = 100, phase: str = "measure") -> list[Record]:
    return [
        Record(
            index=i,
            scheduled=1 + i / 10,
            dispatched=1 + i / 10 + lag,
            outcome="ok",
            phase=phase,
            chunks=(Chunk(at=1 + i / 10 + ttft, kind="text", size=3),),
        )
        for i in range(count)
    ]


def test_a_client_that_kept_up_is_valid() -> None:
    health = judge(schedule(), records(), machine())
    assert health.invalid == ()
    assert health.asked_rate == health.sent_rate == 10.0
    assert health.lag_p99 == pytest.approx(0.0001)
    assert (health.cpu, health.load_average, health.steal) == (0.2, 0.5, 0.0)


@pytest.mark.parametrize(
    ("lag", "ttft", "valid"),
    [
        (0.0049, 0.02, True),
        (0.0051, 0.02, False),
        (0.009, 0.2, True),  # the limit is 5 % of 200 ms
        (0.011, 0.2, False),
    ],
)
def test_requests_that_are_sent_late(lag: float, ttft: float, valid: bool) -> None:
    found = judge(schedule(), records(lag, ttft), machine()).invalid
    assert (not found) is valid
    if found:
        assert "sent late" in found[0]


def test_one_late_request_in_a_hundred_is_past_the_ninety_ninth_percentile() -> None:
    late = records()
    for index in (5, 6):
        late[index] = Record(index=index, scheduled=1.5, dispatched=1.6, outcome="ok")
    assert judge(schedule(), late[:5] + late[6:], machine()).lag_p99 == pytest.approx(0.1)
    assert judge(schedule(), late, machine()).lag_max == pytest.approx(0.1)


def test_a_loop_that_wakes_late() -> None:
    found = judge(schedule(users=4), [], machine(loop_lags=(0.0001,) * 90 + (0.02,) * 10))
    assert "woke late" in found.invalid[0]
    assert (found.loop_lag_p99, found.loop_lag_max) == (0.02, 0.02)


@pytest.mark.parametrize(("missing", "valid"), [(0, True), (1, False)])
def test_requests_that_were_not_sent(missing: int, valid: bool) -> None:
    found = judge(schedule(), records(count=100 - missing), machine()).invalid
    assert (not found) is valid


def test_a_client_that_has_used_up_its_core() -> None:
    assert "95% of a core" in judge(schedule(), records(), machine(cpu=0.95)).invalid[0]
    assert not judge(schedule(), records(), machine(cpu=0.9)).invalid


def test_warming_up_does_not_count() -> None:
    slow = records(lag=2.0, phase="warmup")
    assert judge(schedule(), [*slow, *records()], machine()).invalid == ()


def test_a_closed_loop_asks_for_no_rate() -> None:
    health = judge(schedule(users=3), [], machine())
    assert health.asked_rate is health.sent_rate is health.lag_p50 is health.lag_max is None
    assert health.invalid == ()


def test_what_was_due_after_an_interrupt_was_not_asked_for() -> None:
    health = judge(schedule(), records(count=50), machine(), until=6.0)
    assert health.asked_rate == health.sent_rate == 10.0
    early = judge(schedule(), [], machine(), until=0.5)
    assert early.asked_rate is None


def test_more_reasons_come_last() -> None:
    health = with_reasons(judge(schedule(), records(), machine(cpu=1.0)), "interrupted")
    assert len(health.invalid) == 2
    assert health.invalid[1] == "interrupted"


def test_the_monitor_sees_a_loop_that_is_held_and_a_collection() -> None:
    stats = iter(["cpu 10 0 10 80 0 0 0 0 0 0\n", "cpu 20 0 20 150 0 0 0 10 0 0\n"])

    async def work() -> Machine:
        with Monitor(every_s=0.001, stat=lambda: next(stats)) as monitor:
            await asyncio.sleep(0.002)
            gc.collect()
            begun = time.process_time()
            while time.process_time() < begun + 0.03:
                pass
            await asyncio.sleep(0.002)
        return monitor.machine()

    frozen, threshold = gc.get_freeze_count(), gc.get_threshold()
    seen = asyncio.run(work())
    assert max(seen.loop_lags) > 0.02
    assert len(seen.gc_pauses) >= 1
    assert seen.cpu > 0  # how much of a core it had is up to the machine
    assert seen.steal == pytest.approx(0.1)
    assert gc.get_threshold() == threshold
    assert gc.get_freeze_count() == frozen
    assert not [callback for callback in gc.callbacks if getattr(callback, "__self__", None).__class__ is Monitor]


@pytest.mark.parametrize("text", ["", "cpu 1 2 3\n", "cpu a b\n"])
def test_a_system_that_does_not_tell_of_steal(text: str) -> None:
    async def work() -> Machine:
        with Monitor(stat=lambda: text) as monitor:
            await asyncio.sleep(0)
        return monitor.machine()

    assert asyncio.run(work()).steal is None
