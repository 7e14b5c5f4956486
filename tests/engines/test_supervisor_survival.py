"""Live streams and a worker that dies or hangs: whatever happens, a reader has the text of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.fatal_engine import ALWAYS, HANG, ONCE
from engines.watched import Stream, Watched, next_turn, run, scripted, serving, soon
from headrace.core.admission import Bounds
from headrace.core.errors import EngineUnavailable, Overloaded
from headrace.core.events import Admitted, Delta, Event, Failed
from headrace.core.request import Generation, Sampling
from headrace.engines import supervisor
from headrace.engines.worker import Blueprint
from headrace.testing import ManualClock, collect

TWICE = "the engine stopped twice while it worked on this request; it is not tried again"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts do not wait."""
    monkeypatch.setattr(supervisor, "_BACKOFF_FIRST", 0.0)


@pytest.fixture
def doom(tmp_path: Path) -> Path:
    """While this file is there, the worker dies of a prompt that begins with ONCE."""
    return tmp_path / "doom"


@pytest.fixture
def fatal(doom: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Blueprint]:
    """Blueprints of `fatal_engine`."""
    own = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH")))))

    def blueprint(limits: dict[str, Any] | None = None, **settings: Any) -> Blueprint:
        return Blueprint("fatal_engine:make", {"doom": str(doom), "n_ctx": 64, **settings}, limits or {})

    return blueprint


def arm(doom: Path) -> None:
    """The next prompt that begins with ONCE kills its worker."""
    doom.touch()


def disarmed(doom: Path) -> bool:
    """A worker has died."""
    return not doom.exists()


def batch(first: int, *head: int) -> list[Generation]:
    """Four different streams, five choices; the first one's prompt begins with `head`."""
    return [
        Generation(first, [*head, 9, 9], 13, sampling=Sampling(seed=3)),
        Generation(first + 1, [1, 2, 3], 14, n=2, sampling=Sampling(seed=5)),
        Generation(first + 2, [4, 5, 6, 7], 20, stop=("<s", "日")),
        Generation(first + 3, [8, 7], 11, sampling=Sampling(seed=8, logprobs=2)),
    ]


async def answers(streams: list[Stream]) -> list[Any]:
    for stream in streams:
        await soon(stream.over)
    return [stream.answer() for stream in streams]


async def undisturbed(blueprint: Blueprint, *batches: list[Generation]) -> list[Any]:
    """The answers of all batches, each from a worker that nothing happens to."""
    async with serving(blueprint) as engine:
        return [await answers([Stream(engine, g) for g in generations]) for generations in batches]


# --- one death


def test_a_death_before_any_token_changes_no_answer(fatal: Callable[..., Blueprint], doom: Path) -> None:
    async def main() -> None:
        batches = [batch(10 * k, ONCE, k) for k in range(13)]
        expected = await undisturbed(fatal(), *batches)
        clock = ManualClock()
        async with serving(fatal(step_s=0.001), clock) as engine:
            for k, generations in enumerate(batches):
                arm(doom)
                streams = [Stream(engine, g) for g in reversed(generations)]  # it dies in company
                got = await answers(streams[::-1])
                assert disarmed(doom)
                assert got == expected[k], f"killed before token {k}"
                assert engine.restarts == k + 1
                clock.advance(61)
            assert engine.given_up == 0
            assert engine.replayed >= 13 * 2

    run(main)


def test_a_death_at_any_event_changes_no_answer(fatal: Callable[..., Blueprint]) -> None:
    """From outside, while the worker computes: it may be a token or two further than its readers."""

    async def main() -> None:
        generations = batch(0, 9)
        (expected,) = await undisturbed(fatal(), generations)
        clock = ManualClock()
        async with serving(fatal(step_s=0.001), clock) as engine:
            for at in range(1, 40, 3):
                heard = 0

                class Killing(Stream):
                    def __call__(self, event: Event) -> None:
                        nonlocal heard
                        heard += 1
                        if heard == at:  # noqa: B023 - it is gone before the next turn
                            assert engine.pid is not None
                            os.kill(engine.pid, signal.SIGKILL)
                        super().__call__(event)

                assert await answers([Killing(engine, g) for g in generations]) == expected, f"killed at event {at}"
                await soon(engine.down.get())
                await soon(engine.up.get())
                clock.advance(61)
            assert (engine.restarts, engine.given_up) == (13, 0)

    run(main)


def test_a_small_pool_does_not_stand_in_the_way(fatal: Callable[..., Blueprint], doom: Path) -> None:
    async def main() -> None:
        generations = batch(0, ONCE, 6)
        (expected,) = await undisturbed(fatal(), generations)
        arm(doom)
        async with serving(fatal({"max_running": 2, "prefill_chunk": 4, "prefill_chunk_busy": 2}, cells=64)) as engine:
            assert await answers([Stream(engine, g) for g in generations]) == expected
            assert engine.restarts == 1

    run(main)


# --- more than one


def test_who_kills_the_worker_twice_is_given_up_and_nobody_else(fatal: Callable[..., Blueprint]) -> None:
    async def main() -> None:
        (expected,) = await undisturbed(fatal(), batch(10, 9))
        clock = ManualClock()
        for k in (0, 5):
            async with serving(fatal(), clock) as engine:
                guilty = Stream(engine, Generation(1, [ALWAYS, k, 1], 20))
                innocent = [Stream(engine, g) for g in batch(10, 9)]
                assert await answers(innocent) == expected
                await soon(guilty.over)
                assert guilty[-1] == Failed(1, "engine_failed", TWICE)
                assert sum(isinstance(e, Failed) for e in guilty) == 1
                assert sum(e.tokens for e in guilty if isinstance(e, Delta)) <= k
                assert (engine.restarts, engine.given_up) == (2, 1)
                clock.advance(61)

    run(main)


def test_two_that_kill_the_worker(fatal: Callable[..., Blueprint]) -> None:
    async def main() -> None:
        (expected,) = await undisturbed(fatal(), batch(10, 9))
        async with serving(fatal()) as engine:
            first = Stream(engine, Generation(1, [ALWAYS, 4, 1], 20))
            innocent = [Stream(engine, g) for g in batch(10, 9)]
            second = Stream(engine, Generation(2, [ALWAYS, 2, 1], 20, n=2))
            assert await answers(innocent) == expected
            for guilty in (first, second):
                await soon(guilty.over)
                assert guilty.failure is not None
                assert guilty.failure.message == TWICE
            assert engine.given_up == 2
            assert engine.restarts in (3, 4), "the second may have been there at the first's death, or not yet"

    run(main)


def test_one_that_waits_is_nobody_s_accomplice(fatal: Callable[..., Blueprint]) -> None:
    async def main() -> None:
        async with serving(fatal({"max_running": 1})) as engine:
            guilty = Stream(engine, Generation(1, [ALWAYS, 0, 1], 20))
            behind = Stream(engine, Generation(2, [ALWAYS, 50, 1], 20))
            await soon(guilty.over)
            assert guilty.failure is not None
            await soon(behind.over)
            assert behind.failure is None
            assert (engine.restarts, engine.replayed) == (2, 1)

    run(main)


def test_a_second_kill_while_streams_are_put_back_costs_one_at_most(fatal: Callable[..., Blueprint]) -> None:
    async def main() -> None:
        generations = batch(0, 9)
        (expected,) = await undisturbed(fatal(), generations)
        async with serving(fatal(step_s=0.005)) as engine:
            streams = [Stream(engine, g) for g in generations]
            for stream in streams:
                await soon(stream.begun)
            await engine.kill()
            await soon(engine.up.get())
            await engine.kill()
            for stream in streams:
                await soon(stream.over)
            failed = [stream.failure for stream in streams if stream.failure]
            assert [f.message for f in failed] == [TWICE] * engine.given_up
            assert len(failed) <= 1
            assert all(s.answer() == want for s, want in zip(streams, expected, strict=True) if not s.failure)

    run(main)


def test_a_second_kill_while_the_model_loads_costs_nobody(fatal: Callable[..., Blueprint]) -> None:
    async def main() -> None:
        generations = batch(0, 9)
        (expected,) = await undisturbed(fatal(), generations)
        async with serving(fatal(step_s=0.005)) as engine:
            streams = [Stream(engine, g) for g in generations]
            await soon(streams[0].begun)
            first = engine.pid
            await engine.kill()
            while engine.pid == first:
                await soon(next_turn())
            await engine.kill()
            assert await answers(streams) == expected
            assert (engine.restarts, engine.given_up) == (2, 0)

    run(main)


def test_starts_that_come_to_nothing_end_the_streams(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fatal: Callable[..., Blueprint]
) -> None:
    async def main() -> None:
        async with serving(fatal(step_s=0.005)) as engine:
            stream = Stream(engine, Generation(1, [1], 60))
            await soon(stream.begun)
            engine._environment = {"PYTHONPATH": str(tmp_path)}
            await engine.kill()
            await soon(stream.over)
            assert stream[-1] == Failed(1, "engine_failed", supervisor._DIED)
            assert (engine._vain, engine.given_up) == (5, 1)

    run(main)


# --- what comes in meanwhile


def test_who_comes_during_the_first_restart_is_queued(fatal: Callable[..., Blueprint]) -> None:
    async def main() -> None:
        generations = batch(0, 9)
        (expected,) = await undisturbed(fatal(), generations)
        async with serving(fatal(), bounds=Bounds(4)) as engine:
            assert not engine.restarting
            await engine.kill()
            assert (engine.ready, engine.restarting) == (True, True)
            streams = [Stream(engine, g) for g in generations]
            with pytest.raises(Overloaded):
                Stream(engine, Generation(9, [1], 1))
            assert await answers(streams) == expected
            assert (engine.replayed, engine.restarting) == (0, False)

    run(main)


def test_who_comes_while_restarts_have_to_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(scripted(step_s=0.005)) as engine:
            stream = Stream(engine, Generation(1, [1], 500))
            await soon(stream.begun)
            await engine.kill()
            await soon(engine.up.get())
            monkeypatch.setattr(supervisor, "backoff", lambda failures: 3600.0)
            engine._quarantine.drop(1)
            await engine.kill()
            assert not engine.ready
            with pytest.raises(EngineUnavailable, match="restarted"):
                Stream(engine, Generation(2, [1], 1))
            assert not stream.over.done(), "who is there already waits"

    run(main)


def test_newcomers_wait_until_nobody_is_suspected(fatal: Callable[..., Blueprint], doom: Path) -> None:
    async def main() -> None:
        arm(doom)
        async with serving(fatal(step_s=0.001)) as engine:
            streams = [Stream(engine, g) for g in batch(0, ONCE, 4)]
            await soon(engine.down.get())
            guilty = Stream(engine, Generation(50, [ALWAYS, 0, 0], 5))
            innocent = Stream(engine, Generation(51, [3], 5))
            await answers(streams)
            await answers([innocent])
            await soon(guilty.over)
            assert guilty.failure is not None
            assert (engine.restarts, engine.given_up) == (3, 1)

    run(main)


def test_a_cancel_while_the_worker_is_down(fatal: Callable[..., Blueprint]) -> None:
    async def main() -> None:
        async with serving(fatal(step_s=0.005)) as engine:
            gone, stays = (Stream(engine, Generation(rid, [rid], 40)) for rid in (1, 2))
            await soon(gone.begun)
            await soon(stays.begun)
            await engine.kill()
            engine.cancel(1)
            told = len(gone)
            await answers([stays])
            assert len(gone) == told
            assert len(engine._streams) == 0
            assert engine.replayed == 1

    run(main)


def test_a_cancel_of_the_one_on_trial_lets_the_next_go_on(fatal: Callable[..., Blueprint]) -> None:
    async def main() -> None:
        async with serving(fatal(step_s=0.005)) as engine:
            streams = {rid: Stream(engine, Generation(rid, [rid], 40)) for rid in (1, 2, 3)}
            for stream in streams.values():
                await soon(stream.begun)
            await engine.kill()
            while (tried := engine._quarantine.on_trial) is None:
                await soon(next_turn())
            engine.cancel(tried)
            del streams[tried]
            await answers(list(streams.values()))
            assert not engine._quarantine

    run(main)


def test_a_paused_stream_is_paused_in_the_next_worker_too(fatal: Callable[..., Blueprint]) -> None:
    async def main() -> None:
        (expected,) = await undisturbed(fatal(), [Generation(1, [1], 40), Generation(2, [2], 40)])
        async with serving(fatal(step_s=0.005)) as engine:
            slow, other = (Stream(engine, Generation(rid, [rid], 40)) for rid in (1, 2))
            await soon(slow.begun)
            await soon(other.begun)
            engine.pause(1)
            await engine.kill()
            await answers([other])
            at = len(slow)
            await soon(collect(engine, Generation(3, [3, 2], 50)))
            assert len(slow) == at, "it stands still"
            assert not slow.over.done()
            engine.resume(1)
            assert await answers([slow, other]) == expected

    run(main)


def test_a_pause_during_the_trial_takes_effect_after_it(fatal: Callable[..., Blueprint]) -> None:
    async def main() -> None:
        (expected,) = await undisturbed(fatal(), [Generation(1, [1], 40)])
        async with serving(fatal(step_s=0.005)) as engine:
            slow = Stream(engine, Generation(1, [1], 40))
            await soon(slow.begun)
            await engine.kill()
            while engine._quarantine.on_trial is None:
                await soon(next_turn())
            engine.pause(1)
            await soon(collect(engine, Generation(3, [3, 2], 50)))
            at = len(slow)
            await soon(collect(engine, Generation(4, [4, 2], 50)))
            assert len(slow) == at
            engine.resume(1)
            assert await answers([slow]) == expected

    run(main)


# --- hanging


async def silent(engine: Watched, clock: ManualClock) -> None:
    """Let the time for a sign of life pass until the worker is killed: a minute to the ping, and one to its answer."""
    while engine.down.empty():
        clock.advance(60.0)
        engine._look()
        await next_turn()
    engine.down.get_nowait()


def test_a_worker_that_hangs_is_killed_and_nobody_loses_text(fatal: Callable[..., Blueprint]) -> None:
    async def main() -> None:
        generations = batch(0, 9)
        (expected,) = await undisturbed(fatal(), generations)
        clock = ManualClock()
        async with serving(fatal(step_s=0.005), clock, step_timeout_s=60.0) as engine:
            streams = [Stream(engine, g) for g in generations]
            await soon(streams[0].begun)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGSTOP)
            await soon(silent(engine, clock))
            assert await answers(streams) == expected
            assert engine.restarts == 1

    run(main)


def test_a_request_that_makes_it_hang_is_given_up_at_the_second_time(fatal: Callable[..., Blueprint]) -> None:
    async def main() -> None:
        (expected,) = await undisturbed(fatal(), batch(10, 9))
        clock = ManualClock()
        async with serving(fatal(), clock) as engine:
            guilty = Stream(engine, Generation(1, [HANG, 3, 1], 20))
            innocent = [Stream(engine, g) for g in batch(10, 9)]
            for _ in range(2):
                await soon(until_hung(engine, guilty))
                await soon(silent(engine, clock))
            await soon(guilty.over)
            assert guilty.failure is not None
            assert guilty.failure.message == TWICE
            assert await answers(innocent) == expected

    run(main)


async def until_hung(engine: Watched, guilty: Stream) -> None:
    """Until the worker, which is up, has told of the two or three tokens before the one it hangs at."""
    while not engine._up or sum(e.tokens for e in guilty if isinstance(e, Delta)) < 2:
        await next_turn()
    if engine.restarts:
        while engine._quarantine.on_trial != guilty.generation.rid:
            await next_turn()


def test_a_worker_whose_readers_are_all_slow_is_left_alone(fatal: Callable[..., Blueprint]) -> None:
    async def main() -> None:
        clock = ManualClock()
        async with serving(fatal(step_s=0.002), clock) as engine:
            slow = Stream(engine, Generation(1, [1], 60))
            await soon(slow.begun)
            engine.pause(1)
            for _ in range(5):
                clock.advance(60.0)
                engine._look()
                await soon(engine.up.get())  # the ping is answered
            assert (engine.restarts, engine.ready) == (0, True)
            engine.resume(1)
            await answers([slow])

    run(main)


def test_silence_counts_from_the_beginning_of_work() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with serving(scripted(prefill_s=3600.0), clock) as engine:
            clock.advance(3600.0)
            admitted = asyncio.get_running_loop().create_future()
            engine.submit(Generation(1, [1] * 50, 9), admitted.set_result)
            assert isinstance(await soon(admitted), Admitted)
            clock.advance(59.0)
            engine._look()
            assert "quiet" in repr(engine._watchdog)
            clock.advance(1.0)
            engine._look()
            assert "pinged" in repr(engine._watchdog)
            engine.cancel(1)

    run(main)
