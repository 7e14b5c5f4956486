"""Ask Linux to run this process soon after it wakes.

The compute threads of an engine fill every core. A woken event loop then waits for one of them to use up its time
slice, and a token with it. Since 6.12 a task may ask for a shorter slice of its own (`sched_setattr`, `sched_runtime`
under SCHED_OTHER): it gets the same share of the core, earlier. Nothing happens on other systems and older kernels.
Its worth is in docs/benchmarks.md.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_SYSCALL = {"x86_64": 314, "aarch64": 274}
"""Number of sched_setattr."""

_ATTR = struct.Struct("<IIQiIQQQII")
"""struct sched_attr, version 1: size, policy, flags, nice, priority, runtime, deadline, period, util_min, util_max."""


_RESET_ON_FORK = 1
"""SCHED_FLAG_RESET_ON_FORK: an engine's process must not inherit the short slice."""


def shorten(slice_us: int) -> bool:
    """Ask for slices of `slice_us` microseconds (100 to 100,000) for this thread alone; True if granted."""
    number = _SYSCALL.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attr = _ATTR.pack(_ATTR.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, slice_us * 1000, 0, 0, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attr, 0) == 0)
