"""The process of a worker: what it says, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from engines.watched import run, soon
from headrace.engines import child as module
from headrace.engines.child import Child
from headrace.engines.ladder import Ending


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program to run instead of the interpreter: what is written into it."""
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(program))
    return program


def write(program: Path, body: str) -> None:
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)


async def ended(up: bool = False) -> tuple[Child, Ending]:
    child = Child()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        await child.start(theirs.fileno(), None)
        if up:
            child.came_up()
        return child, await soon(child.ended("untrue" if up else ""))


def test_it_tells_how_it_ended_and_what_it_said_last(python: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(python, "echo early >&2; echo 'x.c:1: GGML_ASSERT(a) failed' >&2; kill -SEGV $$")

    async def main() -> None:
        child, ending = await ended()
        assert ending == Ending(-signal.SIGSEGV, "x.c:1: GGML_ASSERT(a) failed")
        assert child.returncode == -signal.SIGSEGV
        assert child.pid

    run(main)
    assert caplog.messages == [], "whoever started it tells it"


def test_what_it_says_once_it_is_up_is_logged(python: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(python, "printf 'one\\ntwo, and no end' >&2; exit 3")

    async def main() -> None:
        _, ending = await ended(up=True)
        assert ending == Ending(3, "two, and no end", "untrue")

    with caplog.at_level(logging.WARNING):
        run(main)
    assert caplog.messages == ["engine: one", "engine: two, and no end"]


def test_one_that_says_more_than_a_pipe_holds_does_not_wait_for_us(python: Path) -> None:
    write(python, "head -c 3000000 /dev/zero | tr '\\0' 'x' >&2; echo >&2; echo done >&2")

    async def main() -> None:
        assert (await ended())[1] == Ending(0, "done")

    run(main)


def test_another_process_that_holds_its_stderr_is_not_waited_for(
    python: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_LAST_S", 0.0)
    os.mkfifo(tmp_path / "hold")
    write(python, f"echo last >&2; (read x < {tmp_path / 'hold'}) & exit 1")

    async def main() -> None:
        assert (await ended())[1].code == 1
        pipe = await soon(asyncio.to_thread(open, tmp_path / "hold", "w"))
        pipe.close()

    run(main)


def test_one_that_could_not_be_started_has_ended() -> None:
    async def main() -> None:
        child = Child()
        child.kill()
        assert (child.pid, child.returncode) == (None, None)
        assert (await child.ended()).said == "it could not be started"

    run(main)
