"""Time as a parameter: policy code takes `now`, edges take a `Clock`.

Seconds as float, monotonic, origin arbitrary but the same for all processes of one machine (CLOCK_MONOTONIC).
"""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]


def offset(asked: float, theirs: float, answered: float) -> float:
    """What to add to another process's stamp to read it on our clock, in s.

    `theirs` was taken by them between our stamps `asked` and `answered`. When it lies between the two, both read the
    same clock and the answer is exactly 0; otherwise the midpoint is the best guess (as in NTP).
    """
    if asked <= theirs <= answered:
        return 0.0
    return (asked + answered) / 2 - theirs
