"""Who may join: what an engine still has to prefill, and whether one more would be in time.

    add ──► waiting ──Admitted──► prefilling ──first Delta──► reading ──remove──► gone
     │      counts: requests,     counts: what is             counts: its place
     │      tokens, work          left of its work
     └──► Overloaded: queue_full, queue_tokens, deadline

Rules:
1. A late answer costs as much as one in time and is worth nothing, so what cannot be in time is refused before anything
   is computed for it. That is what keeps goodput flat when more comes than can be answered.
2. Hard limits hold always; a prediction refuses only what the engine's own figures show to be late. Nothing known,
   nothing refused.
3. Under overload the queue stands exactly where the last one is just in time, so figures that are a little too good
   make everybody late. Therefore predicted waits are corrected by what came of those before them.
4. A request that would find an idle engine is refused only for a deadline that its own prompt cannot meet, and now and
   then one is let in all the same: figures that refuse everybody would stay as they are for ever.
5. What was learned of a queue is over with that queue.
Pure: no clock, no I/O. One for each engine, on the server's side, where a burst is seen before the engine sees it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.core.errors import Overloaded
from headrace.core.events import Admitted, Delta, Event
from headrace.core.queued import AGEING, Queued
from headrace.core.request import Generation

MEMORY = 0.95
"""What is left of an older prompt's weight in the hit ratio when the next one is known."""

BLOCK, BLOCKS = 64, 4096
"""Tokens that prompts are compared by; how many such blocks are remembered."""

WORTH_LEARNING_S = 0.1
"""Shorter waits say more about steps and wake-ups than about the queue."""

LATE, EARLY = 1.045, 0.995
"""What the correction is multiplied by after somebody who came later, or earlier, than corrected: the two balance when
one in ten is late, as 0.1 · log LATE = −0.9 · log EARLY."""

LEAST_CORRECTION, MOST_CORRECTION = 0.5, 4.0

TRUST = 8
"""Requests that an idle engine refuses in a row for what they are themselves, before one may show what is true."""

MOST_DECODE = 0.95
"""Decodes never take all of a second: prefill always moves on."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may wait for one engine, and how long."""

    max_waiting: int = 256
    """Requests that wait for a place."""
    max_waiting_tokens: int = 262_144
    """Their prompt tokens."""
    queue_timeout_s: float = math.inf
    """Who would wait longer for its turn is refused at once."""
    places: int = 0
    """Sequences that the engine computes at the same time: who fits does not count as waiting. 0: not known, everybody
    waits until the engine has begun with it."""
    predict: bool = True
    """False: only the hard limits."""


class _Prompt:
    """One live generation. `cached` is None until the engine has begun with it."""

    __slots__ = (
        "arrived",
        "begun",
        "cached",
        "choices",
        "own",
        "priority",
        "reading",
        "reuses",
        "shared",
        "tokens",
        "wait",
    )

    def __init__(self, generation: Generation, now: float, shared: int) -> None:
        self.arrived = now
        self.shared = shared
        """Tokens of it that a recent prompt began with too: it is computed once for both."""
        self.tokens = len(generation.prompt)
        self.choices = generation.n
        self.priority = generation.priority
        self.reuses = generation.cache
        self.cached: int | None = None
        self.begun = 0.0
        self.reading = False
        """Its first token is out."""
        self.wait = self.own = 0.0
        """What the engine's figures said when it came, in s; 0 if they said nothing."""


class Overlap:
    """Beginnings of recent prompts, as hashes of their blocks of BLOCK tokens, each with all before it."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, None] = OrderedDict()

    def of(self, generation: Generation) -> int:
        """Tokens of a prompt that recent ones of the same salt began with, in whole blocks."""
        if not generation.cache:
            return 0
        blocks = 0
        for key in self._keys(generation):
            if key not in self._known:
                break
            blocks += 1
        return BLOCK * blocks

    def add(self, generation: Generation) -> None:
        """Remember a prompt."""
        if generation.cache:
            for key in self._keys(generation):
                self._known[key] = None
                self._known.move_to_end(key)
            while len(self._known) > BLOCKS:
                self._known.popitem(last=False)

    @staticmethod
    def _keys(generation: Generation) -> Iterator[int]:
        key, tokens = hash(generation.salt), generation.prompt
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = hash((key, tuple(tokens[start : start + BLOCK])))
            yield key


class Backlog:
    """The book of one engine's prompts, from submit to first token. Times in s on one clock, sizes in tokens."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._live: dict[int, _Prompt] = {}
        """rid → prompt."""
        self._begun: dict[int, _Prompt] = {}
        """Of them those that the engine has begun with: hardly more than it has slots."""
        self._queued = Queued()
        """The others, without bound."""
        self._silent = self._choices = 0
        """How many have no token yet; the places that all would take."""
        self._prefill_s = 0.0
        self._decode_share = 0.0
        self._reported = 0.0
        """Tokens that the engine says are to be computed of what it has begun with."""
        self._refused = 0
        """In a row, by an idle engine."""
        self._overlap = Overlap()
        self.correction = 1.0
        """What a predicted wait is multiplied by."""
        self._hits = self._seen = 0.0
        """Tokens of recent prompts that were cached, and all of them; the latest weigh most."""
        self._held_s = self._holders = 0.0
        """How long recent generations held their places, and how many they were; the latest weigh most."""

    def __repr__(self) -> str:
        return f"<Backlog [{len(self._live)} live, {self.waiting} waiting]>"

    @property
    def waiting(self) -> int:
        """Generations that the engine has not begun with."""
        return len(self._queued)

    @property
    def hit_ratio(self) -> float:
        """Share of a prompt that is expected to be cached: that of the prompts before it."""
        return self._hits / self._seen if self._seen else 0.0

    # What becomes known.

    def learn(self, prefill_s: float, decode_share: float, begun_tokens: int) -> None:
        """The engine's figures: s per prompt token, what decodes take of each second (0 to 1), and the prompt tokens
        that it has yet to compute of the sequences that it has begun with."""
        self._prefill_s = prefill_s
        self._decode_share = min(max(decode_share, 0.0), MOST_DECODE)
        self._reported = float(begun_tokens)

    def add(self, generation: Generation, now: float) -> None:
        """Take on a generation. Raises Overloaded."""
        if self._quiet():
            self.correction = min(self.correction, 1.0)
        prompt = _Prompt(generation, now, self._overlap.of(generation))
        if self._prefill_s > 0.0:
            size = self._size(prompt.tokens, prompt.reuses, prompt.shared)
            prompt.wait = self._wait(size, prompt.priority, now, choices=prompt.choices)
            prompt.own = self._seconds(size)
        self._check(prompt, generation.deadline)
        self._live[generation.rid] = prompt
        self._silent += 1
        self._choices += prompt.choices
        tokens, reuses = prompt.tokens, prompt.reuses
        self._queued.add(
            generation.rid,
            now,
            tokens,
            most=tokens - prompt.shared if reuses else tokens,
            least=1.0 if reuses else tokens,
            priority=prompt.priority,
            choices=prompt.choices,
        )
        self._overlap.add(generation)

    def book(self, event: Event, now: float) -> None:
        """Follow a generation to its first token."""
        prompt = self._live.get(event.rid)
        if prompt is None:
            return
        if type(event) is Admitted:
            if prompt.cached is None:
                prompt.cached, prompt.begun = event.cached, now
                self._begun[event.rid] = prompt
                self._queued.remove(event.rid, prompt.priority)
                if prompt.reuses:
                    self._hits = MEMORY * self._hits + event.cached
                    self._seen = MEMORY * self._seen + prompt.tokens
        elif type(event) is Delta and not prompt.reading:
            prompt.reading = True
            self._silent -= 1
            if prompt.cached is None:
                self._queued.pass_over(event.rid)
            self._compare(prompt, now)

    def remove(self, rid: int, now: float) -> None:
        """It is over, or nobody wants it any more; unknown ones are ignored."""
        prompt = self._live.get(rid)
        if prompt is None:
            return
        self._silent -= not prompt.reading
        self._choices -= prompt.choices
        if prompt.cached is None:
            self._queued.remove(rid, prompt.priority)
        else:
            if not prompt.reading:
                # The engine's figure holds this one until its next step: newcomers shall not pay for it.
                scale, _ = self._split()
                self._reported = max(0.0, self._reported - scale * _whole(prompt))
            self._held_s = MEMORY * self._held_s + (now - prompt.begun)
            self._holders = MEMORY * self._holders + 1.0
            del self._begun[rid]
        del self._live[rid]

    # What follows from it.

    def predict(self, tokens: int, priority: int, now: float, *, reuses: bool = True) -> float:
        """Seconds from `now` to the first token of a prompt that comes now; 0 if the engine's speed is not known.

        An approximation. Before it go all prompts of a more urgent priority, and of its own those with less work left,
        where each second of waiting counts as AGEING seconds of work done; then comes the prompt itself, less its
        share of cached tokens, all at the speed that decodes leave. If all places are taken, it waits for one as well,
        and the longer of the two counts. Prompts that come later and pass it are not foreseen; the correction knows
        what that came to before.
        """
        size = self._size(tokens, reuses)
        return self.correction * self._wait(size, priority, now) + self._seconds(size)

    def _wait(self, size: float, priority: int, now: float, *, choices: int = 1) -> float:
        """Seconds until it is the turn of a prompt of `size` tokens that comes now, by the figures alone."""
        return max(self._seconds(self._ahead(size, priority, now)), self._place(choices, priority, now))

    def _place(self, choices: int, priority: int, now: float) -> float:
        """Seconds until there is a place for it: P places that are held for H seconds each come free every H / P
        seconds, the first one when the oldest holder has had its H."""
        places = self.bounds.places
        holders = self._begun.values()
        need = choices - places + sum(p.choices for p in holders) + self._queued.choices(priority)
        if need <= 0 or not holders or not places or not self._holders:
            return 0.0
        hold = self._held_s / self._holders
        first = hold - max(now - p.begun for p in holders)
        return min(hold / places, max(0.0, first)) + (need - 1) * hold / places

    def _ahead(self, size: float, priority: int, now: float) -> float:
        """Tokens that are computed before a prompt of `size` tokens that comes now."""
        scale, ahead = self._split()
        own = self._seconds(size)
        for prompt in self._begun.values():
            if prompt.reading or prompt.priority > priority:
                continue
            left = scale * _whole(prompt)
            if prompt.priority < priority or self._seconds(left) - AGEING * (now - prompt.arrived) <= own:
                ahead += left
        return ahead + self._queued.ahead(
            own,
            priority,
            now,
            missing=1.0 - self.hit_ratio,
            prefill_s=self._prefill_s,
            prefill_share=1.0 - self._decode_share,
        )

    def _compare(self, prompt: _Prompt, now: float) -> None:
        """Learn from when its first token came."""
        if prompt.wait >= WORTH_LEARNING_S:
            late = now - prompt.arrived > self.correction * prompt.wait + prompt.own
            correction = self.correction * (LATE if late else EARLY)
            self.correction = min(max(correction, LEAST_CORRECTION), MOST_CORRECTION)

    def _quiet(self) -> bool:
        """Is there no queue, neither for work nor for places? At an overload of places all may read for a moment."""
        return not self._silent and 2 * self._choices <= self.bounds.places

    def _check(self, prompt: _Prompt, deadline: float | None) -> None:
        """Raises Overloaded if it does not fit or would be late; `retry_after` says when it would do."""
        count, start, free = self._queued.seat(self.bounds.places - sum(p.choices for p in self._begun.values()))
        if count or prompt.choices > free:
            self._check_limits(count, start, prompt.tokens)
        if self.bounds.predict and self._prefill_s > 0.0 and (self._live or self._refused < TRUST):
            self._refused += not self._live
            self._check_time(prompt, deadline)
        self._refused = 0

    def _check_limits(self, count: int, start: int, tokens: int) -> None:
        """`count` wait although all places that are free now are taken: those from row `start` on."""
        bounds = self.bounds
        if count >= bounds.max_waiting:
            work = self._queued.work(1.0 - self.hit_ratio, start)
            retry = _whole_seconds(self._seconds(work) / max(1, count))
            raise Overloaded(
                f"{count} requests are waiting, the limit is {bounds.max_waiting}; try again in {retry} s",
                retry_after=retry,
                reason="queue_full",
            )
        held = self._queued.tokens(start)
        if count and held + tokens > bounds.max_waiting_tokens:
            retry = _whole_seconds(self._seconds(held + tokens - bounds.max_waiting_tokens))
            raise Overloaded(
                f"{held} prompt tokens are waiting and this request has {tokens}, the limit is "
                f"{bounds.max_waiting_tokens}; try again in {retry} s",
                retry_after=retry,
                reason="queue_tokens",
            )

    def _check_time(self, prompt: _Prompt, deadline: float | None) -> None:
        wait, own, timeout = self.correction * prompt.wait, prompt.own, self.bounds.queue_timeout_s
        if deadline is not None and wait + own > deadline:
            retry = _whole_seconds(wait - max(0.0, deadline - own))
            what, seconds, limit = "the first token would come", wait + own, f"its deadline is {deadline:.3g} s"
        elif wait > timeout:
            retry = _whole_seconds(wait - timeout)
            what, seconds, limit = "it would be this request's turn", wait, f"the limit is {timeout:.3g} s"
        else:
            return
        raise Overloaded(
            f"{what} in {seconds:.1f} s, {limit}; try again in {retry} s", retry_after=retry, reason="deadline"
        )

    def _size(self, tokens: int, reuses: bool, shared: int = 0) -> float:
        """Tokens of a prompt that will have to be computed. Which of them are cached only the engine can tell, so the
        share is that of the prompts before it, or what it has in common with one of the latest if that is more; the
        last token always is computed."""
        return max(1.0, min(tokens * (1.0 - self.hit_ratio), tokens - shared)) if reuses else float(tokens)

    def _seconds(self, tokens: float) -> float:
        """What computing prompt tokens takes beside the decodes."""
        return tokens * self._prefill_s / (1.0 - self._decode_share)

    def _split(self) -> tuple[float, float]:
        """The engine's one figure, divided: (what is left of each running prefill, as a share of it; tokens of which
        nothing is known here: replays, sequences that had to start again).

        Those that wait are counted here: the engine would say how long they are, not what they share with others, and
        of the latest it may not have heard. Where nobody has begun, its figure is none of ours: it fills its cache.
        """
        whole = sum(_whole(p) for p in self._begun.values() if not p.reading)
        scale = min(1.0, self._reported / whole) if whole else 0.0
        return scale, max(0.0, self._reported - whole) if self._begun else 0.0


def _whole(prompt: _Prompt) -> int:
    """What the engine had to compute of a prompt when it began."""
    return prompt.tokens - (prompt.cached or 0)


def _whole_seconds(seconds: float) -> int:
    """For `Retry-After`."""
    return max(1, math.ceil(seconds))
