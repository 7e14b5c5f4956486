"""A real redis-server for tests: on a free port of the loopback, without persistence, stopped by its process id."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

NAMES = ("redis-server", "valkey-server")


def redis_or_skip() -> str:
    """Path of the program. Without it a test is skipped, in CI it fails."""
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        reason = "no redis-server found (on Debian: apt-get install redis-server)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return program


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """One server, to be started and stopped at will; always on the same port."""

    def __init__(self, program: str, directory: Path, *options: str) -> None:
        self.port = free_port()
        self._command = [program, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        self._command += ["--dir", str(directory), *options]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Returns when it accepts connections."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert self._process.stdout is not None
        said = b""
        for line in self._process.stdout:
            said += line
            if b"eady to accept connections" in line:
                return
        pytest.fail(f"redis-server did not start: {said.decode(errors='replace')}")

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        """As kill -9 does; nothing if it is not running."""
        if self._process is None:
            return
        self.signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
