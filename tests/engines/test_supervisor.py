from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.watched import PATIENCE, Stream, Watched, next_turn, run, scripted, serving, soon
from headrace.core.admission import Bounds
from headrace.core.errors import EngineUnavailable, Overloaded, StartupError
from headrace.core.events import Admitted, Delta, Event, Failed, Finished
from headrace.core.request import Generation
from headrace.engines import child, supervisor
from headrace.engines.base import EngineStats
from headrace.engines.supervisor import WorkerEngine, backoff
from headrace.engines.worker import Blueprint
from headrace.testing import ManualClock, check_stream_engine, collect

FROZEN = ManualClock()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts do not wait."""
    monkeypatch.setattr(supervisor, "_BACKOFF_FIRST", 0.0)


def ignore(event: Event) -> None:
    """A sink for events that a test does not look at."""


# --- back-off


def test_the_first_restart_is_at_once_and_the_back_off_doubles_up_to_half_a_minute() -> None:
    assert [backoff(n) for n in range(10)] == [0, 0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff(10**6) == 30


# --- serving


def test_it_keeps_the_contract() -> None:
    async def main() -> None:
        async with serving(scripted()) as engine:
            assert engine.info.name == "scripted"
            await soon(check_stream_engine(engine, list(range(40))))
            assert engine.stats.completion_tokens > 0
            assert repr(engine) == f"<WorkerEngine [ready, pid {engine.pid}, <Streams [0 live, 0 waiting]>]>"

    run(main)


def test_long_prompts_and_many_events_cross_the_socket() -> None:
    async def main() -> None:
        async with serving(scripted(script=[["é" * 1000], ["🔥" * 1000]] * 400)) as engine:
            events = await soon(collect(engine, Generation(1, [i % 4000 for i in range(3000)], 700)))
            text = "".join(e.text for e in events if isinstance(e, Delta))
            assert text == ("é" * 1000 + "🔥" * 1000) * 350

    run(main)


def test_the_worker_s_clock_is_mapped_to_ours() -> None:
    async def main() -> None:
        clock = ManualClock(5.0)
        async with serving(scripted(), clock) as engine:
            events = await soon(collect(engine, Generation(1, [1, 2], 1)))
            (marks,) = (e.marks for e in events if isinstance(e, Delta))
            assert marks is not None
            assert 5.0 < marks.queued + engine.clock_offset < 5.0 + PATIENCE

    run(main)


def test_cancel_pause_and_resume_reach_the_worker() -> None:
    async def main() -> None:
        async with serving(scripted(n_ctx=4000)) as engine:
            paused = Stream(engine, Generation(1, [1, 2], 2000))
            engine.pause(1)
            gone = Stream(engine, Generation(2, [2, 2], 2000))
            await soon(gone.begun)
            engine.cancel(2)
            told = len(gone)
            await soon(collect(engine, Generation(3, [3, 2], 30)))
            at = len(paused)
            await soon(collect(engine, Generation(4, [4, 2], 30)))
            assert (len(gone), len(paused)) == (told, at)
            assert at < 2000
            engine.resume(1)
            await soon(paused.over)
            assert paused[-1] == Finished(1, 0, "length", 2000)
            for _ in range(2):
                engine.cancel(1)
                engine.pause(1)
                engine.resume(1)

    run(main)


def test_a_cancel_gives_up_the_running_step() -> None:
    async def main() -> None:
        async with serving(scripted(prefill_s=3600.0)) as engine:
            admitted = asyncio.get_running_loop().create_future()
            engine.submit(Generation(1, [1] * 500, 9), admitted.set_result)
            assert isinstance(await soon(admitted), Admitted)
            engine.cancel(1)
            await soon(until_stats(engine, lambda s: s.running == 0 and s.slots_free == 64))

    run(main)


async def until_stats(engine: Watched, true: Callable[[EngineStats], bool]) -> None:
    """Each report of the worker is looked at."""
    seen: asyncio.Queue[EngineStats] = asyncio.Queue()
    deliver = engine._streams.deliver

    def look(events: Any) -> None:
        deliver(events)
        seen.put_nowait(engine.stats)

    engine._streams.deliver = look  # type: ignore[method-assign]
    while not true(engine.stats):
        await seen.get()


def test_a_full_queue_refuses() -> None:
    async def main() -> None:
        async with serving(scripted(prefill_s=3600.0), bounds=Bounds(max_waiting=2)) as engine:
            for rid in (1, 2):
                engine.submit(Generation(rid, [1, 2], 1), ignore)
            with pytest.raises(Overloaded):
                engine.submit(Generation(3, [1, 2], 1), ignore)

    run(main)


# --- starting


def test_a_model_that_cannot_be_loaded_is_a_startup_error(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        engine = Watched(Blueprint("headrace.engines.llama:worker", {"path": "/nowhere.gguf", "name": "x"}, {}), FROZEN)
        with pytest.raises(StartupError, match="nowhere") as caught:
            await soon(engine.start())
        assert "\n" not in caught.value.message
        assert engine._child is not None
        assert engine._child.returncode is not None, "it is waited for"
        assert not engine.ready
        with pytest.raises(EngineUnavailable):
            engine.submit(Generation(1, [1], 1), ignore)
        await soon(engine.close())

    run(main)
    assert caplog.messages == [], "who starts it says it, once"
    assert capfd.readouterr().err == ""


def test_a_worker_that_dies_while_it_loads_is_a_startup_error(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        engine = Watched(Blueprint("headrace.no_such_module:make", {}, {}), FROZEN)
        with pytest.raises(StartupError, match=r"died.*status 1: ModuleNotFoundError: No module named"):
            await soon(engine.start())
        assert engine.restarts == 0

    run(main)
    assert capfd.readouterr().err == "", "one line, told by whoever starts it"


def test_before_the_first_start_nothing_is_known() -> None:
    engine = WorkerEngine(scripted(), FROZEN)
    with pytest.raises(EngineUnavailable):
        _ = engine.info
    with pytest.raises(EngineUnavailable):
        engine.submit(Generation(1, [1], 1), ignore)
    assert not engine.ready
    assert engine.pid is None
    engine.cancel(1)
    engine.pause(1)


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes a factory that workers can import, from the body of `make(settings, clock)`."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))

    def write(body: str) -> str:
        lines = ["import os, socket, sys, time", "from headrace.core.errors import StartupError"]
        lines += ["from headrace.testing import scripted_worker", "def make(settings, clock):"]
        (tmp_path / "made_for_a_test.py").write_text("\n".join(lines + ["    " + line for line in body.splitlines()]))
        return "made_for_a_test:make"

    return write


def test_close_while_the_model_loads_ends_the_start(
    factory: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_reap", lambda process: process.wait())  # it must not depend on running out of time
    os.mkfifo(tmp_path / "pipe")
    name = factory(f"open({str(tmp_path / 'pipe')!r}).read()")

    async def main() -> None:
        engine = Watched(Blueprint(name, {}, {}), FROZEN)
        start = asyncio.create_task(engine.start())
        # Opening a pipe to write waits for its reader: now the worker loads.
        pipe = await soon(asyncio.to_thread(open, tmp_path / "pipe", "w"))
        await soon(engine.close())
        with pytest.raises(StartupError, match="loading"):
            await soon(start)
        pipe.close()
        assert engine._child is not None
        assert engine._child.returncode == -signal.SIGKILL
        assert engine.restarts == 0

    run(main)


def test_the_worker_gets_the_environment_it_is_given(factory: Callable[[str], str]) -> None:
    name = factory("raise StartupError(os.environ['MARK'])")

    async def main() -> None:
        environment = {**os.environ, "MARK": "seen"}
        engine = WorkerEngine(Blueprint(name, {}, {}), FROZEN, environment=environment)
        with pytest.raises(StartupError, match="seen"):
            await soon(engine.start())

    run(main)


# --- dying


def test_without_replay_a_killed_worker_fails_each_stream_once_and_comes_back(at_once: None) -> None:
    async def main() -> None:
        async with serving(scripted(n_ctx=4000), replay=False) as engine:
            live = [Stream(engine, Generation(rid, [rid, 2], 2000, n=1 + rid % 2)) for rid in range(1, 4)]
            cancelled = Stream(engine, Generation(9, [9, 9], 2000))
            for stream in live:
                await soon(stream.begun)
            engine.cancel(9)
            first = engine.pid
            await engine.kill()
            assert not engine.ready
            for rid, stream in enumerate(live, 1):
                assert [e for e in stream if isinstance(e, Failed)] == [stream[-1]]
                end = stream[-1]
                assert isinstance(end, Failed)
                assert (end.rid, end.code) == (rid, "engine_failed")
            assert not any(isinstance(e, Failed) for e in cancelled)
            with pytest.raises(EngineUnavailable, match="restarted"):
                engine.submit(Generation(10, [1], 1), ignore)
            assert engine.info.name == "scripted", "what is known of the model stays known"
            assert engine.stats == EngineStats(cells_total=16384)
            assert await soon(engine.up.get()) != first
            assert (engine.ready, engine.restarts) == (True, 1)
            assert (engine.replayed, engine.given_up) == (0, 3)
            told = [len(stream) for stream in live]
            events = await soon(collect(engine, Generation(11, [1, 2], 3)))
            assert "".join(e.text for e in events if isinstance(e, Delta)) == "abc"
            assert [len(stream) for stream in live] == told

    run(main)


def test_a_worker_that_exits_by_itself_is_started_again(at_once: None) -> None:
    async def main() -> None:
        async with serving(scripted(exit_at=4), replay=False) as engine:
            for rid in (1, 2):
                events = await soon(collect(engine, Generation(rid, [1, 2], 9)))
                assert isinstance(events[-1], Failed)
                assert "abcd".startswith("".join(e.text for e in events if isinstance(e, Delta)))
                await soon(engine.up.get())
            assert engine.restarts == 2

    run(main)


def test_restarts_wait_longer_each_time_and_short_again_after_a_steady_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def fake(failures: int) -> float:
        asked.append(failures)
        return 0.0

    monkeypatch.setattr(supervisor, "backoff", fake)
    clock = ManualClock()

    async def main() -> None:
        async with serving(scripted(), clock) as engine:
            for seconds in (1, 59, 61, 5):
                clock.advance(seconds)
                await engine.kill()
                await soon(engine.up.get())

    with caplog.at_level(logging.ERROR, "headrace.engines.supervisor"):
        run(main)
    assert asked == [1, 2, 1, 2]
    assert len(caplog.messages) == 4


def test_a_worker_that_cannot_load_any_more_is_tried_for_ever(
    factory: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []
    mended = tmp_path / "mended"

    def fake(failures: int) -> float:
        asked.append(failures)
        if failures == 3:
            mended.touch()
        return 0.0

    monkeypatch.setattr(supervisor, "backoff", fake)
    name = factory(
        f"if not os.path.exists({str(mended)!r}):\n    raise StartupError('gone')\nreturn scripted_worker({{}}, clock)"
    )
    mended.touch()

    async def main() -> None:
        async with serving(Blueprint(name, {}, {})) as engine:
            mended.unlink()
            await engine.kill()
            await soon(engine.up.get())
            assert (engine.ready, engine.restarts) == (True, 3)

    run(main)
    assert asked == [1, 2, 3]
    assert caplog.text.count("gone") >= 2


# --- closing


def test_close_fails_what_is_live() -> None:
    async def main() -> None:
        refused: list[Event] = []

        def retry(event: Event) -> None:
            if isinstance(event, Failed):
                with pytest.raises(EngineUnavailable):
                    engine.submit(Generation(8, [1], 1), ignore)
                refused.append(event)

        async with serving(scripted(n_ctx=4000)) as engine:
            stream = Stream(engine, Generation(1, [1, 2], 3000, n=2))
            await soon(stream.begun)
            engine.submit(Generation(2, [1, 2], 3000), retry)
        assert len(refused) == 1
        assert engine._child is not None
        assert engine._child.returncode == 0, "it ends with its socket"
        assert [e for e in stream if isinstance(e, Failed)] == [stream[-1]]
        assert isinstance(stream[-1], Failed)
        assert stream[-1].code == "engine_unavailable"
        assert engine.restarts == 0
        with pytest.raises(EngineUnavailable):
            engine.submit(Generation(2, [1], 1), ignore)
        await soon(engine.close())

    run(main)


def test_close_during_the_back_off_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "backoff", lambda failures: 3600.0)

    async def main() -> None:
        async with serving(scripted()) as engine:
            await engine.kill()
            assert engine._restart is not None
        assert engine._restart.cancelled()
        assert engine.restarts == 0

    run(main)


def test_close_during_a_restart_leaves_no_process(at_once: None) -> None:
    async def main() -> None:
        async with serving(scripted()) as engine:
            await engine.kill()
            while engine.restarts == 0:
                await soon(next_turn())
        assert not engine.ready

    run(main)


def test_closing_what_was_never_started() -> None:
    async def main() -> None:
        await soon(WorkerEngine(scripted(), FROZEN).close())

    run(main)
