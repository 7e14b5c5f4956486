"""Logits to one token. Exact, without sorting the vocabulary, and the same whenever it is asked again.

Order: penalties and bias change the logits; temperature scales them; top_k, top_p and min_p, in this order, each
narrow the distribution that the one before left; then one draw. temperature 0, top_k 1, top_p 0 and min_p 1 all mean
the likeliest token (ties: the lowest id). The temperature may fall along the answer (`Decay`); it depends on the
token's place there and on nothing else.

top_p needs no sort either, since it need not be known which tokens it leaves, only whether one of them was drawn:

    likeliest ─────────────▶ least likely
    ├── kept by top_p ──┼───── not kept ─────┤
                        :         ▲ drawn: not kept, so nothing from here on is
    ├───────────────────:────────┤ draw again among these only
                  ▲ drawn: kept, so it is the token

Each draw is proportional to the weights of a set that holds all that is kept; so is, then, the first that is kept (the
idea of FlashInfer's sorting-free sampling kernels, 2025). With all of a vocabulary alike it takes 1 + ln(1 / top_p)
draws on average, otherwise fewer.

The random numbers are functions of (seed, position, attempt): a stream that is replayed from the middle draws what it
drew before. Tokens lie along the unit interval in the order of their ids, not of their weights: two that are almost
equally likely do not change places because of a logit's last bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace.core.events import TokenLogprob
from headrace.core.plan import Draw, Drawn
from headrace.core.request import Sampling

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]

BROKEN = Drawn(())
"""What a row gives whose largest logit is not finite."""

FLOOR = -9999.0
"""Stands for log(0) on the wire: JSON has no minus infinity."""

BLOCK = 256
"""Tokens whose weights are summed before the sums are searched. A running sum over a whole vocabulary costs ten times
as much as these."""
FEW = 8
"""Fewer than one in so many left: they are moved together."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int, attempt: int = 0) -> float:
    """A number in [0, 1) that depends on nothing else.

    SplitMix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) over the
    seed's stream advanced by `position`; its top 53 bits. Attempt k goes on from there: the k-th number of a generator
    that starts in this state.
    """
    z = _mixed((seed * 0xD1342543DE82EF95 + (position + 1) * _GOLDEN) & _MASK)
    for _ in range(attempt):
        z = _mixed((z + _GOLDEN) & _MASK)
    return (z >> 11) * 2.0**-53


def _mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class Scratch:
    """Room for the draws of one thread. Fresh memory of this size costs as much as the arithmetic that fills it."""

    __slots__ = ("mask", "spare", "weights")

    def __init__(self, n_vocab: int) -> None:
        self.weights = np.empty(n_vocab, dtype=np.float32)
        self.spare = np.empty(n_vocab, dtype=np.float32)
        self.mask = np.empty(n_vocab, dtype=np.bool_)


def draw(logits: Logits, want: Draw, piece: Callable[[int], bytes], scratch: Scratch | None = None) -> Drawn:
    """Draw one token from a row of logits (n_vocab,), which is not changed. `scratch`: one of n_vocab, to be reused.

    BROKEN if nothing can be drawn: the largest logit is NaN (as it is if any is) or infinite.
    """
    sampling, answered = want.sampling, want.position - want.prompt
    shaped = _shape(logits, want)
    if is_greedy(sampling, answered):
        token = int(shaped.argmax())
        if not math.isfinite(shaped[token]):
            return BROKEN
    else:
        token = _sample(shaped, want, temperature_at(sampling, answered), scratch or Scratch(len(logits)))
        if token < 0:
            return BROKEN
    if sampling.logprobs is None:
        return Drawn((token,))
    return Drawn((token,), (logprob(logits, token, sampling.logprobs, piece),))


def temperature_at(sampling: Sampling, answered: int) -> float:
    """The temperature of token number `answered` (from 0) of the answer. It never rises along an answer."""
    decay = sampling.decay
    if decay is None:
        return sampling.temperature
    fallen = sampling.temperature * decay.factor ** (answered // decay.every)
    return min(sampling.temperature, max(decay.floor, fallen))


def is_greedy(sampling: Sampling, answered: int = 0) -> bool:
    """Is the likeliest token taken, at token number `answered` of the answer and at all later ones?"""
    # Below 1e-5 the scaled logits leave float32; nothing but the likeliest token has any weight there.
    cold = temperature_at(sampling, answered) < 1e-5
    return cold or sampling.top_k == 1 or sampling.top_p == 0 or sampling.min_p == 1


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


def _sample(logits: Logits, want: Draw, temperature: float, scratch: Scratch) -> int:
    """One draw with temperature > 0; -1 if the row is broken."""
    s = want.sampling
    peak = logits.max()
    if not np.isfinite(peak):
        return -1
    weights = np.subtract(logits, peak, out=scratch.weights)
    weights *= np.float32(1.0 / temperature)
    np.exp(weights, out=weights)  # relative to the likeliest token's, which is 1
    left = _Left(weights, scratch)
    if 0 < s.top_k < len(weights):
        left.pick(_largest(weights, s.top_k))
    mass = s.top_p * float(left.heap[-1])
    if s.min_p > 0.0:
        # Which tokens it leaves does not depend on top_p, so the order of the two is free; but the mass that top_p
        # asks for is of what top_k left.
        left.narrow(left.weights >= np.float32(s.min_p))
    for attempt in itertools.count():
        i = _find(left.weights, left.heap, uniform(want.seed, want.position, attempt))
        if s.top_p >= 1.0 or i == left.weights.argmax() or not left.narrow(left.before(i), mass):
            break
    return i if left.ids is None else int(left.ids[i])


class _Left:
    """The tokens that can still be drawn: their ids (None: all), weights and heap, by ascending id.

    While they are many, those that are out weigh nothing and keep their place; moving the others together would cost
    more than it saves.
    """

    __slots__ = ("_mask", "_spare", "heap", "ids", "weights")

    def __init__(self, weights: Logits, scratch: Scratch) -> None:
        self.ids: Ids | None = None
        self.weights = weights
        self.heap = _heap(weights)
        self._spare, self._mask = scratch.spare, scratch.mask

    def before(self, i: int) -> NDArray[np.bool_]:
        """Who is likelier than token i, or as likely with a lower id."""
        weight = self.weights[i]
        mask = self._mask[: len(self.weights)]
        np.greater(self.weights, weight, out=mask)
        mask[:i] |= self.weights[:i] == weight
        return mask

    def narrow(self, mask: NDArray[np.bool_], mass: float = 0.0) -> bool:
        """Leave only those in the mask if they weigh `mass` or more. Did they?"""
        inner = np.multiply(self.weights, mask, out=self._spare[: len(mask)])
        heap = _heap(inner)
        if heap[-1] < mass:
            return False
        if np.count_nonzero(mask) * FEW < len(mask):
            self.pick(np.flatnonzero(mask))
        else:
            self.weights, self._spare, self.heap = inner, self.weights, heap
        return True

    def pick(self, keep: Ids) -> None:
        """Leave only those at the indices `keep`, ascending."""
        self.ids = keep if self.ids is None else self.ids[keep]
        self.weights = self.weights[keep]
        self.heap = _heap(self.weights)


def _heap(weights: Logits) -> NDArray[np.float64]:
    """(n // BLOCK + 1,): the weights up to the end of each block, summed. The last block may be empty."""
    whole = len(weights) // BLOCK
    sums = np.empty(whole + 1, dtype=np.float64)
    # add.reduceat would first copy all of it as float64; einsum converts it piece by piece.
    np.einsum("ij->i", weights[: whole * BLOCK].reshape(whole, BLOCK), dtype=np.float64, out=sums[:whole])
    sums[whole] = weights[whole * BLOCK :].sum(dtype=np.float64)
    return sums.cumsum()


def _find(weights: Logits, heap: NDArray[np.float64], u: float) -> int:
    """The index on which u of the whole weight falls, 0 <= u < 1; never one that weighs nothing."""
    point = u * float(heap[-1])
    block = _first_above(heap, point)
    rest = point - (float(heap[block - 1]) if block else 0.0)
    start = block * BLOCK
    return start + _first_above(np.cumsum(weights[start : start + BLOCK], dtype=np.float64), rest)


def _first_above(heap: NDArray[np.float64], point: float) -> int:
    """The first place where the running sum is above `point`; where it is nowhere, the last one that adds to it:
    rounding may lift `point` to the sum."""
    i = int(heap.searchsorted(point, side="right"))
    return i if i < len(heap) else int(heap.searchsorted(heap[-1], side="left"))


def _largest(weights: Logits, k: int) -> Ids:
    """The indices of the k largest, ascending; of equal ones the lowest indices. 0 < k < len(weights).

    At least k values reach the k-th largest of the blocks' maxima, and hardly more than k do: only those are looked at.
    """
    maxima = np.maximum.reduceat(weights, np.arange(0, len(weights), BLOCK))
    enough = len(maxima) - k
    bound = np.partition(maxima, enough)[enough] if enough >= 0 else np.float32(-np.inf)
    some = np.flatnonzero(weights >= bound)
    values = weights[some]
    least = np.partition(values, len(values) - k)[len(values) - k]
    keep = values > least
    keep[np.flatnonzero(values == least)[: k - np.count_nonzero(keep)]] = True
    picked: Ids = some[keep]
    return picked


def logprob(logits: Logits, token: int, top: int, piece: Callable[[int], bytes]) -> TokenLogprob:
    """The token's logarithmic probability and the `top` likeliest ones', under the model's own distribution."""
    peak = float(logits.max())
    log_total = peak + math.log(float(np.exp(logits - np.float32(peak)).sum(dtype=np.float64)))

    def value(i: int) -> float:
        lp = float(logits[i]) - log_total
        return min(0.0, lp) if lp > FLOOR else FLOOR

    best: tuple[tuple[int, bytes, float], ...] = ()
    if top:
        # A row that is broken has no largest ones; any will do.
        fast = top < len(logits) and math.isfinite(peak)
        ids = _largest(logits, top) if fast else np.argsort(-logits, kind="stable")[:top]
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        best = tuple((int(i), piece(int(i)), value(int(i))) for i in ids)
    return TokenLogprob(token, piece(token), value(token), best)
