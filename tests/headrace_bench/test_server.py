from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from headrace_bench.server import NotReady, Server


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def web(tmp_path: Path, *flags: str) -> Server:
    port = free_port()
    return Server(
        "web",
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path), *flags],
        url=f"http://127.0.0.1:{port}",
        ready="/",
        log=tmp_path / "log",
    )


def test_a_server_is_started_measured_and_ended(tmp_path: Path) -> None:
    with web(tmp_path) as server:
        (pid,) = server.pids()
        assert server.rss() > 1e6
        assert server.cpu() >= 0
    assert not Path(f"/proc/{pid}").exists()


def test_one_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(NotReady, match=r"(?s)web did not become ready: .*unrecognized arguments"),
        web(tmp_path, "--nonsense"),
    ):
        pass
