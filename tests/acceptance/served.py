"""`headrace serve scripted:RATE` as a child process: it counts, `1 2 3 …`, at so many tokens per second a stream."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from acceptance.asking import Asking

MODEL = "scripted"


class Served(Asking):
    """A running server, to be ended at will."""

    def __init__(self, url: str, process: subprocess.Popen[str], errors: Path) -> None:
        super().__init__(url, MODEL, None)
        self.process = process
        self.port = int(url.rpartition(":")[2])
        self._errors = errors

    @property
    def log(self) -> str:
        return self._errors.read_text()

    def kill(self) -> None:
        """As the kernel does when there is no memory."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        """Asks it to go; does not wait."""
        self.process.send_signal(signal.SIGTERM)


def _start(folder: Path, rate: float, settings: dict[str, object]) -> Served:
    arguments = [f"--set={name}={value}" for name, value in settings.items()]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    errors = folder / "stderr"
    with errors.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", f"scripted:{rate:g}", "--port=0", *arguments],
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env={**environ, "XDG_CONFIG_HOME": str(folder)},
        )
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if found := re.search(r"Chat page\s+(http://\S+)/\s*$", line):
            return Served(found[1], process, errors)
    raise AssertionError(f"the server ended with {process.wait()}: {said}{errors.read_text()}")


@contextlib.contextmanager
def serving_scripts(folder: Path) -> Iterator[Callable[..., Served]]:
    """`start(rate, {"section.name": value})` gives a server; all are killed at the end."""
    started: list[Served] = []

    def start(rate: float, settings: dict[str, object] | None = None) -> Served:
        own = folder / f"server{len(started)}"
        own.mkdir()
        started.append(_start(own, rate, settings or {}))
        return started[-1]

    try:
        yield start
    finally:
        for server in started:
            server.process.kill()
            server.process.wait()
            assert server.process.stdout is not None
            server.process.stdout.close()
