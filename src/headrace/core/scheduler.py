"""Which tokens does the next step compute?

    plan(now) ──► begin(plan, now) ──► engine ──► apply(plan, result, now)
     decides        admits, makes room              books what was computed, for `core.teller` to tell

Rules:
1. Decodes first: every reader gets a token in every step, whatever else is in it.
2. Prompts share what is left of the step's budget (`core.budget`). Who is due first goes first: a prompt is due
   after a few times the work it is, so that a question passes a document, and nobody who comes after a document is due
   passes it any more.
3. A prompt whose prefix is being computed for another waits for it instead of computing it again (`core.door`).
4. Finished sequences stay in the KV for reuse (`core.residency`). Running ones are never robbed for newcomers; when
   they outgrow the pool, one is sent back to the queue and resumes exactly.
5. `plan` only reads; `begin` and `apply` are the only writers.
Pure: no clock, no I/O, no locks.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from headrace.core.attention import TILE
from headrace.core.budget import Room, Ways, fill, filled
from headrace.core.costmodel import CostModel, Work
from headrace.core.door import Door
from headrace.core.drafter import Drafter
from headrace.core.events import Admitted, Event, Failed
from headrace.core.kv import CellPool, Outside, PrefixIndex
from headrace.core.limits import Limits
from headrace.core.plan import Admission, Chunk, Draw, Drawn, KvOp, Plan, Share, StepResult
from headrace.core.queued import AGEING
from headrace.core.request import BATCH, Generation
from headrace.core.residency import Residency
from headrace.core.sequence import Sequence, sequences
from headrace.core.teller import Taken, Teller
from headrace.core.waiting import Waiting

STRETCH = 1.0 + 1.0 / AGEING
"""A prompt without a deadline is due after this many times the seconds that it takes alone: what is left to do of a
prompt counts AGEING seconds less for each second that it has waited."""

PATIENCE = 30.0
"""Seconds that a request of the batch class lets others pass."""

NOMINAL = 1e-3
"""Seconds a prompt token counts without a cost model: only the order depends on it."""

PADDABLE = 4 * TILE
"""Free cells from which on a step may be padded: for its prompt, its readers and the padding."""

SAMPLE = 8
"""The cost model learns from every step with a prompt in it, and from each so-manieth of the others: all are alike."""


class Scheduler:
    """Owner of all sequences of one engine."""

    def __init__(
        self,
        limits: Limits,
        *,
        index: Callable[[], PrefixIndex],
        pool: CellPool,
        piece: Callable[[int], bytes],
        eog: frozenset[int],
        cost: CostModel | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`cost`: what is known of the engine, else it is learned; `drafter`: who guesses tokens ahead, if anybody."""
        self.limits = limits
        self.cost = None if limits.pace is None else cost or CostModel()
        self.residency = Residency(
            index=index,
            pool=pool,
            idle_cells=limits.idle_cells,
            warm_cells=limits.warm_cells,
            prefix_cache=limits.prefix_cache,
        )
        self._pool = pool
        self.teller = Teller(piece, eog)
        self._drafter = drafter
        self.waiting = Waiting(by_due=limits.earliest_deadline)
        self.running: list[Sequence] = []
        self._steps, self._decode_share = 0, 0.0  # of one reader
        self.prompt_tokens = self.cached_tokens = self.preemptions = 0

    def __repr__(self) -> str:
        return f"<Scheduler [{len(self.running)} running, {len(self.waiting)} waiting, {self.residency!r}]>"

    def submit(self, generation: Generation, now: float, outside: Outside | None = None, *, hold: float = 0.0) -> None:
        """Queue all choices of a generation. `outside`: what is kept of it elsewhere, being fetched until `hold`."""
        come = sequences(generation, now, self.teller.piece)
        if not come:
            return
        known, _ = self.residency.match(come[0])
        if outside is not None:
            known = max(known, min(outside.length, len(come[0].tokens) - 1))
        due = now + PATIENCE * (generation.priority == BATCH)
        if not generation.resume:  # the reader of a replay has waited since the engine died
            fair = max(self.limits.ttft, STRETCH * self.prefill_seconds(known, len(come[0].tokens) - known))
            due += fair if generation.deadline is None else generation.deadline
        for sequence in come:
            sequence.known, sequence.due, sequence.outside, sequence.hold = known, due, outside, hold
            self.waiting.add(sequence)

    def fetched(self, rid: int, outside: Outside | None) -> None:
        """What a generation was held for is there, or will not come."""
        self.waiting.fetched(rid, outside)

    def held_until(self, now: float) -> float | None:
        """When the first of those that waited for a fetch in the plan of `now` gives up."""
        return self.waiting.held_until(now)

    def cancel(self, rid: int) -> None:
        """Forget a generation. What it computed stays for reuse, unless its prompt is not even whole."""
        self.waiting.discard(rid)
        for sequence in [s for s in self.running if s.generation.rid == rid]:
            self._retire(sequence, keep=sequence.drawn > 0)
        self.residency.shrink()

    def pause(self, rid: int, paused: bool) -> None:
        """Draw no tokens for a generation, or go on."""
        self.waiting.pause(rid, paused)
        for sequence in self.running:
            if sequence.generation.rid == rid:
                sequence.paused = paused

    def take_ops(self) -> list[KvOp]:
        """The KV operations since the last call, to be carried out in this order."""
        return self.residency.take_ops()

    def rids(self) -> set[int]:
        """Generations that are not over."""
        return self.waiting.rids | {s.generation.rid for s in self.running}

    @property
    def completion_tokens(self) -> int:
        """Drawn since start."""
        return self.teller.tokens

    @property
    def decode_share(self) -> float:
        """Of the seconds of steps with a prompt in them: what goes to the readers of now by late ones, 0 to 1."""
        return min(1.0, self._decode_share * sum(s.drawn > 0 for s in self.running))

    @property
    def backlog(self) -> int:
        """Prompt tokens that are to be computed, as far as is known now; what choices share counts once."""
        return self.begun + self.waiting.fresh_tokens

    @property
    def begun(self) -> int:
        """Those of the backlog whose sequences a step has worked on, here or in the engine that this one replaces."""
        return self.waiting.begun_tokens + sum(s.pending for s in self.running if not s.decoding)

    # Deciding.

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when there is nothing to compute."""
        active = [s for s in self.running if not s.paused]
        shares = [Share(s, 1) for s in active if s.decoding]
        reading = len(shares)
        if reading == len(active) and not self.waiting and reading <= self._pool.free:
            return self._decodes(shares) if shares else None  # most steps
        base = self._base(shares)
        pace, batch, most = self.limits.pace, self.limits.max_batch, self.limits.max_running
        if self.limits.wider and pace is not None:
            batch = pace.batch(self.cost, base, batch, most)
        prompts = self._in_order([s for s in active if not s.decoding], batch, now)
        room = self._room(base, prompts, batch, now)
        door = Door(
            self.residency,
            self.running,
            max_batch=batch,
            max_running=most,
            await_prefix=self.limits.await_prefix,
            prefill=self.prefill_seconds,
        )
        served: set[Sequence] = set()
        for sequence in prompts:
            if room.full:
                break
            start = sequence.computed
            if sequence.slot is None:
                admission = door.open(sequence, burnt=self._burnt(sequence, now))
                if admission is not None:
                    start = admission.length
                elif door.awaited is not None:  # it has the turn, or those whom it lets pass would pass both
                    sequence = door.awaited
                    start = sequence.computed
                else:
                    continue
            if sequence in served:
                continue
            served.add(sequence)
            count = room.give(start, len(sequence.tokens) - start)
            if count:
                shares.append(Share(sequence, count))
            elif sequence.slot is None:
                door.admissions.pop()  # it got a place but no token: the next step sees to it
                break
        own = sum(share.count for share in shares if share.sequence.slot is not None)
        if own > self._pool.cells - self._pool.held and len(self.running) > 1:
            return Plan((), preempted=(self._victim(),))  # what that frees, its cells being shared, the next plan sees
        if not shares:
            return None
        work = room.work if self.cost is not None else None
        return Plan(tuple(shares), tuple(door.admissions), (), work, len(shares) == reading)

    def _decodes(self, shares: list[Share]) -> Plan:
        """A step in which everybody decodes and nobody waits: there may be time to guess ahead."""
        cost, n, learns = self.cost, len(shares), self._steps % SAMPLE == 0
        drafter = self._drafter if n < self.limits.max_batch else None  # a full batch is efficient as it is
        if cost is None or not (learns or drafter is not None or (fill(cost, n) and self._pads)):
            return Plan(tuple(shares), decodes=True)
        work = base = self._base(shares)
        if drafter is not None:
            work = drafter.add(shares, base, cost, min(self.limits.step_tokens, self._pool.free) - n)
        if work is base and self._pads:
            work = filled(cost, base)
        return Plan(tuple(shares), work=work if learns or work is not base else None, decodes=True)

    def _in_order(self, running: list[Sequence], batch: int, now: float) -> list[Sequence]:
        """Prompts that lack tokens, in the order in which they get them: running ones, waiting ones that may start."""
        awake, most = sum(not s.paused for s in self.running), self.limits.max_running
        waiting = self.waiting.newcomers(now, batch - awake, most - awake, lambda s: self._burnt(s, now))
        if not self.limits.earliest_deadline:
            return running + waiting
        # Not by what is left of it as well: whoever gets a chunk would fall behind its equals, and all end at the end.
        return sorted(running + waiting, key=attrgetter("due"))

    @property
    def _pads(self) -> bool:
        return self.limits.pads and self._pool.free >= PADDABLE

    def prefill_seconds(self, start: int, count: int) -> float:
        """How long `count` prompt tokens after the first `start` take, as far as is known."""
        return self.cost.prefill(start, count) if self.cost is not None else NOMINAL * count

    def _burnt(self, sequence: Sequence, now: float) -> bool:
        """Has it waited as long as the fuse for its first token, or, sent back or put back, for its next one?"""
        pace = self.limits.pace
        if not self.limits.fuse or pace is None:
            return pace is None
        return (sequence.drawn == 0 or sequence.slot is None) and now - sequence.arrived >= pace.fuse

    def _base(self, shares: list[Share]) -> Work:
        """The decodes of a step."""
        back = sum(share.sequence.computed for share in shares)
        return Work(0, len(shares), back, self._pool.width + len(shares), reading=back)

    def _room(self, base: Work, prompts: list[Sequence], batch: int, now: float) -> Room:
        limits = self.limits
        pace, cost, reading = limits.pace, self.cost, base.decode
        most = limits.step_tokens - reading
        if pace is None or cost is None:
            chunk = limits.prefill_chunk_busy if reading else limits.prefill_chunk
            return Room(None, base, seconds=0.0, tokens=min(chunk, most))
        burnt, newcomers = [s for s in (*prompts, *self.waiting.oldest(now)) if self._burnt(s, now)], []
        places = batch - sum(not s.paused for s in self.running)
        for s in [s for s in prompts if not s.drawn]:
            places -= s.slot is None
            if places >= (batch - limits.max_running if s in burnt else 0):
                have = max(s.computed, s.known)
                newcomers.append((have, len(s.tokens) - have))
        most = min(limits.prefill_chunk, most)
        longest = limits.efficient * pace.longest(reading)
        ways = Ways(longest, 0.0 if reading else pace.stall, limits.splits, self._pads)
        crowd = pace.crowd(reading, Room(cost, base, seconds=pace.stall, tokens=most, ways=ways).finishing(newcomers))
        seconds = pace.seconds(reading, burnt=bool(burnt), crowd=crowd)
        return Room(cost, base, seconds=seconds, tokens=most, whole=crowd, ways=ways)

    def _victim(self) -> Sequence:
        """Whom to send back: one whose reader does not keep up, else the youngest."""
        return next((s for s in reversed(self.running) if s.paused), self.running[-1])

    # Doing.

    def begin(self, plan: Plan, now: float) -> list[Event]:
        """Carry out the plan's admissions and preemptions in the books, and make room for its tokens."""
        if not plan.admissions and not plan.preempted and plan.tokens <= self._pool.free:
            return []
        for sequence in plan.preempted:
            self.residency.release(sequence)
            sequence.computed = 0
            self.running.remove(sequence)
            self.waiting.put_back(sequence)
            self.preemptions += 1
        self.residency.make_room(0, len(plan.admissions), {admission.source for admission in plan.admissions})
        for admission in plan.admissions:
            self.residency.enter(admission.sequence, admission.source, admission.shared)
        self.residency.restore(plan.admissions)  # after all copies: their sources may have to go
        events = [event for admission in plan.admissions for event in self._admit(admission, now)]
        self.residency.make_room(plan.tokens, 0, ())
        self.residency.shrink()
        return events

    def _admit(self, admission: Admission, now: float) -> list[Event]:
        sequence, length = admission.sequence, admission.length
        self.waiting.remove(sequence)
        self.running.append(sequence)
        if sequence.scheduled is not None:
            return []
        # A replay may find some of its answer too.
        sequence.scheduled, sequence.cached = now, min(length, len(sequence.generation.prompt) - 1)
        self.cached_tokens += sequence.cached
        return [Admitted(sequence.generation.rid, sequence.index, sequence.cached)]

    def not_loaded(self, slot: int, length: int) -> Sequence | None:
        """A block could not be loaded: the running sequence of that slot has its first `length` tokens only."""
        sequence = next((s for s in self.running if s.slot == slot), None)
        if sequence is None or sequence.computed <= length:
            return None
        sequence.outside = None
        if sequence.restored is None:  # it has just been admitted, not again after it was sent back
            self.cached_tokens -= max(0, sequence.cached - length)
            sequence.cached = min(sequence.cached, length)
        self.residency.cut(sequence, length, told=True)
        return sequence

    def chunks(self, plan: Plan) -> list[Chunk]:
        """The plan as the engine takes it; after `begin`."""
        return [self._chunk(share) for share in plan.shares]

    def _chunk(self, share: Share) -> Chunk:
        s, guesses = share.sequence, share.guesses
        assert s.slot is not None
        end = s.computed + share.count - len(guesses)
        g = s.generation
        draw = None
        if end == len(s.tokens):
            draw = Draw(g.sampling, g.sampling.seed + s.index, end, s.tokens, len(g.prompt), len(guesses))
        tokens = s.tokens[s.computed : end]
        return Chunk(s.slot, s.computed, [*tokens, *guesses] if guesses else tokens, draw)

    def apply(self, plan: Plan, result: StepResult, restored: float, now: float) -> list[Taken]:
        """Book a computed step: what is to be told. `restored`: when its batch began; `now`: when it was drawn from."""
        taken: list[Taken] = []
        self._steps += 1
        if plan.work is not None and self.cost is not None and result.computed_at > restored:
            seconds, work = result.computed_at - restored, plan.work
            if work.decode and plan.prompts:
                part = min(1.0, self.cost.predict(Work(0, work.decode, 0, work.width)) / seconds) / work.decode
                self._decode_share += (part - self._decode_share) / SAMPLE
            self.cost.observe(work, seconds)
        for share, drawn in zip(plan.shares, result.drawn, strict=True):
            sequence = share.sequence
            if sequence.slot is None:
                continue  # cancelled while the step ran
            if sequence.restored is None:
                sequence.restored = restored
            self._computed(sequence, share.count - len(share.guesses))
            if drawn is None:
                continue
            if sequence.prefilled is None:
                sequence.prefilled = result.computed_at
            taken.append(self._take(share, drawn, now))
        self.residency.shrink()
        return taken

    def _computed(self, sequence: Sequence, count: int) -> None:
        start = sequence.computed
        self.residency.extend(sequence, count)
        self.prompt_tokens += max(0, min(sequence.computed, len(sequence.generation.prompt)) - start)

    def _take(self, share: Share, drawn: Drawn, now: float) -> Taken:
        """Book drawn tokens, and which of those in the KV are worth keeping."""
        sequence, guesses = share.sequence, len(share.guesses)
        taken = self.teller.book(sequence, drawn, now)
        count = len(taken.ids)
        if guesses:
            self.residency.settle(sequence, guesses, count - 1)
            assert sequence.speculator is not None
            sequence.speculator.observe(guesses, len(drawn.tokens) - 1)
        else:
            for _ in range(count - 1):
                self._computed(sequence, 1)  # a burst: the token before this one is in the KV
        if taken.reason:
            if len(drawn.tokens) > 1:
                self.residency.cut(sequence, sequence.computed)  # the engine went past the token that ended it
            self._retire(sequence, keep=True)
        return taken

    def fail(self, plan: Plan, message: str) -> list[Event]:
        """The engine could not compute the plan: its generations end, what they had in the KV is not to be trusted."""
        rids = {share.sequence.generation.rid for share in plan.shares}
        self.waiting.discard(*rids)
        for sequence in [s for s in self.running if s.generation.rid in rids]:
            self._retire(sequence, keep=False)
        self.residency.shrink()
        return [Failed(rid, "engine_failed", message) for rid in sorted(rids)]

    def _retire(self, sequence: Sequence, *, keep: bool) -> None:
        """A sequence is over: its slot becomes a cached one, or free."""
        self.running.remove(sequence)
        if keep:
            self.residency.leave(sequence)
        else:
            self.residency.release(sequence)
