"""A worker's process: how it is started, what it says on stderr, and how it ended.

    socket ──▶ frames, see `supervisor`          stderr ──▶ LastWords ──▶ the log, once it is up

Rules: everything here runs on the event loop. Its stderr is read for as long as it lives, so that it never waits for
us; what it says while it is not up is kept for whoever wants to know why it did not come up.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, cast

from headrace.engines.ladder import Ending, told
from headrace.engines.last_words import LastWords

log = logging.getLogger(__name__)

_LAST_S = 1.0
"""Seconds that the rest of what a dead process said may take: another one may hold its stderr open."""


class Child(asyncio.Protocol):
    """One process. `start` once, then `ended` waits for its end; whoever starts it calls that."""

    def __init__(self) -> None:
        self._words = LastWords()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: asyncio.ReadTransport | None = None
        self._heard = asyncio.get_running_loop().create_future()
        """Done when its stderr is at its end."""
        self._up = False

    async def start(self, fd: int, environment: Mapping[str, str] | None) -> None:
        """`python -m headrace.engines.worker FD`. Raises OSError."""
        self._process = process = subprocess.Popen(  # noqa: ASYNC220 - a fork takes milliseconds, at start only
            [sys.executable, "-u", "-m", "headrace.engines.worker", str(fd)],
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
        )
        self._pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, cast("Any", process.stderr))

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        return None if self._process is None else self._process.returncode

    def came_up(self) -> None:
        """From here on what it says goes to the log; what it said before, now."""
        self._up = True
        for line in self._words.lines:
            log.warning("engine: %s", line)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def ended(self, untrue: str = "") -> Ending:
        """Wait for its end, and kill it after 5 s. `untrue`: see Ending."""
        if self._process is None:
            return Ending(0, "it could not be started")
        await asyncio.get_running_loop().run_in_executor(None, _reap, self._process)
        if not self._heard.done():
            await asyncio.wait((self._heard,), timeout=_LAST_S)
        if self._pipe is not None:
            self._pipe.close()
        assert self._process.returncode is not None
        ending = Ending(self._process.returncode, self._words.cause, untrue)
        if not self._up:
            log.debug("engine: worker %s: %s", self.pid, "; ".join((told(ending), *self._words.lines)))
        return ending

    def data_received(self, data: bytes) -> None:
        """asyncio.Protocol"""
        self._say(self._words.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio.Protocol"""
        self._say(self._words.end())
        if not self._heard.done():
            self._heard.set_result(None)

    def _say(self, lines: list[str]) -> None:
        if self._up:
            for line in lines:
                log.warning("engine: %s", line)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a worker whose socket is closed; make sure after 5 s."""
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
