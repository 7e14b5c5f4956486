from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from headrace_bench.server import NotReady, Server, free_port, resident


def web(tmp_path: Path, *flags: str, scratch: Path | None = None) -> Server:
    port = free_port()
    return Server(
        "web",
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path), *flags],
        url=f"http://127.0.0.1:{port}",
        ready="/",
        log=tmp_path / "log",
        scratch=scratch,
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


def test_what_it_wrote_goes_with_it(tmp_path: Path) -> None:
    for flags in ((), ("--nonsense",)):
        scratch = tmp_path / "scratch"
        (scratch / "deeper").mkdir(parents=True)
        with contextlib.suppress(NotReady), web(tmp_path, *flags, scratch=scratch):
            assert scratch.is_dir()
        assert not scratch.exists()


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_it_starts_leaves_nothing(
    end: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def interrupted(self: Server) -> bool:
        started.extend(self.pids())
        raise end

    monkeypatch.setattr(Server, "_answers", interrupted)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(end), web(tmp_path, scratch=scratch):
        pass
    assert started
    assert not Path(f"/proc/{started[0]}").exists()
    assert not scratch.exists()


def test_the_engine_is_the_child_with_most_memory(tmp_path: Path) -> None:
    port = free_port()
    program = """
import http.server, subprocess, sys
big = subprocess.Popen([sys.executable, "-c", "x = bytearray(64 << 20); print(1, flush=True); input()"],
                       stdin=subprocess.PIPE, stdout=subprocess.PIPE)
small = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE)
big.stdout.readline(), small.stdout.readline()
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""
    command = [sys.executable, "-c", program, str(port)]
    with Server("parent", command, url=f"http://127.0.0.1:{port}", ready="/", log=tmp_path / "log") as server:
        own, *children = server.pids()
        assert len(children) == 2
        assert resident(server.biggest_child()) > 64 << 20
        assert server.biggest_child() in children
        assert server.rss() == resident(own)


def test_one_without_a_child_has_no_engine(tmp_path: Path) -> None:
    with web(tmp_path) as server, pytest.raises(ValueError, match="web has no child process"):
        server.biggest_child()


def test_nobody_has_no_memory() -> None:
    assert resident(2**22 + 1) == 0
