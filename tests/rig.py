"""The scheduler with its books and a scripted engine, stepped by hand; every book is compared with a naive one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec

from headrace.core.costmodel import CostModel
from headrace.core.detokenizer import Detokenizer
from headrace.core.drafter import Drafter
from headrace.core.events import Admitted, Delta, Event, Failed, Finished
from headrace.core.kv import Outside
from headrace.core.limits import Limits
from headrace.core.plan import Copy, Load, Plan, Trim
from headrace.core.request import Generation, Sampling
from headrace.core.scheduler import Scheduler
from headrace.core.sequence import Sequence as Seq
from headrace.engines.base import StepAborted, StepFailed
from headrace.testing import ManualClock, Script, ScriptedEngine
from naive import CheckedIndex, CheckedPool

GREEDY = Sampling(temperature=0.0)


class Transcript:
    """Takes events and refuses any that break the order of `core.events`."""

    def __init__(self) -> None:
        self.asked: dict[int, Generation] = {}
        self.over: dict[int, str] = {}
        """rid → "finished", "failed" or "cancelled"."""
        self.cached: dict[tuple[int, int], int] = {}
        self.texts: dict[tuple[int, int], str] = {}
        self.deltas: dict[tuple[int, int], list[Delta]] = {}
        self.ends: dict[tuple[int, int], Finished] = {}

    def ask(self, generation: Generation) -> None:
        """A replay's readers have heard nothing here: see `resumed`."""
        self.asked[generation.rid] = generation

    def resumed(self, generation: Generation, piece: Callable[[int], bytes]) -> None:
        """What the readers of a replay heard before."""
        for index, ids in enumerate(generation.resume):
            key = generation.rid, index
            if ids is None:
                self.ends[key] = Finished(generation.rid, index, "stop", 1)
                continue
            detokenizer = Detokenizer(generation.stop)
            self.texts[key] = "".join(detokenizer.feed(piece(token)) for token in ids)

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            generation = self.asked[event.rid]
            assert event.rid not in self.over, f"{event} after the end"
            if isinstance(event, Failed):
                self.over[event.rid] = "failed"
                continue
            key = event.rid, event.index
            assert 0 <= event.index < generation.n
            assert key not in self.ends, f"{event} after Finished"
            match event:
                case Admitted():
                    assert key not in self.cached, "admitted twice"
                    assert 0 <= event.cached < len(generation.prompt)
                    self.cached[key] = event.cached
                case Delta():
                    assert key in self.cached, "a delta before Admitted"
                    assert event.text or event.logprobs
                    said = self.deltas.setdefault(key, [])
                    first = bool(event.text) and not self.texts.get(key)
                    assert (event.marks is not None) == first, "marks belong to the first text"
                    said.append(event)
                    self.texts[key] = self.texts.get(key, "") + event.text
                case Finished():
                    assert key in self.cached
                    assert sum(d.tokens for d in self.deltas.get(key, ())) <= event.completion_tokens
                    assert 1 <= event.completion_tokens <= generation.max_tokens
                    self.ends[key] = event
                    if all((event.rid, i) in self.ends for i in range(generation.n)):
                        self.over[event.rid] = "finished"

    def text(self, rid: int, index: int = 0) -> str:
        return self.texts.get((rid, index), "")


class Rig:
    """Submit, cancel, pause; `step` does what the stepper does, then `check` compares all books."""

    def __init__(
        self,
        script: Script | Callable[[Sequence[int]], Script],
        limits: Limits | None = None,
        *,
        cells: int = 4096,
        slots: int = 16,
        bursts: bool = False,
        clock: ManualClock | None = None,
        wait: Callable[[float], bool] | None = None,
        step_s: float = 0.0,
        prefill_s: float = 0.0,
        cost: CostModel | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.clock = clock or ManualClock()
        self.engine = ScriptedEngine(
            script,
            step_s=step_s,
            prefill_s=prefill_s,
            clock=self.clock,
            wait=wait,
            cells=cells,
            n_ctx=cells,
            slots=slots,
            batch=self.limits.step_tokens,
        )
        self.indexes: list[CheckedIndex] = []
        """One for each salt: the first one is that of none."""
        self.pool = CheckedPool(cells=cells, slots=slots)
        self.scheduler = Scheduler(
            self.limits,
            index=self._new_index,
            pool=self.pool,
            piece=self.engine.piece,
            eog=frozenset(self.engine.info.eog),
            cost=cost,
            drafter=drafter,
        )
        self.index = self.indexes[0]
        self.kept: dict[bytes, bytes] = {}
        """What can be loaded, by key."""
        self._torn: set[int] = set()
        self.loaded = self.torn = 0
        """Blocks that were, and those that could not be."""
        self.transcript = Transcript()
        self.bursts = bursts
        """A burst may need more cells than the plan can know."""
        self.steps = 0
        self._rids = count(1)

    def _new_index(self) -> CheckedIndex:
        self.indexes.append(CheckedIndex())
        return self.indexes[-1]

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        n: int = 1,
        stop: tuple[str, ...] = (),
        sampling: Sampling = GREEDY,
        cache: bool = True,
        outside: Outside | None = None,
        hold: float = 0.0,
        **fields: Any,
    ) -> int:
        """`fields`: more of `Generation`."""
        rid = next(self._rids)
        generation = Generation(rid, list(prompt), max_tokens, n, stop, sampling, cache, **fields)
        self.transcript.ask(generation)
        self.transcript.resumed(generation, self.engine.piece)
        self.scheduler.submit(generation, self.clock(), outside, hold=hold)
        return rid

    def cancel(self, rid: int) -> None:
        self.scheduler.cancel(rid)
        if rid in self.transcript.asked:
            self.transcript.over.setdefault(rid, "cancelled")
        self._carry_out()
        self.check()

    def pause(self, rid: int, paused: bool = True) -> None:
        self.scheduler.pause(rid, paused)

    def step(self, trouble: type[StepAborted | StepFailed] | None = None) -> Plan | None:
        """One plan from beginning to end; None when there was nothing to do."""
        scheduler = self.scheduler
        plan = scheduler.plan(self.clock())
        assert scheduler.plan(self.clock()) == plan, "plan only reads"
        if plan is None:
            self._carry_out()
            self.check()
            return None
        decodes = {s: s.drawn for s in scheduler.running if s.decoding and not s.paused}
        frozen = {s: s.drawn for s in (*scheduler.running, *scheduler.waiting) if s.paused}
        self._torn.clear()
        self.transcript.take(self._carry_out(scheduler.begin(plan, self.clock())))
        self.check()
        self._check_plan(plan, decodes)
        if not plan.shares:
            return plan
        chunks = scheduler.chunks(plan)
        restored = self.clock()
        try:
            if trouble is StepFailed:
                for chunk in chunks:
                    self.engine.slots.setdefault(chunk.slot, []).extend([-1] * 3)
            if trouble is not None:
                raise trouble
            result = self.engine.step(chunks)
        except StepAborted:
            pass
        except StepFailed:
            failed = scheduler.fail(plan, "no")
            assert {e.rid for e in failed} == {share.sequence.generation.rid for share in plan.shares}
            self.transcript.take(failed)
        else:
            self.steps += 1
            self.pool.real.layout.place([(chunk.slot, len(chunk.tokens)) for chunk in chunks])
            self.transcript.take(scheduler.teller.tell(scheduler.apply(plan, result, restored, self.clock())))
            for sequence, drawn in decodes.items():
                assert sequence.drawn > drawn, f"{sequence} was not decoded"
        self._carry_out()
        self.check()
        for sequence, drawn in frozen.items():
            assert sequence.drawn == drawn, f"{sequence} is paused"
        return plan

    def run(self, most: int = 10_000) -> int:
        """Step until there is nothing to do; how many plans that took."""
        for n in range(most):
            if self.step() is None:
                until = self.scheduler.held_until(self.clock())
                if until is None:
                    return n
                self.clock.now = until
        raise AssertionError(f"not idle after {most} steps: {self.scheduler!r}")

    def _carry_out(self, events: Sequence[Event] = ()) -> list[Event]:
        """As the stepper does."""
        layout, told = self.pool.real.layout, list(events)
        for op in self.scheduler.take_ops():
            match op:
                case Copy(source, target, length):
                    self.engine.copy(source, target, length)
                    layout.share(source, target, length)
                case Trim(slot, length):
                    self.engine.trim(slot, length)
                    layout.truncate(slot, length)
                case Load():
                    told = self._load(op, told)
        return told

    def _load(self, op: Load, events: list[Event]) -> list[Event]:
        layout, payload = self.pool.real.layout, self.kept.get(op.key)
        if op.slot in self._torn:
            return events
        if payload is not None and layout.n - layout.used >= op.end - op.start:
            layout.load(op.slot, self.engine.load(op.slot, op.start, op.end, payload))
            self.loaded += 1
            return events
        self._torn.add(op.slot)
        self.torn += 1
        short = self.scheduler.not_loaded(op.slot, op.start)
        if short is None:
            return events
        key = short.generation.rid, short.index
        return [
            msgspec.structs.replace(e, cached=short.cached)
            if isinstance(e, Admitted) and (e.rid, e.index) == key
            else e
            for e in events
        ]

    def _check_plan(self, plan: Plan, decodes: dict[Seq, int]) -> None:
        """After `begin`: budgets kept, room made."""
        limits = self.limits
        awake = sum(not s.paused for s in self.scheduler.running)
        assert not plan.admissions or awake <= limits.max_running, "who resumes may be one too many, no newcomer"
        assert len({share.sequence for share in plan.shares}) == len(plan.shares)
        if not plan.shares:
            assert plan.preempted, "an empty step"
            return
        assert set(decodes) - set(plan.preempted) <= {
            share.sequence for share in plan.shares if share.count - len(share.guesses) == 1
        }
        prompts = sum(share.count for share in plan.shares if share.sequence not in decodes)
        fixed = decodes and limits.pace is None
        assert prompts <= (limits.prefill_chunk_busy if fixed else limits.prefill_chunk)
        assert prompts == 0 or not any(share.guesses for share in plan.shares), "no prompt is beside a guess"
        assert plan.tokens <= limits.step_tokens
        assert all(0 < share.count - len(share.guesses) <= share.sequence.pending for share in plan.shares)
        prefilling = [s for s in self.scheduler.running if not s.paused and s not in decodes]
        assert (
            limits.earliest_deadline or not prefilling or prefilling[0] in {share.sequence for share in plan.shares}
        ), "the first prompt goes on"
        if not self.bursts:
            assert plan.tokens <= self.pool.free, f"a step of {plan.tokens} tokens; {self.pool.real!r}"

    def check(self) -> None:
        """What the scheduler believes, what its books say and what the engine holds are the same."""
        scheduler, engine = self.scheduler, self.engine
        entered = self._entered()
        believed: dict[int, list[int]] = {}
        for sequence in scheduler.running:
            assert sequence.slot is not None
            believed[sequence.slot] = sequence.tokens[: sequence.computed]
            if sequence.generation.cache:
                assert entered.get(sequence.slot, []) == believed[sequence.slot]
                if sequence.computed:
                    mine = scheduler.residency._indexes[sequence.generation.salt]
                    assert mine.tokens(sequence.slot) == believed[sequence.slot]
            else:
                assert sequence.slot not in entered
        assert len(believed) == len(scheduler.running), "two sequences in one slot"
        assert self.pool.naive.running == set(believed)
        for slot in self.pool.naive.slots.keys() - believed.keys():
            believed[slot] = entered[slot]
        assert {slot: len(tokens) for slot, tokens in believed.items()} == {
            slot: len(cells) for slot, cells in self.pool.naive.slots.items()
        }
        assert entered.keys() <= believed.keys()
        assert {slot: tokens for slot, tokens in engine.slots.items() if tokens} == {
            slot: tokens for slot, tokens in believed.items() if tokens
        }
        if not self.bursts:
            self._check_layout()
        assert sum(self.transcript.cached.values()) == scheduler.cached_tokens
        assert self.pool.idle <= self.limits.idle_cells
        assert all(s.slot is None and s.computed == 0 for s in scheduler.waiting)
        live = {s.generation.rid for s in (*scheduler.running, *scheduler.waiting)}
        assert live == scheduler.rids() == self.transcript.asked.keys() - self.transcript.over.keys()

    def _entered(self) -> dict[int, list[int]]:
        """slot → tokens, of all indexes in use."""
        found: dict[int, list[int]] = {}
        for index in self.indexes:
            assert not found.keys() & index.naive.slots.keys(), "a slot of two tenants"
            found.update(index.naive.slots)
        return found

    def _check_layout(self) -> None:
        """Where the cells lie: as many as the ledger says, and those of each slot."""
        layout = self.pool.real.layout
        taken = set()
        for slot, tokens in self.engine.slots.items():
            cells = layout.of(slot)
            assert len(cells) == len(set(cells)) == len(tokens)
            taken.update(cells)
        assert layout.used == self.pool.used == len(taken)
        assert layout.width == max(taken, default=-1) + 1

    def check_empty(self) -> None:
        """Nothing runs; what is left is cached, and can all be given up."""
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert self.pool.held == 0
        self.limits = self.scheduler.limits = replace(self.limits, idle_cells=0)
        self.scheduler.residency.idle_cells = 0
        self.scheduler.residency._warm_cells = 0
        rid = self.submit([1], 1, cache=False)
        self.run()
        assert self.transcript.over[rid] == "finished"
        assert (self.pool.used, self.pool.held, self.pool.slots_free) == (0, 0, self.engine.n_slots)
        assert not any(self.engine.slots.values())
