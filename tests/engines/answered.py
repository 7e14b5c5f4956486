"""An answer of a real engine, step by step, with guesses."""

from __future__ import annotations

from headrace.core.plan import Chunk, Draw
from headrace.core.request import Sampling
from headrace.core.speculation import Speculation
from headrace.engines.llama import LlamaEngine


def answered(
    engine: LlamaEngine, prompt: list[int], sampling: Sampling, n: int, speculation: Speculation, *, most: int
) -> tuple[list[int], int]:
    """(n tokens, steps) with at most `most` guesses a step, where rows cost next to nothing, so that there are many."""
    tokens, computed, steps = list(prompt), 0, 0
    speculator = speculation.begin(tokens, len(prompt))
    while len(tokens) < len(prompt) + n:
        room = min(most, len(prompt) + n - len(tokens) - 1)
        guesses = speculator.guess(lambda k: 1.0 + 0.001 * k, allowed=1.0, most=room)
        draw = Draw(sampling, sampling.seed, len(tokens), tokens, len(prompt), len(guesses))
        (drawn,) = engine.step([Chunk(0, computed, [*tokens[computed:], *guesses], draw)]).drawn
        assert drawn is not None
        speculator.observe(len(guesses), len(drawn.tokens) - 1)
        tokens += drawn.tokens
        computed = len(tokens) - 1
        engine.trim(0, computed)
        steps += 1
    engine.trim(0, 0)
    return tokens[len(prompt) :], steps
