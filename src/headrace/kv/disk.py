"""The SSD tier: a directory of blobs with a limit, which several processes may share.

    <engine>-<key>.kv                    a blob; the time of last change is the time of last use
    <engine>-<key>.<pid>.<random>.tmp    one being written; whoever holds the lock may remove any it finds
    lock                                 flock'ed while files come and go; holds how often that was, so that a process
                                         whose count still fits need not look at the directory again

Rules: a file appears whole, by a rename under the lock, after room was made for it: the directory is within its limit
at every moment, whoever adds to it; nothing here but `write` raises, and only OSError; what is not named like ours is
not touched. Every call to the system is a method of `Files`, so that tests can fail each of them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from headrace.kv.blob import HEADER_MAX, Block, Damaged, Header, encode, parse_header, unpack_payload
from headrace.kv.tiers import File, FileBook, victims

T = TypeVar("T")

_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})\.kv")
_TEMPORARY = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.\d+\.[0-9a-f]+\.tmp")
_LOCK = "lock"
_LOCK_BYTES = 8
_TRIES, _PAUSE_S = 40, 0.05
"""For the lock: who holds it writes one block."""
_UNREADABLE = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.EIO)
"""What a look at one file may give because of that file; anything else is the system's trouble, not the file's."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Files:
    """The operating system's part. Raises OSError."""

    def listing(self, path: Path) -> list[File]:
        found = []
        with os.scandir(path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process was faster
                    status = entry.stat(follow_symlinks=False)
                    regular = entry.is_file(follow_symlinks=False)
                    found.append(File(entry.name, status.st_size if regular else 0, status.st_mtime_ns, regular))
        return found

    def mkdir(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def head(self, path: Path) -> bytes:
        """Enough to hold any blob's header."""
        with path.open("rb") as file:
            return file.read(HEADER_MAX)

    def read(self, path: Path, split: Callable[[bytes], int]) -> bytes:
        """All from where `split`, given the head, says. Apart from it, so that a payload is not copied once more."""
        with path.open("rb", buffering=0) as file:
            file.seek(split(file.read(HEADER_MAX)))
            return file.read()

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, descriptor: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        try:
            path.unlink()
        except (IsADirectoryError, PermissionError):
            path.rmdir()

    def touch(self, path: Path, ns: int) -> None:
        os.utime(path, ns=(ns, ns))

    def lock(self, path: Path) -> int:
        """An open descriptor with the lock. Raises BlockingIOError if another has it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def count_up(self, descriptor: int) -> int:
        """Add one to the number in the lock file and return what it was; 0 for an empty file."""
        before = int.from_bytes(os.pread(descriptor, _LOCK_BYTES, 0), "big")
        os.pwrite(descriptor, ((before + 1) % 2**63).to_bytes(_LOCK_BYTES, "big"), 0)
        return before


class Disk:
    """See the module. `open` first; `write`, `remove` and `touch` from one thread, `read` from any."""

    def __init__(self, path: Path, limit: int, engine: bytes, files: Files | None = None) -> None:
        self._path = path
        self._limit = limit
        self._engine = engine
        self._os = files or Files()
        self._mutex = threading.Lock()
        self._book = FileBook()
        self._refused: set[str] = set()
        """Damaged ones that could not be removed."""
        self._turn = -1
        """The lock file's number after our own last change; -1: look at the directory."""
        self.damaged = 0
        self.errors = 0

    @property
    def used(self) -> int:
        """Bytes in the directory, as far as is known."""
        with self._mutex:
            return _LOCK_BYTES + self._book.total

    def open(self) -> list[tuple[Block, int]]:
        """(block, bytes of its KV) of every usable file of this engine, the longest unused first."""
        try:
            self._os.mkdir(self._path)
            self._locked(lambda: self._make_room(0, lambda _key: False))
        except OSError:
            self.errors += 1
        found = []
        for file in self._book.oldest():
            key = self._key(file)
            if key and (header := self._look(file, key)):
                found.append(header)
        return found

    def _look(self, file: File, key: bytes) -> tuple[Block, int] | None:
        try:
            header = parse_header(self._os.head(self._path / file.name))
            if header.block.key != key or header.block.engine != self._engine:
                raise Damaged("it is another block")
            if header.total != file.size:
                raise Damaged(f"{file.size} bytes; the header says {header.total}")
        except FileNotFoundError:
            return None
        except (Damaged, OSError) as error:
            self._reject(file.name, error)
            return None
        return header.block, header.size

    def read(self, key: bytes) -> tuple[Block, bytes] | None:
        """The block and its KV; None if it is not there or is not what it should be, and then it is removed."""
        name = self._name(key)
        headers: list[Header] = []

        def split(head: bytes) -> int:
            headers.append(parse_header(head))
            return headers[0].payload_at

        try:
            stored = self._os.read(self._path / name, split)
            return headers[0].block, unpack_payload(headers[0], stored, key)
        except FileNotFoundError:
            with self._mutex:
                self._book.drop(name)
        except (Damaged, OSError) as error:
            self._reject(name, error)
        return None

    def _reject(self, name: str, error: Exception) -> None:
        """Count a damaged file once, and remove it if that can be."""
        with self._mutex:
            if isinstance(error, OSError) and error.errno not in _UNREADABLE:
                self.errors += 1
                return
            if name in self._refused:
                return
            self.damaged += 1
            self._refused.add(name)
        self._unlink(name)

    def _unlink(self, name: str) -> bool:
        """Is it gone?"""
        try:
            self._os.remove(self._path / name)
        except FileNotFoundError:
            pass
        except OSError:
            return False
        with self._mutex:
            self._book.drop(name)
            self._refused.discard(name)
        return True

    def write(self, block: Block, payload: bytes, pinned: Callable[[bytes], bool]) -> tuple[int, list[bytes]]:
        """Add a block: (bytes written, keys of this engine's blocks that had to go for it).

        0 bytes: it does not fit beside the pinned ones, or something that cannot be removed has its name. Raises
        OSError; then nothing of it is left, or will not be after the next write.
        """
        head, stored = encode(block, payload)
        total = len(head) + len(stored)
        gone: list[bytes] = []

        def act() -> int:
            if not self._cleared(self._name(block.key)):
                return 0
            fits, evicted = self._make_room(total, pinned)
            gone.extend(evicted)
            if not fits:
                return 0
            try:
                self._place(block.key, head, stored)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                # The disk is smaller than the limit: what lay unused longest makes room, once.
                gone.extend(self._free(2 * total, pinned) or self._free(total, pinned))
                self._place(block.key, head, stored)
            return total

        try:
            return self._locked(act), gone
        except OSError:
            self.errors += 1
            raise

    def _cleared(self, name: str) -> bool:
        with self._mutex:
            refused = name in self._refused
        return not refused or self._unlink(name)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove blocks that are of no use any more."""
        names = [self._name(key) for key in keys]

        def act() -> None:
            for name in names:
                self._unlink(name)

        with suppress(OSError):
            self._locked(act)

    def touch(self, keys: Iterable[bytes]) -> None:
        """These were used just now, the last one last."""
        now = time.time_ns()
        for i, key in enumerate(keys):
            name = self._name(key)
            with suppress(OSError):
                self._os.touch(self._path / name, now + i)
            with self._mutex:
                self._book.touch(name, now + i)

    def _name(self, key: bytes) -> str:
        return f"{self._engine.hex()}-{key.hex()}.kv"

    def _locked(self, act: Callable[[], T]) -> T:
        """Do it while no other process adds or removes files, and with the directory's content known."""
        descriptor = self._take_lock()
        turn, self._turn = self._turn, -1
        try:
            # Counted up before anything changes: a process that dies in the middle has told the others to look.
            before = self._os.count_up(descriptor)
            if before != turn:
                self._rescan()
            result = act()
            self._turn = before + 1
            return result
        finally:
            self._os.close(descriptor)

    def _take_lock(self) -> int:
        for _ in range(_TRIES):
            try:
                return self._os.lock(self._path / _LOCK)
            except BlockingIOError:
                time.sleep(_PAUSE_S)
            except FileNotFoundError:
                self._os.mkdir(self._path)  # somebody tidied up
        raise BlockingIOError(errno.EAGAIN, "another process holds the directory's lock")

    def _rescan(self) -> None:
        """Look at the directory, under the lock: a temporary file there is an orphan."""
        book = FileBook()
        for file in self._os.listing(self._path):
            if _NAME.fullmatch(file.name):
                book.enter(file)
            elif _TEMPORARY.fullmatch(file.name):
                try:
                    self._os.remove(self._path / file.name)
                except OSError:
                    book.enter(file)  # still takes room
        with self._mutex:
            self._book = book

    def _make_room(self, size: int, pinned: Callable[[bytes], bool]) -> tuple[bool, list[bytes]]:
        """Evict until `size` more bytes are within the limit: whether they are, and which keys of ours went.

        Nobody goes if it would not be enough.
        """
        excess = self.used + size - self._limit
        evicted = self._free(excess, pinned) if excess > 0 else []
        return self.used + size <= self._limit, evicted

    def _free(self, size: int, pinned: Callable[[bytes], bool]) -> list[bytes]:
        """Remove what lay unused longest until `size` bytes are free, if it can be; the keys of ours among it."""

        def keep(file: File) -> bool:
            key = self._key(file)
            return key is not None and pinned(key)

        with self._mutex:
            files = self._book.oldest()
        gone = [file for file in victims(files, size, self._limit // 50, keep) or () if self._unlink(file.name)]
        return [key for key in map(self._key, gone) if key]

    def _key(self, file: File) -> bytes | None:
        """Of a block of this engine."""
        match = _NAME.fullmatch(file.name)
        return bytes.fromhex(match[2]) if match and match[1] == self._engine.hex() else None

    def _place(self, key: bytes, head: bytes, stored: bytes) -> None:
        """Write, sync, rename; on any error nothing of it stays."""
        name = self._name(key)
        temporary = self._path / f"{name.removesuffix('.kv')}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        try:
            descriptor = self._os.create(temporary)
            try:
                self._os.write(descriptor, head)
                self._os.write(descriptor, stored)
                self._os.sync(descriptor)
            finally:
                self._os.close(descriptor)
            now = time.time_ns()
            self._os.touch(temporary, now)  # the system's own stamps may lie milliseconds apart at best
            self._os.rename(temporary, self._path / name)
        except OSError:
            with suppress(OSError):
                self._os.remove(temporary)
            raise
        with self._mutex:
            self._refused.discard(name)
            self._book.enter(File(name, len(head) + len(stored), now, True))
