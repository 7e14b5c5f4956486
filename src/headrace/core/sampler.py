"""Logits to one token. Exact, without sorting the vocabulary, and the same whenever it is asked again.

Order: penalties and bias change the logits; temperature scales them; top_k, top_p and min_p, in this order, each
narrow the distribution that the one before left; then one draw. temperature 0, top_k 1, top_p 0 and min_p 1 all mean
the likeliest token (ties: the lowest id).

The random number is a function of (seed, position): a stream that is replayed from the middle draws what it drew
before.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace.core.events import TokenLogprob
from headrace.core.plan import Draw, Drawn
from headrace.core.request import Sampling

Logits = NDArray[np.float32]

FLOOR = -9999.0
"""Stands for log(0) on the wire: JSON has no minus infinity."""

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else.

    SplitMix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) over the
    seed's stream advanced by `position`; its top 53 bits.
    """
    z = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return (z >> 11) * 2.0**-53


def draw(logits: Logits, want: Draw, piece: Callable[[int], bytes]) -> Drawn:
    """Draw one token from a row of logits (n_vocab,), which is not changed."""
    sampling = want.sampling
    shaped = _shape(logits, want)
    if is_greedy(sampling):
        token = int(shaped.argmax())
    else:
        token = _sample(shaped, sampling, uniform(want.seed, want.position))
    if sampling.logprobs is None:
        return Drawn((token,))
    return Drawn((token,), (logprob(logits, token, sampling.logprobs, piece),))


def is_greedy(sampling: Sampling) -> bool:
    """Does this sampling always take the likeliest token?"""
    # Below 1e-5 the scaled logits leave float32; nothing but the likeliest token has any weight there.
    return sampling.temperature < 1e-5 or sampling.top_k == 1 or sampling.top_p == 0 or sampling.min_p == 1


def _shape(logits: Logits, want: Draw) -> Logits:
    """Penalties and bias, on a copy if there are any.

    repetition_penalty divides positive and multiplies negative logits of every token seen, prompt included (Keskar et
    al., CTRL, 2019); presence and frequency penalties subtract, for drawn tokens only (OpenAI's definition).
    """
    s = want.sampling
    repeats = s.repetition_penalty != 1.0
    counts = s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
    if not (repeats or counts or s.logit_bias):
        return logits
    out = logits.copy()
    if repeats:
        seen = np.unique(np.asarray(want.history, dtype=np.int64))
        values = out[seen]
        out[seen] = np.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if counts and len(want.history) > want.prompt:
        drawn, n = np.unique(np.asarray(want.history[want.prompt :], dtype=np.int64), return_counts=True)
        out[drawn] -= np.float32(s.presence_penalty) + np.float32(s.frequency_penalty) * n.astype(np.float32)
    for token, bias in s.logit_bias:
        # -100 and 100 mean "never" and "always" (OpenAI): beyond any logit, yet finite, so that a softmax stays one.
        out[token] += np.float32(bias if abs(bias) < 100 else math.copysign(1e5, bias))
    return out


def _sample(logits: Logits, s: Sampling, u: float) -> int:
    """One draw with temperature > 0."""
    weights = np.exp((logits - logits.max()) * np.float32(1.0 / s.temperature))
    if s.top_k == 0 and s.top_p >= 1.0 and s.min_p == 0.0:
        heap = np.cumsum(weights, dtype=np.float64)
        return int(np.searchsorted(heap, u * heap[-1], side="right"))
    ids, kept = _narrow(weights, s)
    heap = np.cumsum(kept, dtype=np.float64)
    return int(ids[min(int(np.searchsorted(heap, u * heap[-1], side="right")), len(ids) - 1)])


def _narrow(weights: Logits, s: Sampling) -> tuple[NDArray[np.int64], Logits]:
    """The tokens that top_k, top_p and min_p leave, likeliest first, with their weights.

    Only candidates above a threshold are sorted. The threshold falls until those above it are enough for top_k, hold
    the mass that top_p asks for, or everything is above it: the result is that of a full sort.
    """
    total = float(weights.sum(dtype=np.float64))
    k = s.top_k if 0 < s.top_k < len(weights) else len(weights)
    threshold = 1e-2  # weights are relative to the likeliest token's, which is 1
    while True:
        ids = np.flatnonzero(weights >= threshold)
        if threshold == 0.0 or len(ids) >= k:
            break
        if s.top_p < 1.0 and k == len(weights) and float(weights[ids].sum(dtype=np.float64)) >= s.top_p * total:
            break
        if s.top_p >= 1.0 and k == len(weights) and threshold <= s.min_p:
            break
        threshold = threshold / 16 if threshold > 1e-9 else 0.0
    ids = ids[np.argsort(-weights[ids], kind="stable")][:k]
    kept = weights[ids]
    if s.top_p < 1.0:
        mass = np.cumsum(kept, dtype=np.float64)
        of = float(mass[-1]) if k < len(weights) else total
        n = int(np.searchsorted(mass, s.top_p * of, side="left")) + 1
        ids, kept = ids[:n], kept[:n]
    if s.min_p > 0.0:
        n = int((kept >= s.min_p * kept[0]).sum())
        ids, kept = ids[:n], kept[:n]
    return ids, kept


def logprob(logits: Logits, token: int, top: int, piece: Callable[[int], bytes]) -> TokenLogprob:
    """The token's logarithmic probability and the `top` likeliest ones', under the model's own distribution."""
    peak = float(logits.max())
    log_total = peak + math.log(float(np.exp(logits - np.float32(peak)).sum(dtype=np.float64)))

    def value(i: int) -> float:
        lp = float(logits[i]) - log_total
        return min(0.0, lp) if lp > FLOOR else FLOOR

    best: tuple[tuple[int, bytes, float], ...] = ()
    if top:
        ids = (
            np.argpartition(logits, len(logits) - top)[len(logits) - top :]
            if top < len(logits)
            else np.arange(len(logits))
        )
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        best = tuple((int(i), piece(int(i)), value(int(i))) for i in ids)
    return TokenLogprob(token, piece(token), value(token), best)
