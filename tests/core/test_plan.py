from __future__ import annotations

import copy

import pytest

from headrace.core.plan import Chunk, Copy, Draw, Drawn, StepResult, Trim
from headrace.core.request import Sampling

WORDS = [
    Draw(Sampling(), 1, 2, [3], 1),
    Chunk(0, 0, [1], None),
    Drawn((1,)),
    StepResult((None,), 0.0),
    Copy(0, 1, 2),
    Trim(0, 0),
]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_what_is_planned_stays_so(word: Draw | Chunk | Drawn | StepResult | Copy | Trim) -> None:
    with pytest.raises(AttributeError):
        setattr(word, word.__match_args__[0], None)
    assert word == copy.copy(word)
