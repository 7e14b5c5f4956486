"""The processes behind a URL, where they are this machine's and we may look: what CPU they have used.

    127.0.0.1:8080 ─ /proc/net/tcp ─► inode of the listening socket ─ /proc/*/fd ─► process ─► it and its children

Rules: reads /proc and nothing else; what cannot be seen is None, not 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

PROC = Path("/proc")
LOOPBACK = {"127.0.0.1", "localhost", "::1", "0.0.0.0"}
_LISTEN = "0A"
_TICK = os.sysconf("SC_CLK_TCK")


def cpu_behind(url: str) -> Callable[[], float | None] | None:
    """CPU seconds so far of the server at `url` with all its children, asked anew at each call.

    None: not on this machine, or its process cannot be seen. A call gives None once it is gone.
    """
    parts = urlsplit(url)
    if parts.hostname not in LOOPBACK:
        return None
    pid = listener(parts.port or (443 if parts.scheme == "https" else 80))
    return None if pid is None else lambda: cpu(pid)


def listener(port: int) -> int | None:
    """The process that listens on a TCP port; of several that share it, the oldest, whose children the others are."""
    inodes = _inodes(port)
    found = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit() and _holds(entry, inodes)]
    return min(found, default=None)


def cpu(pid: int) -> float | None:
    """CPU seconds of a process and what it started, so far; None when it is gone."""
    own = _used(pid)
    return None if own is None else own + sum(_used(child) or 0.0 for child in _below(pid))


def _inodes(port: int) -> set[str]:
    inodes: set[str] = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return inodes


def _holds(process: Path, inodes: set[str]) -> bool:
    try:
        return any(os.readlink(link) in inodes for link in (process / "fd").iterdir())
    except OSError:  # somebody else's, or gone meanwhile
        return False


def _below(pid: int) -> list[int]:
    """All that came of a process: its children, and theirs."""
    found: list[int] = []
    for task in _tasks(pid):
        try:
            children = [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *_below(child)]
    return found


def _tasks(pid: int) -> list[Path]:
    try:
        return list((PROC / str(pid) / "task").iterdir())
    except OSError:
        return []


def _used(pid: int) -> float | None:
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / _TICK


def settle(
    cpus: Sequence[Callable[[], float | None] | None],
    patience: float = 20.0,
    idle: float = 0.1,
    look: float = 0.2,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Waits until none of the servers uses more than `idle` cores, `patience` seconds at most. False: one still does.

    One that cannot be seen is taken for idle.
    """
    seen = [cpu for cpu in cpus if cpu is not None]
    end = clock() + patience
    while seen:
        before, began = [cpu() for cpu in seen], clock()
        sleep(look)
        passed = clock() - began
        used = [(cpu() or 0.0) - (early or 0.0) for cpu, early in zip(seen, before, strict=True)]
        if max(used) <= idle * passed:
            return True
        if clock() >= end:
            return False
    return True
