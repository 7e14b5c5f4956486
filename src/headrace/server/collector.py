"""When garbage in cycles is collected: not while somebody waits, if that can be helped.

    young garbage ── as ever, in under a millisecond
    everything ───── after `ENOUGH` collections of younger objects, when nobody is being answered or memory grows

Ten thousand open streams are a million objects, and a full collection that walks over them stops everybody for 0.2 to
0.4 s. By itself Python makes one whenever the heap has grown by a quarter, and finds nothing: a response that is over
leaves no cycles (a test sees to that). So full collections wait until no response is being made. A server that is never
without one does not put them off for ever: it makes one when the process has grown by `MAX_GROWN`, which bounds what
garbage may take, and where nobody says how large it is after `TOO_MANY`.

Rules: an idle server does not wake for this; what Python was set to is there again at the end.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Mapping

ENOUGH = 20
"""Collections of the middle generation, each after about 7,000 objects more."""
TOO_MANY = 5000
MAX_GROWN = 256 * 2**20
"""Bytes since the last full collection. Ten thousand streams that come bring about one; then it is rare: it stalls."""
NEVER = 2**31 - 1
PAUSE_S = 1.0
"""Between two looks whether somebody is being answered, once a collection is due."""


def resident() -> int:
    """Bytes of memory that this process has; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as pages:
            return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class Collector:
    """Full collections of this process. `busy`: somebody is being answered. `memory`: bytes that it has."""

    def __init__(
        self,
        busy: Callable[[], bool],
        *,
        collect: Callable[[], object] = gc.collect,
        memory: Callable[[], int] = resident,
    ) -> None:
        self._busy = busy
        self._collect = collect
        self._memory = memory
        self._least = 0
        """What it had at the last full collection, or less since."""
        self._threshold: tuple[int, int, int] | None = None
        self._since = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From now on. What is there now stays for good: the collector need not walk over it again."""
        gc.collect()
        gc.freeze()
        self._least = self._memory()
        self._threshold = gc.get_threshold()
        gc.set_threshold(*self._threshold[:2], NEVER)
        self._loop = asyncio.get_running_loop()
        gc.callbacks.append(self._told)

    def stop(self) -> None:
        """Leave it to Python again. Without effect if it was not started."""
        if self._threshold is not None:
            gc.callbacks.remove(self._told)
            gc.set_threshold(*self._threshold)
            self._threshold = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _told(self, phase: str, info: Mapping[str, int]) -> None:
        """Called by Python in the middle of anything, on any thread: so it only counts and asks for a look."""
        if phase != "stop" or info["generation"] != 1:
            return
        self._since += 1
        if self._since == ENOUGH:
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        self._timer = None
        if self._threshold is None:
            return
        if self._busy() and self._since < TOO_MANY and not self._grown():
            self._timer = self._loop.call_later(PAUSE_S, self._look)
            return
        self._since = 0
        self._collect()
        self._least = self._memory()

    def _grown(self) -> bool:
        memory = self._memory()
        self._least = min(self._least, memory)
        return memory - self._least >= MAX_GROWN
