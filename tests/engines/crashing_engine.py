"""A factory for workers that die of kernels, `crashing_engine:make`: the double of a library that is built wrongly.

`settings["dies"]`: how, and `settings["unless"]`: the settings with which it does not. All it leaves is marks in the
folder `settings["marks"]`, one a start.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import StartupError
from headrace.engines.base import UntrueNumbers
from headrace.testing import ScriptedEngine

OWN = ("dies", "unless", "marks", "extra_buffers", "flash_attention", "kv_type", "threads", "threads_batch")


def make(settings: dict[str, Any], clock: Clock) -> ScriptedEngine:
    with tempfile.NamedTemporaryFile(dir=settings["marks"], delete=False):
        pass
    if any(settings[key] != value for key, value in settings["unless"].items()):
        _die(settings["dies"])
    options = {key: value for key, value in settings.items() if key not in OWN}
    return ScriptedEngine([[c.encode()] for c in "abcdefgh"], clock=clock, **options)


def _die(how: str) -> None:
    if how == "NaN":
        raise UntrueNumbers("x.gguf computes numbers that are none")
    if how == "refusal":
        raise StartupError("x.gguf is no model")
    if how == "exception":
        raise ValueError("of Python")
    sys.stderr.write("/a/ggml.c:12: GGML_ASSERT(sane) failed\n" if how == "SIGABRT" else "")
    sys.stderr.flush()
    number = signal.Signals[how]
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pause()
