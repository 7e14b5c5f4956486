"""Waking at a given time: the kernel's own timer where there is one, for the event loop's counts in whole milliseconds.

Rules: deadlines are absolute, so a late one does not move the next; a wait never holds the loop for longer than a
spin, by default 0.3 ms, and only at its very end.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Self

SPIN = 0.0003
"""Seconds that may be spun at the end of a wait; a wake-up from the kernel's timer costs about a fifth of it."""
_ROUNDING = 1e-6
_NONBLOCK = os.O_NONBLOCK | os.O_CLOEXEC
_MONOTONIC = 1


class _Due(ctypes.Structure):
    """struct itimerspec: an interval, which stays zero, and the time to go."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("s", ctypes.c_long),
        ("ns", ctypes.c_long),
    )


class Pacer:
    """Waits of one task, one at a time. Belongs to the running loop; close it."""

    def __init__(self, clock: Callable[[], float], spin: float = SPIN, kernel: bool = True) -> None:
        self._clock = clock
        self._spin = spin
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] | None = None
        self._timer = self._open() if kernel else None

    async def until(self, at: float) -> None:
        """Returns when the clock says `at` or later; at once where it does already."""
        while (left := at - self._clock()) > self._spin + _ROUNDING:
            self._woken = self._loop.create_future()
            if self._timer is None:
                due = self._loop.call_at(self._loop.time() + left - self._spin, self._wake)
                try:
                    await self._woken
                finally:
                    due.cancel()
            else:
                self._arm(left - self._spin)
                await self._woken
        while self._clock() < at - _ROUNDING:
            pass

    def _wake(self) -> None:
        if self._timer is not None:
            try:
                os.read(self._timer, 8)
            except BlockingIOError:
                return
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _open(self) -> int | None:
        """A timer that is a file, which the loop can wait for beside its sockets. None where the system has none."""
        if not sys.platform.startswith("linux"):
            return None
        self._libc = ctypes.CDLL(None, use_errno=True)
        timer = int(self._libc.timerfd_create(_MONOTONIC, _NONBLOCK))
        if timer < 0:
            return None
        self._loop.add_reader(timer, self._wake)
        return timer

    def _arm(self, seconds: float) -> None:
        ns = max(1, int(seconds * 1e9))
        due = _Due(0, 0, ns // 1_000_000_000, ns % 1_000_000_000)
        if self._libc.timerfd_settime(self._timer, 0, ctypes.byref(due), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """Gives the timer back."""
        if self._timer is not None:
            self._loop.remove_reader(self._timer)
            os.close(self._timer)
            self._timer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
