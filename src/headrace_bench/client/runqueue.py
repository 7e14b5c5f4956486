"""How long this thread could have run and had no processor: what tells a busy machine from a slow client."""

from __future__ import annotations

from pathlib import Path

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def waited(schedstat: Path = _SCHEDSTAT) -> float | None:
    """Seconds since the thread began, by the kernel; None where it does not say."""
    try:
        return int(schedstat.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def between(before: float | None, after: float | None) -> float | None:
    """Of two answers of `waited`."""
    return None if before is None or after is None else after - before
