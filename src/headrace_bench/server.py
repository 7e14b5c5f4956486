"""A server under test: started here, on loopback, and ended here, by its own process id."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from headrace_bench import listener

READY_S = 120.0
STOP_S = 40.0
"""Some write to disk before they go."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class NotReady(Exception):
    """The server did not come up; the message ends with the last of its log."""


class Server:
    """`command` with a log file, ready once GET `ready` answers 200. `scratch` is deleted once it has stopped."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        url: str,
        ready: str,
        log: Path,
        env: Mapping[str, str] | None = None,
        scratch: Path | None = None,
        ready_s: float = READY_S,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.url = url
        self.env = dict(env or {})
        """What it gets beyond our own environment."""
        self._ready = ready
        self._ready_s = ready_s
        self._log = log
        self._env = {**os.environ, **self.env}
        self._scratch = scratch
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        """Also an interrupt while it starts leaves no process and no scratch folder."""
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self) -> None:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=log, env=self._env)
        end = time.monotonic() + self._ready_s
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                tail = self._log.read_text(errors="replace")[-400:]
                raise NotReady(f"{self.name} did not become ready: {tail}")
            time.sleep(0.1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end()
        finally:
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)

    def _end(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:  # too slow, or who waited was interrupted once more
                process.kill()
                process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self._ready, timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def pids(self) -> list[int]:
        """The process and its children, as of now."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]

    def biggest_child(self) -> int:
        """The child with most memory: the engine, where that is a process of its own. ValueError: there is none."""
        children = self.pids()[1:]
        if not children:
            raise ValueError(f"{self.name} has no child process")
        return max(children, key=resident)

    def rss(self) -> int:
        """Resident bytes of the server process itself, without its engine's."""
        assert self._process is not None
        return resident(self._process.pid)

    def cpu(self) -> float:
        """CPU seconds of the process and all that it started, so far; 0 once it is gone."""
        assert self._process is not None
        return listener.cpu(self._process.pid) or 0.0


def resident(pid: int) -> int:
    """Resident bytes of a process; 0 once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0
