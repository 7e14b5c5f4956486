"""A factory for workers, `broken_rows_engine:make`: a prompt with 250 in it gives logits that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.core.clock import Clock
from headrace.core.plan import Chunk, Drawn, StepResult
from headrace.testing import ScriptedEngine


class BrokenRows(ScriptedEngine):
    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        result = super().step(chunks)
        broken = tuple(i for i, chunk in enumerate(chunks) if chunk.draw and 250 in chunk.draw.history)
        drawn = tuple(Drawn(()) if i in broken else one for i, one in enumerate(result.drawn))
        return msgspec.structs.replace(result, drawn=drawn, broken=broken)


def make(settings: dict[str, Any], clock: Clock) -> BrokenRows:
    return BrokenRows([[c.encode()] for c in "abcdefgh" * 30], clock=clock, step_s=0.001, **settings)
