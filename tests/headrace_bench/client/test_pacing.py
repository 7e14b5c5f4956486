from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from headrace_bench.client.pacing import Pacer
from virtual_time import run


def test_a_wait_ends_at_its_time_and_a_past_one_at_once() -> None:
    async def wait() -> list[float]:
        clock = asyncio.get_running_loop().time
        with Pacer(clock, spin=0, kernel=False) as pacer:
            found = []
            for at in (0.5, 0.5, 0.25, 3600.0):
                await pacer.until(at)
                found.append(clock())
            return found

    assert run(wait()) == [0.5, 0.5, 0.5, 3600.0]


@pytest.mark.parametrize("kernel", [True, False])
def test_it_never_wakes_early(kernel: bool) -> None:
    async def wait() -> list[float]:
        start = time.monotonic()
        found = []
        with Pacer(lambda: time.monotonic() - start, kernel=kernel) as pacer:
            for step in range(1, 11):
                await pacer.until(step * 0.0017)
                found.append(time.monotonic() - start - step * 0.0017)
        return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert min(runner.run(wait())) > -0.00001


def test_a_cancelled_wait_leaves_the_pacer_fit_for_the_next() -> None:
    async def wait() -> float:
        start = time.monotonic()
        with Pacer(lambda: time.monotonic() - start) as pacer:
            waiting = asyncio.create_task(pacer.until(60.0))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await pacer.until(0.002)
        return time.monotonic() - start

    assert 0.0019 < asyncio.run(wait()) < 30


def test_the_loop_goes_on_meanwhile() -> None:
    async def wait() -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        start = time.monotonic()
        counting = asyncio.create_task(count())
        with Pacer(lambda: time.monotonic() - start) as pacer:
            await pacer.until(0.02)
        counting.cancel()
        return turns

    assert asyncio.run(wait()) > 10
