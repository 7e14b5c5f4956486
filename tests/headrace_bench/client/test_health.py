from __future__ import annotations

import asyncio
import gc
import time

import msgspec
import pytest

from headrace_bench.client.health import Machine, Monitor, Sample, judge, with_reasons
from headrace_bench.load.schedule import Planned, Schedule
from headrace_bench.record import Chunk, Record


def looks(*parts: tuple[int, float, float]) -> tuple[Sample, ...]:
    """Looks a tenth of a second apart: so many with this lag, while so many cores are used, one part after another."""
    found, at, cpu = [Sample(0.0, None, 0.0)], 0.0, 0.0
    for count, lag, cores in parts:
        for _ in range(count):
            at, cpu = at + 0.1, cpu + 0.1 * cores
            found.append(Sample(at, lag, cpu))
    return (*found, Sample(at, None, cpu))


def machine(*parts: tuple[int, float, float]) -> Machine:
    """A quiet one for the eleven seconds of the load, if nothing else is said."""
    return Machine(looks(*(parts or [(110, 0.0001, 0.2)])), gc_pauses=(), load_average=0.5, steal=0.0)


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
    assert health.cpu == pytest.approx(0.2)
    assert health.load_average == 0.5
    assert health.steal == 0.0


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
    found = judge(schedule(users=4), [], machine((100, 0.0001, 0.2), (10, 0.02, 0.2)))
    assert "woke late" in found.invalid[0]
    assert (found.loop_lag_p99, found.loop_lag_max) == (0.02, 0.02)


@pytest.mark.parametrize(("missing", "valid"), [(0, True), (1, False)])
def test_requests_that_were_not_sent(missing: int, valid: bool) -> None:
    found = judge(schedule(), records(count=100 - missing), machine()).invalid
    assert (not found) is valid


def test_one_that_is_late_at_the_end_of_the_window_was_sent() -> None:
    last = records()
    last[99] = msgspec.structs.replace(last[99], scheduled=10.9999, dispatched=11.0048)
    planned = schedule()
    moved = msgspec.structs.replace(planned.requests[99], at=10.9999)
    planned = msgspec.structs.replace(planned, requests=(*planned.requests[:99], moved))
    health = judge(planned, last, machine())
    assert (health.asked_rate, health.sent_rate, health.invalid) == (10.0, 10.0, ())
    last[99] = msgspec.structs.replace(last[99], dispatched=11.5)
    assert "9.90 requests/s were sent of 10.00" in judge(planned, last, machine()).invalid[0]


def test_a_client_that_has_used_most_of_its_core() -> None:
    assert "75% of a core" in judge(schedule(), records(), machine((110, 0.0001, 0.75))).invalid[0]
    assert not judge(schedule(), records(), machine((110, 0.0001, 0.69))).invalid


def test_only_the_window_is_looked_at() -> None:
    """After a second that warms up come ten that count, and then a long drain in which nothing happens."""
    busy = judge(schedule(), records(), machine((10, 0.0, 0.0), (100, 0.006, 0.8), (2000, 0.0, 0.0)))
    assert busy.cpu == pytest.approx(0.8)
    assert busy.loop_lag_p99 == 0.006
    assert len(busy.invalid) == 2
    calm = judge(schedule(), records(), machine((10, 0.05, 1.0), (101, 0.0001, 0.2), (10, 0.05, 1.0)))
    assert calm.cpu == pytest.approx(0.2)
    assert calm.loop_lag_max == 0.0001
    assert calm.invalid == ()


def test_a_timer_that_slept_through_the_window_is_of_it() -> None:
    slept = Machine((Sample(0.0, None, 0.0), Sample(20.0, 19.9, 2.0)), (), 0.5, None)
    assert judge(schedule(), records(), slept).loop_lag_max == 19.9


def test_a_load_that_is_over_before_its_window_is_looked_at_while_it_ran() -> None:
    short = judge(schedule(users=4), [], machine((20, 0.0001, 0.9)))
    assert short.cpu == pytest.approx(0.9)
    never = judge(schedule(users=4), [], machine((5, 0.0001, 0.4)), until=0.5)
    assert never.cpu == pytest.approx(0.4)
    assert judge(schedule(users=4), [], Machine((), (), 0.5, None)).cpu == 0.0


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
    health = with_reasons(judge(schedule(), records(), machine((110, 0.0, 1.0))), "interrupted")
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
    assert max(one.lag for one in seen.samples if one.lag is not None) > 0.02
    assert [one.at for one in seen.samples] == sorted(one.at for one in seen.samples)
    assert (seen.samples[0].lag, seen.samples[-1].lag) == (None, None)
    assert len(seen.gc_pauses) >= 1
    assert seen.samples[-1].cpu >= 0.03  # how much of a core it had is up to the machine
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
