"""Which tokens does the next step compute?

    plan(now) ──► begin(plan, now) ──► engine ──► apply(plan, result, now)
     decides        admits, makes room              books what was computed, says what became visible

Rules:
1. Decodes first: every reader gets a token in every step, whatever else is in it.
2. Prompts share what is left of the step's budget, in order of arrival; the budget is small while somebody reads.
3. A prompt whose prefix is being computed for another waits for it instead of computing it again.
4. Finished sequences stay in the KV for reuse; the least recently used goes when room is needed. Running ones are
   never robbed for newcomers; when they outgrow the pool, one is sent back to the queue and resumes exactly.
5. `plan` only reads; `begin` and `apply` are the only writers. KV operations leave through `take_ops`, in order, and
   are to be carried out before the next step.
Pure: no clock, no I/O, no locks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace.core.events import Admitted, Delta, Event, Failed, Finished, FinishReason, Marks
from headrace.core.kv import CellPool, PrefixIndex
from headrace.core.plan import Chunk, Copy, Draw, Drawn, KvOp, StepResult, Trim
from headrace.core.request import Generation
from headrace.core.sequence import Sequence, common_prefix, sequences

WORTH_WAITING = 32
"""Shorter shared prefixes are computed again: waiting for the other's step costs more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The few numbers the scheduler needs; all in tokens or sequences."""

    max_running: int = 16
    max_batch: int = 512
    """Tokens the engine takes in a step."""
    prefill_chunk: int = 512
    """Prompt tokens in a step while nobody decodes."""
    prefill_chunk_busy: int = 128
    """Prompt tokens in a step while somebody decodes."""
    idle_cells: int = 4096
    """KV cells that finished sequences may keep."""
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting sequence starts with the first `shared` tokens of slot `source`."""

    sequence: Sequence
    source: int | None
    shared: int


class Share(msgspec.Struct, frozen=True, gc=False):
    """A sequence's part of a step: its next `count` tokens."""

    sequence: Sequence
    count: int


class Plan(msgspec.Struct, frozen=True, gc=False):
    """One step. `shares` in batch order: decodes, then prompts; none when it only sends a sequence back."""

    shares: tuple[Share, ...]
    admissions: tuple[Admission, ...] = ()
    preempted: tuple[Sequence, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(share.count for share in self.shares)

    def by_generation(self) -> dict[int, int]:
        """rid → tokens of the step that are computed for it."""
        found: dict[int, int] = {}
        for share in self.shares:
            rid = share.sequence.generation.rid
            found[rid] = found.get(rid, 0) + share.count
        return found


class Scheduler:
    """Owner of all sequences of one engine."""

    def __init__(
        self, limits: Limits, *, index: PrefixIndex, pool: CellPool, piece: Callable[[int], bytes], eog: frozenset[int]
    ) -> None:
        self.limits = limits
        self._index = index
        self._pool = pool
        self._piece = piece
        self._eog = eog
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._idle: dict[int, None] = {}
        """Slots of finished sequences, least recently used first."""
        self._ops: list[KvOp] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.preemptions = 0

    def __repr__(self) -> str:
        return f"<Scheduler [{len(self.running)} running, {len(self.waiting)} waiting, {len(self._idle)} cached]>"

    # What comes in.

    def submit(self, generation: Generation, now: float) -> None:
        """Queue all choices of a generation."""
        self.waiting.extend(sequences(generation, now, self._piece))

    def cancel(self, rid: int) -> None:
        """Forget a generation. What it computed stays for reuse, unless its prompt is not even whole."""
        self.waiting = [s for s in self.waiting if s.generation.rid != rid]
        for sequence in [s for s in self.running if s.generation.rid == rid]:
            self._retire(sequence, keep=sequence.drawn > 0)
        self._shrink()

    def pause(self, rid: int, paused: bool) -> None:
        """Draw no tokens for a generation, or go on."""
        for sequence in (*self.waiting, *self.running):
            if sequence.generation.rid == rid:
                sequence.paused = paused

    def take_ops(self) -> list[KvOp]:
        """The KV operations since the last call, to be carried out in this order."""
        ops, self._ops = self._ops, []
        return ops

    def rids(self) -> set[int]:
        """Generations that are not over."""
        return {s.generation.rid for s in (*self.waiting, *self.running)}

    # Deciding.

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when there is nothing to compute."""
        active = [s for s in self.running if not s.paused]
        shares = [Share(s, 1) for s in active if s.decoding]
        reading = len(shares)
        if reading == len(active) and not self.waiting and reading <= self._pool.free:
            return Plan(tuple(shares)) if shares else None  # most steps: everybody decodes, nobody waits
        budget = self.limits.prefill_chunk_busy if reading else self.limits.prefill_chunk
        budget = min(budget, self.limits.max_batch - reading)
        for sequence in active:
            if not sequence.decoding and budget > 0:
                shares.append(Share(sequence, min(budget, sequence.pending)))
                budget -= shares[-1].count
        if sum(share.count for share in shares) > self._pool.cells - self._pool.held and len(self.running) > 1:
            # How much that frees depends on who shares its cells: the next plan sees it.
            return Plan((), preempted=(self._victim(),))
        admissions = self._admissions(budget, shares)
        return Plan(tuple(shares), tuple(admissions)) if shares else None

    def _victim(self) -> Sequence:
        """Whom to send back: one whose reader does not keep up, else the youngest."""
        return next((s for s in reversed(self.running) if s.paused), self.running[-1])

    def _admissions(self, budget: int, shares: list[Share]) -> list[Admission]:
        """Who may start, appended to `shares` as far as `budget` goes.

        First come, first served, but for shared prefixes.
        """
        admissions: list[Admission] = []
        prefilling = [s for s in self.running if s.pending > 1 and not s.paused]
        promised = self._pool.held + sum(s.pending for s in self.running)
        counted: dict[int | None, int] = {s.slot: s.computed for s in self.running}  # its cells in `promised`
        slots = self._pool.slots_free + len(self._idle)
        most = min(self.limits.max_running - len(self.running), slots)
        for sequence in self.waiting:
            if budget <= 0 or len(admissions) >= most:
                break
            if sequence.paused:
                continue
            shared, source = self._cached(sequence)
            if self._is_coming(sequence, shared, prefilling):
                continue
            # Every admission takes a slot, and none that another one copies from. Alone, it rather takes than waits.
            if len(admissions) + len({source, *counted} & self._idle.keys()) >= slots:
                if admissions:
                    break
                shared, source = 0, None
            # Idle cells that are shared become held, once; cells of a running source are counted already.
            need = len(sequence.tokens) + 1 - min(shared, counted.get(source, 0))
            if promised + need > self._pool.cells and (self.running or admissions):
                break
            promised += need
            counted[source] = max(shared, counted.get(source, 0))
            admissions.append(Admission(sequence, source, shared))
            shares.append(Share(sequence, min(budget, len(sequence.tokens) - shared)))
            budget -= shares[-1].count
            prefilling.append(sequence)
        return admissions

    def _cached(self, sequence: Sequence) -> tuple[int, int | None]:
        """(length, slot) of the prefix that need not be computed; the last token always is, for its logits."""
        if not (self.limits.prefix_cache and sequence.generation.cache):
            return 0, None
        length, slot = self._index.match(sequence.tokens)
        length = min(length, len(sequence.tokens) - 1)
        return length, slot if length else None

    def _is_coming(self, sequence: Sequence, have: int, prefilling: list[Sequence]) -> bool:
        """Is a longer prefix of this prompt being computed for somebody else right now?"""
        if not (self.limits.prefix_cache and sequence.generation.cache):
            return False
        most = len(sequence.tokens) - 1
        for other in prefilling:
            if not other.generation.cache:
                continue
            window = slice(have, have + WORTH_WAITING)
            if sequence.tokens[window] != other.tokens[window]:
                continue  # decides nearly all pairs without comparing whole prompts
            reach = min(common_prefix(sequence.tokens, other.tokens), most)
            if reach > other.computed and reach - have >= WORTH_WAITING:
                return True
        return False

    # Doing.

    def begin(self, plan: Plan, now: float) -> list[Event]:
        """Carry out the plan's admissions and preemptions in the books, and make room for its tokens."""
        if not plan.admissions and not plan.preempted and plan.tokens <= self._pool.free:
            return []
        for sequence in plan.preempted:
            self._preempt(sequence)
        sources = {admission.source for admission in plan.admissions}
        while self._pool.slots_free < len(plan.admissions):
            self._drop(next(slot for slot in self._idle if slot not in sources))
        events: list[Event] = []
        for admission in plan.admissions:
            self._admit(admission, now, events)
        while self._idle and self._pool.free < plan.tokens:
            self._evict()
        self._shrink()
        return events

    def _admit(self, admission: Admission, now: float, events: list[Event]) -> None:
        sequence, source, shared = admission.sequence, admission.source, admission.shared
        slot = self._pool.take()
        if source is not None:
            self._pool.share(source, slot, shared)
            self._index.extend(slot, sequence.tokens[:shared])
            self._ops.append(Copy(source, slot, shared))
            if source in self._idle:
                self._idle[source] = self._idle.pop(source)  # now the most recently used
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.slot, sequence.computed = slot, shared
        if sequence.scheduled is None:
            cached = min(shared, len(sequence.generation.prompt) - 1)  # a replay may find some of its answer too
            sequence.scheduled, sequence.cached = now, cached
            self.cached_tokens += cached
            events.append(Admitted(sequence.generation.rid, sequence.index, cached))

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.computed = 0
        self.running.remove(sequence)
        self.waiting.insert(0, sequence)
        self.preemptions += 1

    def chunks(self, plan: Plan) -> list[Chunk]:
        """The plan as the engine takes it; after `begin`."""
        return [self._chunk(share) for share in plan.shares]

    def _chunk(self, share: Share) -> Chunk:
        s = share.sequence
        assert s.slot is not None
        end = s.computed + share.count
        g = s.generation
        draw = None
        if end == len(s.tokens):
            draw = Draw(g.sampling, g.sampling.seed + s.index, end, s.tokens, len(g.prompt))
        return Chunk(s.slot, s.computed, s.tokens[s.computed : end], draw)

    def apply(self, plan: Plan, result: StepResult, restored: float, now: float) -> list[Event]:
        """Book a computed step. `restored`: when its batch began; `now`: when its tokens were drawn."""
        events: list[Event] = []
        for share, drawn in zip(plan.shares, result.drawn, strict=True):
            sequence = share.sequence
            if sequence.slot is None:
                continue  # cancelled while the step ran
            if sequence.restored is None:
                sequence.restored = restored
            self._computed(sequence, share.count)
            if drawn is None:
                continue
            if sequence.prefilled is None:
                sequence.prefilled = result.computed_at
            self._take(sequence, drawn, now, events)
        self._shrink()
        return events

    def _computed(self, sequence: Sequence, count: int) -> None:
        assert sequence.slot is not None
        start = sequence.computed
        sequence.computed += count
        self._pool.extend(sequence.slot, count)
        if sequence.generation.cache:
            self._index.extend(sequence.slot, sequence.tokens[start : sequence.computed])
        self.prompt_tokens += max(0, min(sequence.computed, len(sequence.generation.prompt)) - start)

    def _take(self, sequence: Sequence, drawn: Drawn, now: float, events: list[Event]) -> None:
        """Add drawn tokens to a sequence, up to the one that ends it."""
        generation = sequence.generation
        text: list[str] = []
        reason: FinishReason | None = None
        for i, token in enumerate(drawn.tokens):
            if i:
                self._computed(sequence, 1)  # a burst: the token before this one is in the KV
            sequence.tokens.append(token)
            sequence.untold += 1
            self.completion_tokens += 1
            ended = token in self._eog
            if not ended:
                if drawn.logprobs:
                    sequence.unsaid.append(drawn.logprobs[i])
                text.append(sequence.detokenizer.feed(self._piece(token)))
            if ended or sequence.detokenizer.stopped:
                reason = "stop"
            elif sequence.drawn == generation.max_tokens:
                reason = "length"
            if reason:
                text.append(sequence.detokenizer.flush())
                break
        self._say(sequence, "".join(text), now, events)
        if reason:
            events.append(Finished(generation.rid, sequence.index, reason, sequence.drawn))
            self._retire(sequence, keep=True, burst=len(drawn.tokens) > 1)

    def _say(self, sequence: Sequence, text: str, now: float, events: list[Event]) -> None:
        if not text and not sequence.unsaid:
            return
        marks = None
        if text and not sequence.shown:
            sequence.shown = True
            scheduled, restored, prefilled = sequence.scheduled, sequence.restored, sequence.prefilled
            assert scheduled is not None
            assert restored is not None
            assert prefilled is not None
            marks = Marks(sequence.arrived, scheduled, restored, prefilled, now)
        n = sequence.untold
        events.append(
            Delta(
                sequence.generation.rid,
                sequence.index,
                text,
                n,
                tuple(sequence.unsaid),
                marks,
                tuple(sequence.tokens[-n:]),
            )
        )
        sequence.untold = 0
        sequence.unsaid.clear()

    def fail(self, plan: Plan, message: str) -> list[Event]:
        """The engine could not compute the plan: its generations end, what they had in the KV is not to be trusted."""
        rids = {share.sequence.generation.rid for share in plan.shares}
        self.waiting = [s for s in self.waiting if s.generation.rid not in rids]
        for sequence in [s for s in self.running if s.generation.rid in rids]:
            self._retire(sequence, keep=False)
        self._shrink()
        return [Failed(rid, "engine_failed", message) for rid in sorted(rids)]

    # Slots.

    def _retire(self, sequence: Sequence, *, keep: bool, burst: bool = False) -> None:
        """A sequence is over: its slot becomes a cached one, or free."""
        slot = sequence.slot
        assert slot is not None
        self.running.remove(sequence)
        if not (keep and self.limits.prefix_cache and sequence.generation.cache) or self._index.redundant(slot):
            self._release(sequence)
            return
        sequence.slot = None
        if burst:
            self._ops.append(Trim(slot, sequence.computed))  # the engine computed past the token that ended it
        self._pool.retire(slot)
        self._idle[slot] = None
        for other in [s for s in self._idle if s != slot and self._index.redundant(s)]:
            self._drop(other)

    def _release(self, sequence: Sequence) -> None:
        slot, sequence.slot = sequence.slot, None
        assert slot is not None
        self._index.remove(slot)
        self._pool.release(slot)
        self._ops.append(Trim(slot, 0))

    def _shrink(self) -> None:
        """Keep what is cached within its bound."""
        while self._pool.idle > self.limits.idle_cells:
            self._evict()

    def _evict(self) -> None:
        """Give up the least recently used cached slot."""
        self._drop(next(iter(self._idle)))

    def _drop(self, slot: int) -> None:
        del self._idle[slot]
        self._index.remove(slot)
        self._pool.release(slot)
        self._ops.append(Trim(slot, 0))
