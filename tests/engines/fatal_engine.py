"""A factory for workers that die of what they are asked, `fatal_engine:make`.

A prompt that begins with one of the tokens below and a number k is the end of its worker when token k of its answer is
to be drawn. All answers are a function of prompt and seed, one byte a token, and a replay that goes on from other
tokens than those drawn before it fails an assertion, hence the worker.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.core.clock import Clock
from headrace.core.plan import Chunk, Drawn
from headrace.testing import Script, ScriptedEngine

ONCE, ALWAYS, HANG = 250, 251, 252
"""Dies if the file `settings["doom"]` is there, and removes it; dies every time; never comes back."""

_PARTS = ["a", "bc", " ", "é", "🔥", "<", "<s", "\n", "x", "日本"]


class Fatal(ScriptedEngine):
    def __init__(self, doom: str, clock: Clock, **options: Any) -> None:
        super().__init__(self._answer, clock=clock, record=False, **options)
        self._doom = Path(doom)
        self._seed = 0

    def _answer(self, prompt: Sequence[int]) -> Script:
        rng = random.Random(f"{list(prompt)} {self._seed}")
        text = "".join(rng.choice(_PARTS) for _ in range(self.info.n_ctx)).encode()
        return [[text[i : i + 1]] for i in range(self.info.n_ctx)]

    def _compute(self, chunk: Chunk) -> Drawn | None:
        want = chunk.draw
        if want is not None:
            history = list(want.history)
            self._seed = want.seed
            drawn = history[want.prompt :]
            assert [bytes([t]) for t in drawn] == [
                step[0] for step in self._answer(history[: want.prompt])[: len(drawn)]
            ]
            self._die(history[:2], len(drawn))
        return super()._compute(chunk)

    def _die(self, prompt: list[int], drawn: int) -> None:
        if len(prompt) < 2 or prompt[1] != drawn:
            return
        if prompt[0] == ONCE and self._doom.exists():
            self._doom.unlink()
            os._exit(9)
        if prompt[0] == ALWAYS:
            os._exit(9)
        if prompt[0] == HANG:
            threading.Event().wait()


def make(settings: dict[str, Any], clock: Clock) -> Fatal:
    return Fatal(settings["doom"], clock, **{k: v for k, v in settings.items() if k != "doom"})
