"""What the kernel knows of a process."""

from __future__ import annotations

import os
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


class Process:
    """A process of this machine, by default this one."""

    def __init__(self, pid: int | None = None) -> None:
        self._proc = Path(f"/proc/{os.getpid() if pid is None else pid}")

    def __repr__(self) -> str:
        return f"<Process [{self._proc.name}]>"

    @property
    def memory(self) -> int:
        """Resident bytes."""
        return int(self._row("status", "VmRSS:")[1]) * 1024

    @property
    def cpu_s(self) -> float:
        """Seconds of processor time so far."""
        fields = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK

    @property
    def files(self) -> int:
        """Open files."""
        return len(os.listdir(self._proc / "fd"))

    @property
    def file_limit(self) -> int:
        """Its soft limit of open files."""
        return int(self._row("limits", "Max open files")[3])

    def _row(self, file: str, start: str) -> list[str]:
        rows = (self._proc / file).read_text().splitlines()
        return next(row for row in rows if row.startswith(start)).split()
