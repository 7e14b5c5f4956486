"""Starts that end in a signal, in real child processes: each rung, and what is said."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.watched import Watched, run, soon
from headrace.core.errors import StartupError
from headrace.core.events import Delta
from headrace.core.request import Generation
from headrace.engines import supervisor
from headrace.engines.footing import Footing
from headrace.engines.ladder import llama_rungs
from headrace.engines.worker import Blueprint
from headrace.testing import ManualClock, collect

TOP = {"extra_buffers": True, "flash_attention": True, "kv_type": "q8_0", "threads": 2, "threads_batch": 2}
RUNGS = llama_rungs(TOP)
Make = Callable[..., Watched]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Engines that die `dies` unless their settings are those of a rung, or of none if that is None."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH")))))
    marks = tmp_path / "marks"
    marks.mkdir()
    (tmp_path / "m.gguf").touch()

    def engine(dies: str, rung: int | None, **settings: Any) -> Watched:
        unless = {"threads": -1} if rung is None else RUNGS[rung].settings
        own = {**TOP, **settings, "dies": dies, "unless": unless, "marks": str(marks)}
        footing = Footing(llama_rungs(own), tmp_path / "m.gguf", tmp_path / "rungs")
        return Watched(Blueprint("crashing_engine:make", own, {}), ManualClock(), footing=footing)

    return engine


def starts(tmp_path: Path) -> int:
    return len(list((tmp_path / "marks").iterdir()))


async def streams(engine: Watched) -> None:
    events = await soon(collect(engine, Generation(1, [1, 2], 3)))
    assert "".join(e.text for e in events if isinstance(e, Delta)) == "abc"


@pytest.mark.parametrize("dies", ["SIGSEGV", "SIGILL", "SIGABRT", "SIGBUS", "SIGFPE", "NaN"])
@pytest.mark.parametrize("rung", [1, 2, 3])
def test_the_start_comes_up_on_the_first_rung_that_works(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, dies: str, rung: int
) -> None:
    async def main() -> None:
        engine = make(dies, rung)
        await soon(engine.start())
        await streams(engine)
        assert (engine.lives.rung, engine.lives.depth) == (RUNGS[rung].name, rung)
        await soon(engine.close())

    run(main)
    assert starts(tmp_path) == rung + 1
    (line,) = [message for message in caplog.messages if "scripts/install" in message]
    assert RUNGS[rung].without in line
    assert ("numbers that are none" if dies == "NaN" else dies) in line


def test_the_next_start_begins_there_and_a_restart_stays_there(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_BACKOFF_FIRST", 0.0)

    async def main(first: bool) -> None:
        engine = make("SIGSEGV", 1)
        await soon(engine.start())
        await soon(engine.up.get())
        if not first:
            await engine.kill()
            await soon(engine.up.get())
            await streams(engine)
        assert engine.lives.depth == 1
        await soon(engine.close())

    run(lambda: main(first=True))
    assert starts(tmp_path) == 2
    run(lambda: main(first=False))
    assert starts(tmp_path) == 4, "one start, one restart"


def test_the_user_s_own_setting_is_no_rung(make: Make, tmp_path: Path) -> None:
    async def main() -> None:
        engine = make("SIGSEGV", None, extra_buffers=False, threads=1, threads_batch=1)
        with pytest.raises(StartupError, match="SIGSEGV"):
            await soon(engine.start())

    run(main)
    assert starts(tmp_path) == 2, "as configured, and without flash attention"


def test_all_rungs_fail(make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        engine = make("SIGABRT", None)
        with pytest.raises(StartupError) as caught:
            await soon(engine.start())
        message = caught.value.message
        assert "\n" not in message
        for part in ("SIGABRT", "ggml.c:12: GGML_ASSERT(sane) failed", "scripts/install"):
            assert part in message
        assert not engine.ready

    run(main)
    assert starts(tmp_path) == 4
    assert not (tmp_path / "rungs").exists()
    assert "GGML_ASSERT" not in capfd.readouterr().err, "it is in the one line"


@pytest.mark.parametrize(
    ("dies", "says"),
    [
        ("SIGKILL", "memory"),
        ("SIGHUP", "SIGHUP"),
        ("refusal", "x.gguf is no model"),
        ("exception", "ValueError: of Python"),
    ],
)
def test_what_is_no_fault_of_kernels_is_tried_once(make: Make, tmp_path: Path, dies: str, says: str) -> None:
    async def main() -> None:
        engine = make(dies, None)
        with pytest.raises(StartupError, match=says) as caught:
            await soon(engine.start())
        assert "\n" not in caught.value.message
        assert "Traceback" not in caught.value.message

    run(main)
    assert starts(tmp_path) == 1


def test_numbers_that_are_none_on_all_rungs_refuse_the_model(make: Make, tmp_path: Path) -> None:
    async def main() -> None:
        engine = make("NaN", None)
        with pytest.raises(StartupError, match=r"numbers that are none.*all 4 sorts"):
            await soon(engine.start())

    run(main)
    assert starts(tmp_path) == 4


def test_a_close_between_two_rungs_ends_the_start(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        engine = make("SIGSEGV", 3)
        start = asyncio.create_task(engine.start())
        await soon(engine.down.get())  # the first one is dead
        await soon(engine.close())
        with pytest.raises(StartupError, match="loading"):
            await soon(start)
        assert engine._child is not None
        assert engine._child.returncode is not None

    run(main)


def test_what_a_worker_says_once_it_is_up_goes_to_the_log(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        engine = make("SIGSEGV", 0)
        await soon(engine.start())
        assert engine._child is not None
        engine._child.data_received(b"a warning of the library\n")
        await soon(engine.close())

    with caplog.at_level(logging.WARNING):
        run(main)
    assert caplog.messages == ["engine: a warning of the library"]
