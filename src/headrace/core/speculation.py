"""Guessing the tokens that come next, and deciding when a guess is worth a step's time.

    sequence   … the red fox saw the owl … and then the red fox saw
                             ▲                                     ▲ end
                          source: the text went on like this before, it may do so again

    proposer ──► guesses ──► one step computes them all ──► the right ones are accepted, the first wrong one ends it
      what?        how many? Speculator                        verification

Rules:
1. A guess never changes the answer, only how many steps it takes: see `core.verification`.
2. Looking up costs microseconds, so it runs along while nothing is drafted, and what became of each guess is known for
   nothing: how likely the next one is right is measured, by how long the text has followed its source (`support`).
3. As many guesses as give most tokens per second, by the predicted cost of the step; none if that is not clearly more
   than without.
4. Drafts live on what they earn. A step may risk no more seconds than drafts have saved before, above a small grant
   that grows by a hundredth of the time: text that cannot be guessed is slowed down by little more than that, and
   drafts grow longer only as they prove right.
Pure: no clock, no I/O, no locks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

MAX_GUESSES = 63
"""With the token before them they are 64 rows."""

_LENGTHS = (1, 3, 7, 15, 31, 63)
"""Guesses are drafted in few sizes, so that the engine finds its compute graph again."""

_GRAM = 3
"""Tokens that must agree before a place counts as a source."""

_REACH = 16
"""Between two sources the longer agreement wins; beyond this the later source."""

_CANDIDATES = 8
"""Earlier places looked at for one guess."""

_SLICE = 512
"""Tokens indexed at a time: a long prompt is spread over some steps."""

_ID_BITS = 21
_GRAM_MASK = (1 << (_ID_BITS * _GRAM)) - 1

_BOUNDS = (3, 4, 5, 7, 10, 15, 23, 41)
"""Support is told apart by these lower bounds."""

_BUCKETS = tuple(sum(support >= bound for bound in _BOUNDS) for support in range(_BOUNDS[-1] + 1))
_LAST = len(_BUCKETS) - 1

LOOKUP_PRIORS = (0.10, 0.30, 0.45, 0.55, 0.70, 0.85, 0.93, 0.97, 0.985)
"""Chance that the next token is the source's, before anything was seen; by support."""

DRAFT_PRIORS = (0.90,) * len(LOOKUP_PRIORS)
"""Hopeful: nothing is known of guesses that are not asked for, and the account bounds what trying costs."""

_WORTH = 1.05
"""Tokens per second must rise by this factor at least."""

_GRANT, _SAVED, _EARNED = 4.0, 12.0, 40.0
"""The account in plain steps: what it opens with, and what refilling and earning can bring it to."""

_REFILL = 0.01
"""What a plain step adds, in plain steps."""

_HOPELESS = 0.05
"""Longer drafts are not looked at once a guess is less likely than this to be reached."""

Outcome = tuple[int, bool]
"""(support, right) of one guess."""

Cost = Callable[[int], float]
"""Guesses -> predicted seconds of the whole step with them; 0 is the step without."""


class Proposer(Protocol):
    """Guesses how one sequence goes on. It reads the sequence's own list of tokens, which grows."""

    def review(self) -> Sequence[Outcome]:
        """Look at what was drawn since the last call: what became of the guesses, of those too that nobody asked for?
        Called once before each step; takes microseconds."""
        ...

    @property
    def support(self) -> int | None:
        """How well founded the next guess is; None: there is no guess."""
        ...

    def ready(self, allowed: float) -> bool:
        """Can it guess now? If not, it works towards it for about `allowed` seconds."""
        ...

    def cost(self, k: int) -> float:
        """Seconds that `propose(k)` takes, predicted."""
        ...

    def propose(self, k: int) -> tuple[int, ...]:
        """At most `k` guesses."""
        ...


class Lookup:
    """Proposes what followed the last time the sequence read as it does now.

    Places are found by a hash of the last three tokens; among them the one that agrees longest wins. Then the source
    is followed, token by token, for as long as the text does the same. `prompt`: how many of the tokens are the prompt;
    only agreement in what was drawn since counts as support, as a prompt that repeats itself says nothing about the
    answer.
    """

    __slots__ = ("_before", "_gram", "_last", "_prompt", "_run", "_seen", "_source", "_tokens")

    def __init__(self, tokens: Sequence[int], prompt: int) -> None:
        self._tokens = tokens
        self._prompt = prompt
        self._last: dict[int, int] = {}
        """Hash of three tokens → where the latest such three end."""
        self._before = array("i", (0,))
        """End of three tokens → where the same three ended before that; 0: nowhere. One for each token indexed."""
        self._gram = 0
        self._seen = len(tokens)
        """Tokens that the source was compared with."""
        self._source: int | None = None
        """Position of the token that is expected next."""
        self._run = 0

    def __repr__(self) -> str:
        return f"<Lookup [{len(self._before) - 1} of {len(self._tokens)} indexed, source {self._source}]>"

    @property
    def support(self) -> int | None:
        """Drawn tokens that agree with the source."""
        return self._run if self._source is not None else None

    def cost(self, k: int) -> float:
        """Nothing: see rule 2."""
        return 0.0

    def review(self) -> Sequence[Outcome]:
        """See Proposer. Up to a tenth of a millisecond while the prompt is being indexed."""
        outcomes = self._follow()
        self._index()
        if self._source is None:
            self._find()
        return outcomes

    def ready(self, allowed: float) -> bool:
        """Always."""
        return True

    def propose(self, k: int) -> tuple[int, ...]:
        """`k` guesses, or none without a source. Where the source runs into the end, it goes round."""
        if self._source is None:
            return ()
        known = tuple(self._tokens[self._source : self._source + k])
        return known if len(known) == k else (known * (k // len(known) + 1))[:k]

    def _follow(self) -> list[Outcome]:
        tokens, outcomes = self._tokens, []
        for at in range(self._seen, len(tokens)):
            if self._source is None:
                break
            right = tokens[self._source] == tokens[at]
            outcomes.append((self._run, right))
            if right:
                self._source += 1
                self._run += 1
            else:
                self._source = None
        self._seen = len(tokens)
        return outcomes

    def _index(self) -> None:
        """The last token is left out: what follows it is what we want to know."""
        before, last, gram = self._before, self._last, self._gram
        start = end = len(before) - 1
        for token in self._tokens[start : min(start + _SLICE, len(self._tokens) - 1)]:
            gram = (gram << _ID_BITS | token) & _GRAM_MASK
            end += 1
            before.append(last.get(gram, 0))
            last[gram] = end
        self._gram = gram

    def _find(self) -> None:
        tokens = self._tokens
        n = len(tokens)
        gram = 0
        for token in tokens[-_GRAM:]:
            gram = gram << _ID_BITS | token
        best, source = _GRAM - 1, None
        end = self._last.get(gram, 0)
        for _ in range(_CANDIDATES):
            if not end:
                break
            length = 0
            reach = min(_REACH, end)
            while length < reach and tokens[end - 1 - length] == tokens[n - 1 - length]:
                length += 1
            if length > best:
                best, source = length, end
            end = self._before[end]
        self._source, self._run = source, min(best, n - self._prompt)


class Acceptance:
    """How often a guess is right, by its support: decayed counts upon what `prior` says, or the constants given."""

    __slots__ = ("_constants", "_keep", "_n", "_prior", "_right", "_weight")

    def __init__(self, prior: Acceptance | tuple[float, ...], *, weight: float, keep: float) -> None:
        """`weight`: guesses that the prior counts for. `keep`: what is left of a count at the next guess."""
        self._prior = prior if isinstance(prior, Acceptance) else None
        self._constants = () if isinstance(prior, Acceptance) else prior
        self._weight, self._keep = weight, keep
        self._right = [0.0] * len(LOOKUP_PRIORS)
        self._n = [0.0] * len(LOOKUP_PRIORS)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Count guesses, in the prior too."""
        right, n, keep = self._right, self._n, self._keep
        for support, hit in outcomes:
            bucket = _BUCKETS[support] if support < _LAST else _BUCKETS[_LAST]
            right[bucket] = right[bucket] * keep + hit
            n[bucket] = n[bucket] * keep + 1.0
        if self._prior is not None:
            self._prior.learn(outcomes)

    def fade(self) -> None:
        """Nothing was tried: forget a little, so that what failed once is tried again some day."""
        self._right = [count * 0.999 for count in self._right]
        self._n = [count * 0.999 for count in self._n]
        if self._prior is not None:
            self._prior.fade()

    def rates(self) -> list[float]:
        """The chance of a guess, by support."""
        prior = self._prior.rates() if self._prior is not None else self._constants
        w = self._weight
        return [(p * w + right) / (w + n) for p, right, n in zip(prior, self._right, self._n, strict=True)]


class Speculator:
    """How many guesses one sequence gets in a step. Made by `Speculation.begin`."""

    __slots__ = ("_account", "_at", "_base", "_owner", "_paid", "_sources", "_tokens")

    def __init__(
        self, owner: Speculation, tokens: Sequence[int], sources: Sequence[tuple[Proposer, Acceptance]]
    ) -> None:
        self._owner = owner
        self._tokens = tokens
        self._sources = sources
        self._at = -1
        """Tokens at the last call: a step that is planned again is not counted again."""
        self._account: float | None = None
        """Seconds that a draft may lose; None before the first step."""
        self._base = self._paid = 0.0

    def guess(self, cost: Cost, *, allowed: float, most: int) -> tuple[int, ...]:
        """The guesses for this step; empty when none pay. For each step while the sequence decodes; asked again
        before a token was drawn, it says the same.

        `allowed`: seconds by which the step may become longer (who else waits for it?). `most`: guesses that there is
        room for, in the batch, the cells, the context and the answer. A step that is not carried out need not be
        reported.
        """
        base = cost(0)
        again, self._at = len(self._tokens) == self._at, len(self._tokens)
        if self._account is None:
            self._account = _GRANT * base
        risk = min(self._account, allowed)
        best, k, chosen = _WORTH / base, 0, None
        for proposer, acceptance in self._sources:
            outcomes = proposer.review()
            if outcomes:
                acceptance.learn(outcomes)
            support = proposer.support
            if support is None or most <= 0:
                continue
            if not outcomes and not again:
                acceptance.fade()
            rate, length = _best(proposer, acceptance.rates(), support, cost, base + risk, most)
            if rate > best:
                best, k, chosen = rate, length, proposer
        guesses = chosen.propose(k) if chosen is not None and chosen.ready(allowed) else ()
        if chosen is None or not guesses:
            if self._account < _SAVED * base and not again:
                self._account += _REFILL * base
            return ()
        self._base, self._paid = base, cost(len(guesses)) + chosen.cost(len(guesses))
        return guesses

    def observe(self, proposed: int, accepted: int) -> None:
        """What became of the last guesses, after a step that was carried out: how many there were, how many were
        right."""
        if not proposed or self._account is None:
            return
        owner = self._owner
        owner.steps += 1
        owner.proposed += proposed
        owner.accepted += accepted
        earned = self._account + (accepted + 1) * self._base - self._paid
        self._account = max(0.0, min(earned, _EARNED * self._base))


def _best(
    proposer: Proposer, rates: list[float], support: int, cost: Cost, limit: float, most: int
) -> tuple[float, int]:
    """(tokens per second, guesses) of the best draft whose step takes at most `limit` seconds; (0, 0) if none does.

    With a chance a(s) for a guess of support s, k guesses give 1 + a(s) + a(s)a(s+1) + … tokens, k + 1 terms: the
    right ones before the first wrong one, and the one that is drawn behind them.
    """
    best, length = 0.0, 0
    tokens, reached = 1.0, 1.0
    i = 0
    for size in _LENGTHS:
        k = min(size, most)
        while i < k:
            reached *= rates[_BUCKETS[min(support + i, _LAST)]]
            tokens += reached
            i += 1
        seconds = cost(k) + proposer.cost(k)
        if seconds > limit:
            break
        if tokens > best * seconds:
            best, length = tokens / seconds, k
        if k == most or reached < _HOPELESS:
            break
    return best, length


class Speculation:
    """All of an engine's speculation: what its sequences have learned together, and the totals.

    `draft` makes a second proposer for a sequence's tokens: a draft model.
    """

    def __init__(self, draft: Callable[[Sequence[int]], Proposer] | None = None) -> None:
        self._draft = draft
        self._lookups = Acceptance(LOOKUP_PRIORS, weight=16.0, keep=0.995)
        self._drafts = Acceptance(DRAFT_PRIORS, weight=16.0, keep=0.995)
        self.steps = 0
        """Sequence steps with guesses."""
        self.proposed = 0
        self.accepted = 0

    def begin(self, tokens: Sequence[int], prompt: int) -> Speculator:
        """For one sequence. `tokens` is its own list, which grows as tokens are drawn; `prompt` of them are given."""
        sources: list[tuple[Proposer, Acceptance]] = [(Lookup(tokens, prompt), _own(self._lookups))]
        if self._draft is not None:
            sources.append((self._draft(tokens), _own(self._drafts)))
        return Speculator(self, tokens, sources)


def _own(shared: Acceptance) -> Acceptance:
    """One sequence's view of what all have seen."""
    return Acceptance(shared, weight=6.0, keep=0.95)
