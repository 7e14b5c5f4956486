"""Guesses against what the model draws: an answer with guesses is the answer without them, sooner.

    chunk      t  g0 g1 g2          t: the last token drawn, g: guesses
    row        0  1  2  3           logits behind each
    drawn      g0 g1 x              token i is drawn from the row before guess i; x is not g2: g2 and what follows go

Each token is drawn as it would have been by itself: from the same row, with the history and the random number of its
own position. A token that ends the answer ends the burst.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from headrace.core.events import TokenLogprob
from headrace.core.plan import Draw, Drawn
from headrace.core.request import Sampling
from headrace.core.sampler import BROKEN, Logits, Scratch, draw, is_greedy


def verify(
    rows: Logits,
    want: Draw,
    guesses: Sequence[int],
    eog: AbstractSet[int],
    piece: Callable[[int], bytes],
    scratch: Scratch | None = None,
) -> Drawn:
    """The tokens that `rows` (len(guesses) + 1, n_vocab) give: the guesses that were right and one more.

    `want` is for the first of them. BROKEN if one of the rows that count is, see `sampler.draw`.
    """
    if is_greedy(want.sampling) and _plain(want.sampling):
        likeliest: list[int] = rows.argmax(axis=1).tolist()
        count = accepted(likeliest, guesses, eog) + 1
        if not all(math.isfinite(row[token]) for row, token in zip(rows[:count], likeliest, strict=False)):
            return BROKEN
        return Drawn(tuple(likeliest[:count]))
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    remembers = _remembers(want.sampling)
    history = list(want.history) if remembers else []
    for i, row in enumerate(rows):
        seen = history if remembers else want.history
        one = draw(row, Draw(want.sampling, want.seed, want.position + i, seen, want.prompt), piece, scratch)
        if not one.tokens:
            return BROKEN
        token = one.tokens[0]
        tokens.append(token)
        logprobs.extend(one.logprobs)
        if i == len(guesses) or token != guesses[i] or token in eog:
            break
        history.append(token)
    return Drawn(tuple(tokens), tuple(logprobs))


def accepted(drawn: Sequence[int], guesses: Sequence[int], eog: AbstractSet[int]) -> int:
    """How many guesses count: those equal to what was drawn, up to the first that is not or that ends the answer."""
    for i, (token, guess) in enumerate(zip(drawn, guesses, strict=False)):
        if token != guess or token in eog:
            return i
    return len(guesses)


def _remembers(s: Sampling) -> bool:
    """Do the tokens so far change what is drawn?"""
    return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0


def _plain(s: Sampling) -> bool:
    """Are the logits taken as they are, and nothing else asked about them?"""
    return not (_remembers(s) or s.logit_bias or s.logprobs is not None)
