"""An operating system that fails when it is told to."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from headrace.kv.disk import Files
from headrace.kv.tiers import File


class FailingFiles(Files):
    """Counts its operations; `fails(number, name)` gives the errno with which one fails, or 0."""

    def __init__(self, fails: Callable[[int, str], int] = lambda _number, _name: 0) -> None:
        self.fails = fails
        self.done: list[str] = []

    def _before(self, name: str) -> None:
        self.done.append(name)
        code = self.fails(len(self.done), name)
        if code:
            raise OSError(code, f"{name} fails")

    def listing(self, path: Path) -> list[File]:
        self._before("listing")
        return super().listing(path)

    def mkdir(self, path: Path) -> None:
        self._before("mkdir")
        super().mkdir(path)

    def head(self, path: Path) -> bytes:
        self._before("head")
        return super().head(path)

    def read(self, path: Path, split: Callable[[bytes], int]) -> bytes:
        self._before("read")
        return super().read(path, split)

    def create(self, path: Path) -> int:
        self._before("create")
        return super().create(path)

    def write(self, descriptor: int, data: bytes) -> None:
        try:
            self._before("write")
        except OSError:
            super().write(descriptor, data[: len(data) // 2])  # a full disk takes what it can
            raise
        super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self._before("sync")  # and no more: no test pulls the plug

    def close(self, descriptor: int) -> None:
        super().close(descriptor)  # also when it fails
        self._before("close")

    def rename(self, source: Path, target: Path) -> None:
        self._before("rename")
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._before("remove")
        super().remove(path)

    def touch(self, path: Path, ns: int) -> None:
        self._before("touch")
        super().touch(path, ns)

    def lock(self, path: Path) -> int:
        self._before("lock")
        return super().lock(path)

    def count_up(self, descriptor: int) -> int:
        self._before("count_up")
        return super().count_up(descriptor)


class SmallDisk(FailingFiles):
    """Room for `capacity` bytes of files in `path`."""

    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__()
        self._path = path
        self.capacity = capacity

    def write(self, descriptor: int, data: bytes) -> None:
        if sum(file.size for file in self.listing(self._path)) + len(data) > self.capacity:
            super(FailingFiles, self).write(descriptor, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(descriptor, data)
