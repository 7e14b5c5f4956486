"""The loop that makes a StreamEngine's work out of a StepEngine: plan, step, apply, deliver.

      any thread                      engine thread                              deliver(events)
    submit ─┐                ┌────────────────────────────────┐
    cancel ─┼─► inbox ──────►│ plan ► begin ► step ► apply    │────► once a step: hands over only
    pause  ─┘                └────────────────────────────────┘

Rules: one thread makes the engine, warms it and touches it and the scheduler; commands wait in the inbox for the end
of the running step, except that a cancel gives up a step that works mostly for the cancelled; the loop sleeps when
there is nothing to do. Readers of a step that brought no first token may be told by another thread, while the next
step runs (`engines.telling`); nothing overtakes that: no other event, no command, no end.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import msgspec

from headrace.core.clock import Clock
from headrace.core.costmodel import CostModel
from headrace.core.drafter import Drafter
from headrace.core.events import Admitted, Event, Failed
from headrace.core.kv import Pin
from headrace.core.limits import Limits
from headrace.core.plan import Copy, Load, Plan, Trim
from headrace.core.request import Generation
from headrace.core.scheduler import Scheduler
from headrace.core.speculation import Proposer, Speculation
from headrace.engines.base import EngineStats, StepAborted, StepEngine, StepFailed
from headrace.engines.calibration import calibrate
from headrace.engines.keeper import Keeper, TierSettings, open_store
from headrace.engines.poison import fail_broken
from headrace.engines.telling import Deliver, Telling
from headrace.kv.cells import PADDING
from headrace.kv.mining import Miner
from headrace.kv.pool import Pool
from headrace.kv.radix import Radix
from headrace.kv.tiers import TierStats

log = logging.getLogger(__name__)

LOOK_UP_EVERY = 64
"""Steps between two looks at all cells; they are looked at also whenever there is nothing to do."""

ENOUGH = 500
"""Steps after which a cost model is better than a calibration: it has seen long prompts and full batches."""

CLOSE_S = 2.0
"""How long what is not saved yet may hold up the end."""

_Command = Callable[[], None]


class Stepper:
    """Owns `engine` from `start` to `close`. Commands come from any thread; `deliver` runs on one thread at a time."""

    def __init__(
        self,
        engine: StepEngine,
        limits: Limits,
        clock: Clock,
        deliver: Deliver,
        cost: CostModel | None = None,
        draft: Callable[[Sequence[int]], Proposer] | None = None,
        learned: Callable[[CostModel], None] | None = None,
    ) -> None:
        """`cost`: what is known of the engine; without one, `calibrate` finds it out. `draft`: a draft model's `of`.

        `learned` is called once, with nothing to do, when the cost model has seen enough to be kept.
        """
        self._learned = learned
        self._engine = engine
        self._clock = clock
        self._keeper: Keeper | None = None
        self._torn: set[int] = set()
        """Slots of this step that a block is missing from."""
        self._pool = Pool(cells=engine.n_cells, slots=engine.n_slots)
        self._speculation = Speculation(draft)
        drafter = None
        if limits.pace is not None and limits.speculation and engine.n_drafts:
            drafter = Drafter(self._speculation, most=engine.n_drafts, itl=limits.pace.itl)
        self.scheduler = Scheduler(
            limits,
            index=Radix,
            pool=self._pool,
            piece=engine.piece,
            eog=frozenset(engine.info.eog),
            cost=cost or CostModel(attention=engine.attention),
            drafter=drafter,
        )
        self._telling = Telling(self.scheduler.teller.tell, deliver, overlap=limits.overlap)
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._over = threading.Event()
        self._open = True
        self._steps = self._broken = 0
        self._fragmentation = 0.0
        self._error = (0.0, 0.0)
        self._tiers = TierStats()
        self._in_step: dict[int, int] = {}
        """rid → its tokens in the running step; empty between steps."""
        self._cancelled: set[int] = set()

    def keep(self, settings: TierSettings) -> None:
        """Keep KV outside the pool too. Before `run`; an engine whose KV cannot be saved goes without."""
        if self._engine.bytes_per_token and self.scheduler.limits.prefix_cache:
            self._keeper = Keeper(
                self._engine,
                self.scheduler,
                open_store(settings, self._engine, self._clock),
                self._clock,
                self._inbox.put,
                least=settings.least,
                miner=Miner() if settings.mined else None,
                budget=settings.mined,
                look_s=settings.look_s,
            )

    # From any thread.

    def pin(self, pins: Sequence[Pin]) -> None:
        """Keep these prefixes warm, and no others of those given."""

        def carry_out() -> None:
            if self._keeper is not None:
                self._keeper.pin(pins)

        self._inbox.put(carry_out)

    def submit(self, generation: Generation) -> None:
        """Queue a generation. One that could not be computed is answered with `Failed`."""
        self._inbox.put(lambda: self._submit(generation))

    def cancel(self, rid: int) -> None:
        """Stop a generation before the next step, and the running step too if most of its tokens are cancelled."""
        running = self._in_step
        if rid in running:
            self._cancelled.add(rid)
        self._inbox.put(lambda: self._cancel(rid))
        if rid in running:
            gone = sum(running.get(r, 0) for r in tuple(self._cancelled))
            if 2 * gone > sum(running.values()):
                self._engine.abort()

    def pause(self, rid: int, paused: bool) -> None:
        """Draw no further tokens for a generation, or go on."""
        self._inbox.put(lambda: self.scheduler.pause(rid, paused))

    def call(self, command: Callable[[], None]) -> None:
        """Run `command` on the engine thread, after the running step."""
        self._inbox.put(command)

    def close(self) -> None:
        """Stop `run`, giving up its step, and wait until it has closed the engine. Not from the engine thread."""
        self._inbox.put(self._stop)
        self._engine.abort()
        self._over.wait()

    # On the engine thread.

    def run(self) -> None:
        """Work until `close`, then close the engine. The calling thread is the engine thread."""
        try:
            while self._open:
                now = self._clock()
                plan = self.scheduler.plan(now)
                if plan is None:
                    self._rest(now)
                else:
                    self.step(plan)
                    self._drain(block=False)
        finally:
            self._telling.close()
            try:
                if self._keeper is not None:
                    self._keeper.close(CLOSE_S)
            finally:
                self._engine.close()
                self._over.set()

    def _rest(self, planned: float) -> None:
        """There was nothing to compute at `planned`: look after what is kept, then sleep until a command comes."""
        self._telling.drain()
        self._carry_out()  # a cancel can free a slot although no step follows
        keeper = self._keeper
        if keeper is not None and self._inbox.empty():
            if keeper.save():
                return
            self._compact()
            now = self._clock()
            keeper.mine(now)
            if keeper.fill(now):
                return
            self._carry_out()
        cost = self.scheduler.cost
        if self._learned is not None and cost is not None and cost.observed >= ENOUGH:
            self._learned(cost)
            self._learned = None
        self._look_up()
        self._telling.deliver([], self.stats())
        # As of the plan: who has given up since then is in the next one, and who had before waits for something else.
        times = self.scheduler.held_until(planned), None if keeper is None else keeper.look_at()
        until = min((time for time in times if time is not None), default=None)
        self._drain(block=True, timeout=None if until is None else max(0.0, until - self._clock()))

    def _compact(self) -> None:
        """With nothing running: what is saved and lies high in the pool leaves, because every step to come would pay
        for all cells below it. It is back in 1.5 ms per 1,000 tokens."""
        residency, layout = self.scheduler.residency, self._pool.layout
        if self.scheduler.running or layout.width <= PADDING:
            return
        for slot in [slot for slot in residency.idle if slot in residency.saved]:
            if max(layout.of(slot), default=0) >= PADDING:
                residency.drop(slot)

    def calibrate(self) -> CostModel | None:
        """Learn what a few typical steps take here; what was learned, to be saved, or None if nobody asks for it."""
        cost = self.scheduler.cost
        if cost is not None:
            calibrate(self._engine, cost, self._clock)
        return cost

    def _drain(self, *, block: bool, timeout: float | None = None) -> None:
        """Carry out waiting commands; wait for the first one, for `timeout` s, if there is nothing else to do."""
        if not block and self._inbox.empty():
            return
        try:
            command = self._inbox.get(timeout=timeout) if block else self._inbox.get_nowait()
            self._telling.drain()
            while True:
                command()
                command = self._inbox.get_nowait()
        except Empty:
            pass

    def _submit(self, generation: Generation) -> None:
        refusal = self._engine.info.refusal(generation)
        if refusal:
            self._telling.deliver([Failed(generation.rid, "engine_refused", refusal)], self.stats())
        elif self._keeper is not None:
            self._keeper.submit(generation, self._clock())
        else:
            self.scheduler.submit(generation, self._clock())

    def _cancel(self, rid: int) -> None:
        self._cancelled.discard(rid)
        self.scheduler.cancel(rid)

    def _stop(self) -> None:
        self._open = False

    def step(self, plan: Plan) -> None:
        """Carry out one plan and deliver what came of it."""
        scheduler = self.scheduler
        events = self._carry_out(scheduler.begin(plan, self._clock()))
        # Before anybody hears of the step: who cancels because of what it hears must find itself in it.
        self._in_step = plan.by_generation()
        self._torn.clear()
        if events:
            self._telling.deliver(events, self.stats())
        if not plan.shares:
            return
        chunks = scheduler.chunks(plan)
        self._telling.start()
        restored = self._clock()
        try:
            if plan.arranged:
                self._engine.arrange(*plan.arranged)
            result = self._engine.step(chunks)
        except StepAborted:
            return
        except StepFailed as error:
            log.error("step failed: %s", error)
            events = scheduler.fail(plan, "the engine could not compute this request")
            self._carry_out()
            taken = None
        else:
            self._steps += 1
            self._pool.layout.place([(chunk.slot, len(chunk.tokens)) for chunk in chunks])
            if self._steps % LOOK_UP_EVERY == 0:
                self._look_up()
            if result.broken:
                events = fail_broken(scheduler, self._engine, plan, result)
                self._broken += len(events)
            taken = scheduler.apply(plan, result, restored, self._clock())
            self._carry_out()
        finally:
            self._in_step = {}
        if taken is None or result.broken:
            self._telling.deliver(events, self.stats())
        if taken is not None:
            self._telling.tell(taken, self.stats(), now=not plan.decodes)
        if self._keeper is not None:
            self._keeper.save(self._telling.drain, spare=self._spare(plan, self._clock() - restored))

    def _spare(self, plan: Plan, lasted: float) -> float:
        """Seconds that a copy may take after a step that `lasted` so long: what is left of its readers' gap; a prompt's
        part has used that up."""
        pace = self.scheduler.limits.pace
        if not plan.reading or pace is None:
            return math.inf
        return 0.0 if plan.prompts else pace.itl - lasted

    def _carry_out(self, events: list[Event] | None = None) -> list[Event]:
        """Do the KV operations that the scheduler has decided. `events`: what begins with them, corrected."""
        layout = self._pool.layout
        while ops := self.scheduler.take_ops():  # a load that fails decides on a trim, which is due before the step
            for op in ops:
                if isinstance(op, Copy):
                    self._engine.copy(op.source, op.target, op.length)
                    layout.share(op.source, op.target, op.length)
                elif isinstance(op, Trim):
                    self._engine.trim(op.slot, op.length)
                    layout.truncate(op.slot, op.length)
                else:
                    events = self._load(op, events or [])
        return events or []

    def _load(self, op: Load, events: list[Event]) -> list[Event]:
        """Bring a block back. One that cannot be had is computed instead, and what follows on it too."""
        assert self._keeper is not None
        if op.slot in self._torn:
            return events
        order = self._keeper.load(op)
        if order:
            self._pool.layout.load(op.slot, order)
            return events
        self._torn.add(op.slot)
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

    def _look_up(self) -> None:
        """Figures that cost too much for every step."""
        self._fragmentation = self._pool.layout.fragmentation
        cost = self.scheduler.cost
        if cost is not None:
            self._error = (cost.error(0.5), cost.error(0.95))
        if self._keeper is not None:
            self._tiers = self._keeper.stats

    def stats(self) -> EngineStats:
        """As of now; engine thread only."""
        s, pool = self.scheduler, self._pool
        return EngineStats(
            running=len(s.running),
            waiting=len(s.waiting),
            cells_total=pool.cells,
            cells_running=pool.held,
            cells_cached=pool.idle,
            slots_free=pool.slots_free,
            steps=self._steps,
            prompt_tokens=s.prompt_tokens,
            cached_tokens=s.cached_tokens,
            completion_tokens=s.completion_tokens,
            preemptions=s.preemptions,
            cells_shared=pool.layout.shared,
            cells_width=pool.width,
            fragmentation=self._fragmentation,
            slots_running=pool.slots_running,
            slots_cached=pool.slots_idle,
            prefill_s=s.cost.per_token if s.cost is not None else 0.0,
            decode_share=s.decode_share,
            backlog_tokens=s.backlog,
            begun_tokens=s.begun,
            cost_error_p50=self._error[0],
            cost_error_p95=self._error[1],
            prefixes_pinned=self._keeper.pinned if self._keeper is not None else 0,
            tiers=self._tiers,
            drafts=self._speculation.proposed,
            drafts_right=self._speculation.accepted,
            broken=self._broken,
        )
