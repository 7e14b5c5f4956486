"""TINY: the demo model behind the real program, a child process of the tests'."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from acceptance.asking import Asking
from headrace.engines.base import ModelInfo
from headrace.engines.vocab import Vocabulary

ALIAS = "tiny"
CONTROL: dict[str, Any] = {"prompt": "Three colours: red,", "max_tokens": 8, "temperature": 0}


class Tiny(Asking):
    """A running `headrace serve`. `calls()` opens a client for one loop."""

    def __init__(self, url: str, model: Path, process: subprocess.Popen[str], errors: Path) -> None:
        super().__init__(url, ALIAS, None)
        self.process = process
        self.path = model
        self.port = int(url.rpartition(":")[2])
        self._errors = errors
        self._control: str | None = None

    @property
    def log(self) -> str:
        """What it wrote to stderr so far."""
        return self._errors.read_text()

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The model's own."""
        return Vocabulary.open(self.path)

    @functools.cached_property
    def info(self) -> ModelInfo:
        """What the model file says of itself; `n_ctx` is not known here."""
        return self.vocabulary.info(ALIAS, 0, 0)

    @property
    def eog(self) -> tuple[int, ...]:
        """Tokens that end an answer: ban them with `logit_bias` and it goes on to `max_tokens`."""
        return self.info.eog

    async def control(self) -> str:
        """The fixed request: its text."""
        answer = await self.comp(**CONTROL, headrace={"cache": False})
        assert answer.status == 200, answer
        return answer.text

    async def alive(self) -> None:
        """ALIVE: health is good, and the control request gives what it gave the first time."""
        assert self.process.poll() is None, self.log
        assert (await self.get("/health")).status == 200
        text = await self.control()
        assert text
        assert self._control in (None, text)
        self._control = text


def _start(model: Path, folder: Path, settings: dict[str, Any]) -> Tiny:
    # One thread: on cores that others use too, the engine's two would mostly wait for each other, ten times as long.
    settings = {
        "model_alias": ALIAS,
        "model_measure": "false",
        "engine_threads": 1,
        "engine_threads_batch": 1,
        **settings,
    }
    arguments = [f"--set={name.replace('_', '.', 1)}={value}" for name, value in settings.items()]
    errors = folder / "stderr"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    with errors.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", str(model), "--port=0", *arguments],
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
            assert "Ready" in said
            return Tiny(found[1], model, process, errors)
    raise AssertionError(f"the server ended with {process.wait()}: {said}{errors.read_text()}")


def _stop(server: Tiny) -> None:
    process = server.process
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(40)
    finally:
        process.kill()
        assert process.stdout is not None
        process.stdout.close()
        process.wait()
    assert code == 0, server.log
    assert "Traceback" not in server.log


@contextlib.contextmanager
def tinies(model: Path, folder: Path) -> Iterator[Callable[..., Tiny]]:
    """Servers by their settings, `section_name=value`; each is started when first asked for, all end here."""
    running: dict[str, Tiny] = {}

    def start(**settings: Any) -> Tiny:
        name = repr(sorted(settings.items()))
        if name not in running:
            own = folder / str(len(running))
            own.mkdir()
            running[name] = _start(model, own, settings)
        return running[name]

    try:
        yield start
    finally:
        with contextlib.ExitStack() as stack:
            for server in running.values():
                stack.callback(_stop, server)
