from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from headrace.core.budget import Pace
from headrace.core.events import Admitted, Delta, Event, Failed, Finished, Marks
from headrace.core.limits import Limits
from headrace.core.plan import Chunk, StepResult
from headrace.core.request import Generation, Sampling
from headrace.engines.base import EngineStats, StepAborted
from headrace.engines.keeper import ASK_S, OPEN_S, WAKE_S, Keeper, TierSettings, open_store
from headrace.engines.stepper import LOOK_UP_EVERY, Stepper
from headrace.kv.store import Store
from headrace.kv.tiers import Hit
from headrace.testing import ManualClock, ScriptedEngine
from rig import GREEDY, Transcript

SCRIPT = [[bytes([c])] for c in b"abcdefghijklmnopqrstuvwxyz" * 40]
PATIENCE = 10.0
"""Seconds until a wait for another thread counts as failed."""


class Held(ScriptedEngine):
    """Each step waits inside the engine until the test lets it pass or it is aborted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(SCRIPT, step_s=1.0, prefill_s=1.0, wait=self._hold, **options)
        self.entered: SimpleQueue[None] = SimpleQueue()
        self._verdict: SimpleQueue[bool] = SimpleQueue()

    def _hold(self, seconds: float) -> bool:
        self.entered.put(None)
        return self._verdict.get(timeout=PATIENCE)

    def wait_inside(self) -> None:
        self.entered.get(timeout=PATIENCE)

    def let_pass(self) -> None:
        self._verdict.put(False)

    def abort(self) -> None:
        super().abort()
        self._verdict.put(True)


class Desk:
    """A running stepper and what it delivered."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.delivered: SimpleQueue[tuple[list[Event], EngineStats]] = SimpleQueue()
        self.events: list[Event] = []
        self.stats = EngineStats()

    def until(self, true: Callable[[Desk], bool]) -> None:
        while not true(self):
            events, self.stats = self.delivered.get(timeout=PATIENCE)
            self.events += events

    def text(self, rid: int) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Delta) and e.rid == rid)

    def ended(self, *rids: int) -> Callable[[Desk], bool]:
        return lambda _: set(rids) <= {e.rid for e in self.events if isinstance(e, Finished | Failed)}


@contextmanager
def running(engine: ScriptedEngine, limits: Limits | None = None) -> Iterator[Desk]:
    desk: Desk
    stepper = Stepper(engine, limits or Limits(), ManualClock(), lambda *step: desk.delivered.put(step))
    desk = Desk(stepper)
    thread = threading.Thread(target=stepper.run, name="engine under test")
    thread.start()
    try:
        yield desk
    finally:
        stepper.close()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert engine.closed


def prompt(n: int, first: int = 1) -> list[int]:
    return [first, *range(2, n + 1)]


# --- serving


def test_it_serves_and_reports() -> None:
    with running(ScriptedEngine(SCRIPT)) as desk:
        desk.stepper.submit(Generation(1, prompt(5), 3, sampling=GREEDY))
        desk.until(desk.ended(1))
        assert [type(e) for e in desk.events] == [Admitted, Delta, Delta, Delta, Finished]
        assert desk.text(1) == "abc"
        desk.until(lambda d: d.stats.running == 0)
        assert desk.stats == EngineStats(
            running=0,
            waiting=0,
            cells_total=16384,
            cells_running=0,
            cells_cached=7,
            slots_free=63,
            steps=3,
            prompt_tokens=5,
            cached_tokens=0,
            completion_tokens=3,
            preemptions=0,
            cells_width=7,
            slots_cached=1,
        )


def test_stats_come_before_the_first_request() -> None:
    with running(ScriptedEngine(SCRIPT, cells=77)) as desk:
        desk.until(lambda d: d.stats.cells_total == 77)


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        ({"prompt": []}, ["0", "99"]),
        ({"prompt": prompt(100)}, ["100", "99"]),
        ({"prompt": prompt(5), "max_tokens": 0}, ["5", "0"]),
        ({"prompt": prompt(5), "max_tokens": 96}, ["5", "96", "100"]),
        ({"prompt": [1, -1]}, ["4095"]),
        ({"prompt": [1, 4096]}, ["4095"]),
    ],
)
def test_what_the_engine_would_break_on_is_refused(asked: dict[str, Any], numbers: list[str]) -> None:
    engine = ScriptedEngine(SCRIPT, n_ctx=100)
    with running(engine) as desk:
        desk.stepper.submit(Generation(**{"rid": 1, "max_tokens": 3, **asked}))
        desk.until(desk.ended(1))
        (failed,) = desk.events
        assert isinstance(failed, Failed)
        assert failed.code == "engine_refused"
        assert all(number in failed.message for number in numbers)
        assert engine.steps == 0
        desk.stepper.submit(Generation(2, prompt(5), 95))
        desk.until(desk.ended(2))
        assert len(desk.text(2)) == 95


def test_marks_are_taken_from_the_clock() -> None:
    clock = ManualClock(1.0)

    def wait(seconds: float) -> bool:
        clock.advance(seconds)
        return False

    events: list[Event] = []
    engine = ScriptedEngine(SCRIPT, prefill_s=2.0, clock=clock, wait=wait)
    stepper = Stepper(engine, Limits(prefill_chunk=4), clock, lambda new, _: events.extend(new))
    stepper.scheduler.submit(Generation(1, prompt(6), 1), clock())
    clock.advance(0.5)
    drive(stepper)
    (marks,) = (e.marks for e in events if isinstance(e, Delta))
    assert marks == Marks(queued=1.0, scheduled=1.5, restored=1.5, prefilled=5.5, sampled=5.5)


# --- cancelling a running step


def test_a_cancel_gives_up_a_step_that_works_for_nobody_else() -> None:
    engine = Held()
    with running(engine) as desk:
        desk.stepper.submit(Generation(1, prompt(500), 3))
        engine.wait_inside()
        desk.stepper.cancel(1)
        desk.until(lambda d: d.stats.slots_free == 64 and d.stats.running == 0 and bool(d.events))
        assert engine.aborts == 1
        assert not any(engine.slots.values())
        desk.stepper.submit(Generation(2, prompt(5), 1))
        engine.wait_inside()
        engine.let_pass()
        desk.until(desk.ended(2))
        assert desk.text(2) == "a"
        assert engine.batches == [[5]]


def test_what_a_cancelled_prompt_computed_is_freed_at_once() -> None:
    engine = Held()
    with running(engine, Limits(prefill_chunk=30)) as desk:
        desk.stepper.submit(Generation(1, prompt(50), 3))
        engine.wait_inside()
        engine.let_pass()
        engine.wait_inside()
        assert sum(map(len, engine.slots.values())) == 30
        desk.stepper.cancel(1)
        desk.until(lambda d: d.stats.steps == 1 and d.stats.running == 0)
        assert not any(engine.slots.values())
        assert (desk.stats.cells_running, desk.stats.cells_cached, desk.stats.slots_free) == (0, 0, 64)
        assert desk.stepper._cancelled == set(), "nothing is remembered of it"


def test_the_choices_of_a_generation_leave_together() -> None:
    engine = Held()
    with running(engine) as desk:
        desk.stepper.submit(Generation(99, prompt(5, 100), 1))
        engine.wait_inside()
        desk.stepper.submit(Generation(1, prompt(5, 101), 9, n=3))
        desk.stepper.submit(Generation(2, prompt(5, 102), 2))
        engine.let_pass()
        engine.wait_inside()  # all prompts
        engine.let_pass()
        engine.wait_inside()  # three tokens for 1, one for 2
        desk.stepper.cancel(1)
        assert engine.aborts == 1
        engine.wait_inside()
        engine.let_pass()
        desk.until(desk.ended(2))


def test_a_cancel_leaves_a_step_alone_that_works_mostly_for_others() -> None:
    engine = Held()
    with running(engine) as desk:
        desk.stepper.submit(Generation(1, prompt(5, 101), 9))
        engine.wait_inside()
        desk.stepper.submit(Generation(2, prompt(50, 102), 1))
        engine.let_pass()
        engine.wait_inside()  # one token for 1, fifty for 2
        desk.stepper.cancel(1)
        assert engine.aborts == 0
        engine.let_pass()
        desk.until(desk.ended(2))
        assert (desk.text(1), desk.text(2)) == ("ab", "a"), "the step was computed for both"
        desk.until(lambda d: d.stats.running == 0)


@pytest.mark.parametrize(("readers", "leaving", "aborts"), [(2, 1, 0), (3, 1, 0), (3, 2, 1), (4, 2, 0), (4, 3, 1)])
def test_most_of_the_step_s_tokens_decide(readers: int, leaving: int, aborts: int) -> None:
    engine = Held()
    rids = range(1, readers + 1)
    with running(engine) as desk:
        desk.stepper.submit(Generation(99, prompt(5), 1))
        engine.wait_inside()
        for rid in rids:
            desk.stepper.submit(Generation(rid, prompt(5, 100 + rid), 2))
        engine.let_pass()
        engine.wait_inside()  # all prompts
        engine.let_pass()
        engine.wait_inside()  # one token for each
        for rid in rids[:leaving]:
            desk.stepper.cancel(rid)
        assert engine.aborts == aborts
        if not aborts:
            engine.let_pass()
        else:
            engine.wait_inside()
            engine.let_pass()
        desk.until(desk.ended(*rids[leaving:]))
        assert all(desk.text(rid) == "ab" for rid in rids[leaving:])


def test_an_aborted_step_leaves_the_others_their_place() -> None:
    engine = Held()
    with running(engine) as desk:
        desk.stepper.submit(Generation(1, prompt(5, 101), 4))
        engine.wait_inside()
        desk.stepper.submit(Generation(2, prompt(50, 102), 9))
        engine.let_pass()
        engine.wait_inside()
        desk.stepper.cancel(2)  # aborts the step that 1 decodes in, too
        assert engine.aborts == 1
        for _ in range(3):
            engine.wait_inside()
            engine.let_pass()
        desk.until(desk.ended(1))
        assert desk.text(1) == "abcd"
        assert engine.batches == [[5], [1], [1], [1]]


def test_a_cancel_by_who_has_just_heard_of_the_step_gives_it_up() -> None:
    engine = ScriptedEngine(SCRIPT, prefill_s=3600.0)

    def leave(events: list[Event], stats: EngineStats) -> None:
        for event in events:
            if isinstance(event, Admitted):
                stepper.cancel(event.rid)

    stepper = Stepper(engine, Limits(), ManualClock(), leave)
    stepper.scheduler.submit(Generation(1, prompt(5), 9), 0.0)
    plan = stepper.scheduler.plan(0.0)
    assert plan is not None
    stepper.step(plan)  # waits an hour if the cancel is lost
    assert engine.aborts == 1
    assert stepper.stats().prompt_tokens == 0


def test_cancelling_what_waits_or_is_over_aborts_nothing() -> None:
    engine = Held()
    with running(engine, Limits(max_running=1)) as desk:
        desk.stepper.submit(Generation(1, prompt(5, 101), 1))
        desk.stepper.submit(Generation(2, prompt(5, 102), 1))
        engine.wait_inside()
        desk.stepper.cancel(2)
        desk.stepper.cancel(77)
        engine.let_pass()
        desk.until(desk.ended(1))
        desk.stepper.cancel(1)
        desk.until(lambda d: d.stats.running == d.stats.waiting == 0)
        assert engine.aborts == 0


def test_stats_tell_of_a_cancel_without_another_request() -> None:
    engine = Held()
    with running(engine) as desk:
        desk.stepper.submit(Generation(1, prompt(5, 101), 9))
        desk.stepper.submit(Generation(2, prompt(5, 102), 9))
        engine.wait_inside()
        engine.let_pass()
        engine.wait_inside()
        desk.stepper.cancel(1)
        desk.stepper.cancel(2)
        desk.until(lambda d: d.stats.running == 0 and d.stats.waiting == 0 and d.stats.steps > 0)
        assert desk.stats.cells_running == 0


def test_pause_and_resume_take_effect_between_steps() -> None:
    engine = Held()
    with running(engine) as desk:
        desk.stepper.submit(Generation(1, prompt(5), 3))
        engine.wait_inside()
        desk.stepper.pause(1, True)
        engine.let_pass()
        desk.until(lambda d: d.text(1) == "a" and d.stats.running == 1)
        assert engine.steps == 1
        desk.stepper.pause(1, False)
        for _ in range(2):
            engine.wait_inside()
            engine.let_pass()
        desk.until(desk.ended(1))
        assert desk.text(1) == "abc"


def test_a_call_runs_on_the_engine_thread_after_the_step() -> None:
    engine = Held()
    called: SimpleQueue[tuple[str, int]] = SimpleQueue()
    with running(engine) as desk:
        desk.stepper.submit(Generation(1, prompt(5), 1))
        engine.wait_inside()
        desk.stepper.call(lambda: called.put((threading.current_thread().name, len(engine.batches))))
        assert called.empty()
        engine.let_pass()
        assert called.get(timeout=PATIENCE) == ("engine under test", 1)
        desk.stepper.call(lambda: called.put((threading.current_thread().name, len(engine.batches))))
        assert called.get(timeout=PATIENCE) == ("engine under test", 1), "when it is idle, too"


# --- closing


def test_close_gives_up_the_running_step_and_begins_no_other() -> None:
    engine = Held()
    with running(engine) as desk:
        desk.stepper.submit(Generation(1, prompt(5), 9))
        engine.wait_inside()
    assert engine.aborts == 1
    assert engine.steps == 1
    assert engine.batches == []


def test_close_when_idle() -> None:
    engine = ScriptedEngine(SCRIPT)
    with running(engine):
        pass
    assert engine.steps == 0


class Broken(ScriptedEngine):
    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        raise ZeroDivisionError


def test_an_engine_that_breaks_is_closed_and_not_waited_for() -> None:
    engine = Broken(SCRIPT)
    stepper = Stepper(engine, Limits(), ManualClock(), lambda events, stats: None)
    stepper.submit(Generation(1, prompt(5), 9))
    with pytest.raises(ZeroDivisionError):
        stepper.run()
    assert engine.closed
    stepper.close()


# --- many threads


def test_commands_from_many_threads_lose_nothing() -> None:
    transcript = Transcript()
    generations = {
        rid: Generation(rid, prompt(3 + rid % 40, 101 + rid % 7), 1 + rid % 5, n=1 + rid % 2) for rid in range(200)
    }
    for generation in generations.values():
        transcript.ask(generation)
    cancelled = {rid for rid in generations if rid % 5 == 0}

    def client(stepper: Stepper, mine: range) -> None:
        for rid in mine:
            stepper.submit(generations[rid])
            if rid % 3 == 0:
                stepper.pause(rid, True)
            if rid in cancelled:
                stepper.cancel(rid)
            if rid % 3 == 0:
                stepper.pause(rid, False)

    with running(ScriptedEngine(SCRIPT, cells=500, n_ctx=100), Limits(max_running=5)) as desk:
        threads = [threading.Thread(target=client, args=(desk.stepper, range(i, 200, 4))) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        desk.until(lambda d: d.ended(*(generations.keys() - cancelled))(d) and d.stats.running == d.stats.waiting == 0)
    for event in desk.events:
        if event.rid not in cancelled:
            transcript.take([event])
    assert set(transcript.over) == generations.keys() - cancelled
    for rid, generation in generations.items():
        if rid not in cancelled:
            for index in range(generation.n):
                assert transcript.text(rid, index) == "abcde"[: generation.max_tokens]


def test_fragmentation_is_looked_up_when_there_is_nothing_to_do() -> None:
    with running(ScriptedEngine([[b"a"]] * 300, cells=1000, slots=8)) as desk:
        layout = desk.stepper._pool.layout
        desk.stepper.submit(Generation(1, prompt(100, 1), 2, cache=False))
        desk.stepper.submit(Generation(2, prompt(200, 2), 9))
        desk.until(lambda d: d.ended(1, 2)(d) and d.stats.running == 0 and d.stats.fragmentation > 0)
        assert desk.stats.steps < LOOK_UP_EVERY
        assert desk.stats.fragmentation == layout.fragmentation


def test_fragmentation_is_looked_up_now_and_then_while_there_is_work() -> None:
    stepper = Stepper(ScriptedEngine([[b"a"]] * 300, slots=8), Limits(), ManualClock(), lambda *_: None)
    stepper.scheduler.submit(Generation(1, prompt(100, 1), 2, cache=False), 0.0)
    stepper.scheduler.submit(Generation(2, prompt(200, 2), LOOK_UP_EVERY + 1), 0.0)
    seen = set()
    while plan := stepper.scheduler.plan(0.0):
        stepper.step(plan)
        if stepper.stats().fragmentation > 0:
            seen.add(stepper.stats().steps)
    assert min(seen) == LOOK_UP_EVERY


# --- telling beside the next step


class Played(ScriptedEngine):
    """A random script for each prompt; `acts` says what happens while step number i runs."""

    def __init__(self, seed: int, clock: ManualClock) -> None:
        self.acts: dict[int, list[Callable[[], None]]] = {}
        self._time, self._seed = clock, seed
        super().__init__(
            self._play, step_s=0.01, prefill_s=0.02, clock=clock, wait=self._pass, cells=700, n_ctx=300, slots=12
        )
        for piece in PLAYED:
            self.tokenizer.word(piece)

    def _play(self, prompt: Sequence[int]) -> list[list[bytes]]:
        rng = random.Random(f"{self._seed} {prompt}")
        return [[piece] for piece in rng.choices(PLAYED, k=rng.randint(1, 60))]

    def _pass(self, seconds: float) -> bool:
        for act in self.acts.pop(self.steps, ()):
            act()
        self._time.advance(seconds)
        return self._aborted.is_set()


PLAYED = [b"a", b"b", b"c", b" the", b" end", "é".encode(), b"\xe2", b"\x82", b"\xac"]


class Restless(Stepper):
    """What was to happen later happens when there is nothing to do; after that, `quiet` is set."""

    acts: dict[int, list[Callable[[], None]]]
    quiet: threading.Event

    def _rest(self, planned: float) -> None:
        if self.acts:
            for act in self.acts.pop(min(self.acts)):
                act()
        else:
            self.quiet.set()
        super()._rest(planned)


Told = list[tuple[list[Event], EngineStats]]


def play(seed: int, limits: Limits, *, overlap: bool) -> tuple[Told, list[str]]:
    """Everything that is delivered of a random workload, and the threads that delivered it."""
    rng = random.Random(seed)
    clock = ManualClock()
    engine = Played(seed, clock)
    told: Told = []
    threads: list[str] = []

    def deliver(events: list[Event], stats: EngineStats) -> None:
        told.append((events, stats))
        threads.append(threading.current_thread().name)

    stepper = Restless(engine, replace(limits, overlap=overlap), clock, deliver)
    stepper.acts, stepper.quiet = engine.acts, threading.Event()

    def later(last: int, act: Callable[[], None]) -> None:
        engine.acts.setdefault(rng.randint(2, last), []).append(act)

    for rid in range(1, 25):
        generation = Generation(
            rid,
            prompt(rng.randint(1, 60), rng.randint(1, 3)),
            rng.randint(1, 50),
            n=rng.choice([1, 1, 2]),
            stop=rng.choice([(), (), (), ("bc", " end"), ("é",)]),
            sampling=Sampling(seed=rid, logprobs=rng.choice([None, None, 1])),
        )
        later(120, partial(stepper.submit, generation))
        if rng.random() < 0.3:
            later(160, partial(stepper.pause, rid, True))
        if rng.random() < 0.3:
            later(160, partial(stepper.cancel, rid))
        engine.acts.setdefault(161, []).append(partial(stepper.pause, rid, False))
    thread = threading.Thread(target=stepper.run, name="engine under test")
    thread.start()
    assert stepper.quiet.wait(PATIENCE)
    stepper.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    return told, threads


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "limits",
    [Limits(prefill_chunk=30, max_running=5), Limits(speculation=True, pace=Pace(0.1, 0.2, 0.5, 0.2, 0.1))],
    ids=["fixed chunks", "guesses"],
)
def test_overlap_changes_nothing_of_what_is_told(limits: Limits, seed: int) -> None:
    plain, alone = play(seed, limits, overlap=False)
    overlapped, threads = play(seed, limits, overlap=True)
    for one, other in zip(plain, overlapped, strict=True):
        assert one == other
    assert set(alone) == {"engine under test"}
    assert threads.count("telling") > 20
    assert threads.count("engine under test") > 20, "first tokens, commands, rests"
    ends = {type(event) for events, _ in plain for event in events}
    assert ends == {Admitted, Delta, Finished}


def test_readers_are_told_while_the_next_step_runs() -> None:
    engine = Held()
    with running(engine, Limits(overlap=True)) as desk:
        desk.stepper.submit(Generation(1, prompt(5), 4))
        for text in ("", "a", "ab", "abc"):
            engine.wait_inside()
            desk.until(lambda d, text=text: d.text(1) == text)  # type: ignore[misc]
            engine.let_pass()
        desk.until(desk.ended(1))
        assert desk.text(1) == "abcd", "no step follows, and still it is told"


def test_a_pause_comes_after_all_that_was_drawn_before_it() -> None:
    engine = Held()
    with running(engine, Limits(overlap=True)) as desk:
        desk.stepper.submit(Generation(1, prompt(5), 9))
        for _ in range(3):
            engine.wait_inside()
            engine.let_pass()
        engine.wait_inside()
        desk.stepper.pause(1, True)
        engine.let_pass()
        desk.until(lambda d: d.text(1) == "abcd" and d.stats.completion_tokens == 4)
        desk.stepper.call(partial(desk.delivered.put, ([], EngineStats(steps=99))))
        desk.until(lambda d: d.stats.steps == 99)
        assert desk.text(1) == "abcd"


def test_what_was_drawn_before_the_end_is_told() -> None:
    engine = Held()
    with running(engine, Limits(overlap=True)) as desk:
        desk.stepper.submit(Generation(1, prompt(5), 9))
        for _ in range(3):
            engine.wait_inside()
            engine.let_pass()
        engine.wait_inside()
    desk.until(lambda d: d.text(1) == "abc")


# --- when steps do not work out; by hand, without threads


def drive(stepper: Stepper) -> None:
    while plan := stepper.scheduler.plan(0.0):
        stepper.step(plan)


class Aborting(ScriptedEngine):
    """Step number `abort_at` is given up."""

    abort_at = 0

    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        if self.steps + 1 == self.abort_at:
            self.steps += 1
            raise StepAborted
        return super().step(chunks)


class Scene:
    """Three prompts, two with a common beginning, one with two choices, in a pool that is too small for all."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.transcript = Transcript()
        self.stepper = Stepper(engine, Limits(prefill_chunk=30), ManualClock(), lambda e, _: self.transcript.take(e))
        stem = prompt(50)
        self.submit(Generation(1, [*stem, 101], 20, n=2, sampling=Sampling(seed=4)))
        self.submit(Generation(2, [*stem, 102], 20))
        self.submit(Generation(3, prompt(20, 7), 30))

    def submit(self, generation: Generation) -> None:
        self.transcript.ask(generation)
        self.stepper.scheduler.submit(generation, 0.0)

    def check_over(self) -> None:
        """Everything ended, nothing leaked, and the next request is served."""
        assert self.transcript.over.keys() == {1, 2, 3}
        self.submit(Generation(4, prompt(60, 9), 5))
        drive(self.stepper)
        assert self.transcript.text(4) == "abcde"
        stats = self.stepper.stats()
        assert (stats.running, stats.waiting, stats.cells_running) == (0, 0, 0)
        held = [tokens for tokens in self.engine.slots.values() if tokens]
        assert stats.slots_free == self.engine.n_slots - len(held)
        distinct = {tuple(tokens[: i + 1]) for tokens in held for i in range(len(tokens))}
        assert len(distinct) <= stats.cells_cached <= sum(map(len, held))
        layout = self.stepper._pool.layout
        for slot in range(self.engine.n_slots):
            assert len(layout.of(slot)) == len(self.engine.slots.get(slot, []))
        assert layout.used == stats.cells_cached
        assert (stats.cells_shared, stats.cells_width) == (layout.shared, layout.width)
        assert (stats.slots_running, stats.slots_cached) == (0, len(held))


FULL = {(1, 0): 20, (1, 1): 20, (2, 0): 20, (3, 0): 30}
LETTERS = b"".join(token for (token,) in SCRIPT).decode()


def test_a_failure_of_any_step_ends_those_in_it_only() -> None:
    n = 0
    failures = set()
    while True:
        n += 1
        scene = Scene(ScriptedEngine(SCRIPT, fail_at=[n], cells=130, n_ctx=120, slots=6))
        drive(scene.stepper)
        if scene.engine.steps < n:
            break
        over = scene.transcript.over
        assert "failed" in over.values()
        failures.add(frozenset(rid for rid, end in over.items() if end == "failed"))
        for key, want in FULL.items():
            text = scene.transcript.text(*key)
            assert text == LETTERS[:want] if over[key[0]] == "finished" else LETTERS.startswith(text)
        scene.check_over()
    assert set(scene.transcript.over.values()) == {"finished"}
    assert n > 30, "the sweep ended early"
    assert len(failures) > 2
    assert scene.stepper.stats().preemptions > 0, "the pool is too large"


def test_an_abort_of_any_step_changes_nothing() -> None:
    n = 0
    while True:
        n += 1
        engine = Aborting(SCRIPT, cells=130, n_ctx=120, slots=6)
        engine.abort_at = n
        scene = Scene(engine)
        drive(scene.stepper)
        for key, want in FULL.items():
            assert scene.transcript.text(*key) == LETTERS[:want]
        scene.check_over()
        if engine.steps < n:
            break
    assert n > 30


def test_a_failed_step_says_why_to_the_log_only(caplog: pytest.LogCaptureFixture) -> None:
    events: list[Event] = []
    engine = ScriptedEngine(SCRIPT, fail_at=[1])
    stepper = Stepper(engine, Limits(), ManualClock(), lambda new, _: events.extend(new))
    stepper.scheduler.submit(Generation(1, prompt(5), 9), 0.0)
    drive(stepper)
    assert events == [Admitted(1, 0, 0), Failed(1, "engine_failed", "the engine could not compute this request")]
    assert "the script says so" in caplog.text
    assert stepper.stats().steps == 0


# --- KV outside the pool


class Forgetful(ScriptedEngine):
    """Its loads from position `lost_from` on fail."""

    lost_from = 10**9

    def load(self, slot: int, start: int, end: int, payload: bytes) -> Sequence[int]:
        return () if start >= self.lost_from else super().load(slot, start, end, payload)


class Vault:
    """A stepper that keeps KV in RAM, with nothing idle in the pool, stepped by hand."""

    def __init__(self, engine: ScriptedEngine, tiers: TierSettings | None = None, **limits: Any) -> None:
        self.engine = engine
        self.clock = ManualClock()
        self.transcript = Transcript()
        options = {"prefill_chunk": 100, "warm_cells": 0, **limits}
        self.stepper = Stepper(engine, Limits(**options), self.clock, lambda e, _: self.transcript.take(e))
        self.stepper.keep(tiers or TierSettings(ram_mib=8))
        assert self.stepper._keeper is not None
        self.keeper: Keeper = self.stepper._keeper

    def ask(self, rid: int, tokens: list[int], max_tokens: int = 3, **fields: Any) -> None:
        generation = Generation(rid, tokens, max_tokens, **fields)
        self.transcript.ask(generation)
        self.keeper.submit(generation, self.clock())

    def drive(self) -> None:
        drive(self.stepper)

    def put_away(self) -> None:
        """Save all that is idle, and drop it from the pool."""
        while self.keeper.save():
            pass
        self.stepper._carry_out()


@pytest.mark.parametrize("lost_from", [0, 256, 512])
def test_what_could_not_be_loaded_is_computed_and_stays(lost_from: int) -> None:
    engine = Forgetful(SCRIPT)
    vault = Vault(engine)
    vault.ask(1, prompt(700))
    vault.drive()
    vault.put_away()
    assert not any(engine.slots.values())
    engine.lost_from = lost_from
    vault.ask(2, prompt(700))
    vault.drive()  # the engine checks that each chunk follows on what its slot holds
    assert vault.transcript.text(2) == "abc"
    assert vault.transcript.cached[2, 0] == min(lost_from, 699)
    layout = vault.stepper._pool.layout
    assert all(len(layout.of(slot)) == len(tokens) for slot, tokens in engine.slots.items())


def test_whose_fetch_has_run_out_of_time_wakes_nobody() -> None:
    """It waits for its reader, or for room: neither comes with time, and looking again and again would take a core."""
    scheduler = Stepper(ScriptedEngine(SCRIPT), Limits(), ManualClock(), lambda *_: None).scheduler
    scheduler.submit(Generation(1, prompt(9), 3), 0.0, hold=1.0)
    scheduler.submit(Generation(2, prompt(9, 2), 3), 0.0, hold=3.0)
    scheduler.pause(1, True)
    assert scheduler.plan(0.5) is None
    assert scheduler.held_until(0.5) == 3.0
    scheduler.pause(1, False)
    assert scheduler.held_until(0.5) == 1.0
    assert scheduler.held_until(1.0) == 3.0
    assert scheduler.held_until(3.0) is None


class Unsavable(ScriptedEngine):
    """Saving breaks in a way that the port does not name."""

    broken = False

    def save(self, slot: int, start: int, end: int) -> bytes:
        if self.broken:
            raise ValueError("not the port's error")
        return super().save(slot, start, end)


def test_the_end_comes_whatever_saving_does() -> None:
    engine = Unsavable(SCRIPT)
    vault = Vault(engine)
    vault.ask(1, prompt(600))
    vault.drive()
    engine.broken = True
    vault.stepper._stop()
    with pytest.raises(ValueError, match="not the port's error"):
        vault.stepper.run()
    vault.stepper.close()  # returns
    assert engine.closed


def on_disk(path: Path) -> TierSettings:
    return TierSettings(ram_mib=0, ssd_mib=8, ssd_path=str(path))


def keep_on_disk(path: Path, tokens: list[int]) -> None:
    """Put the KV of this prompt on the disk, as a server before this one."""
    vault = Vault(ScriptedEngine(SCRIPT), on_disk(path))
    vault.ask(1, tokens)
    vault.drive()
    vault.put_away()
    assert vault.keeper._store.flush(PATIENCE)
    vault.keeper.close(0.0)


def fetched(vault: Vault) -> None:
    """Carry out what the store's thread has to say."""
    vault.stepper._drain(block=True, timeout=PATIENCE)


def test_without_ram_the_disk_is_still_of_use(tmp_path: Path) -> None:
    keep_on_disk(tmp_path, prompt(700))
    vault = Vault(ScriptedEngine(SCRIPT), on_disk(tmp_path))
    vault.ask(1, prompt(700))
    assert vault.stepper.scheduler.plan(vault.clock()) is None, "it waits for the disk"
    fetched(vault)
    vault.drive()
    assert vault.transcript.cached[1, 0] == 699
    vault.keeper.close(0.0)


def test_what_is_on_the_disk_is_known_before_the_first_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(Store, "opened", lambda _self, timeout: asked.append(timeout))
    open_store(on_disk(tmp_path), ScriptedEngine(SCRIPT), ManualClock()).close(0.0)
    assert asked == [OPEN_S]


def test_a_short_prefix_is_fetched_too(tmp_path: Path) -> None:
    """70 tokens take 70 ms to compute and a few to read."""
    keep_on_disk(tmp_path, prompt(70))
    vault = Vault(ScriptedEngine(SCRIPT), on_disk(tmp_path))
    vault.ask(1, prompt(70))
    assert vault.stepper.scheduler.held_until(0.0) == pytest.approx(2 * WAKE_S, rel=0.01)
    fetched(vault)
    vault.drive()
    assert vault.transcript.cached[1, 0] == 69
    vault.keeper.close(0.0)


def test_nobody_waits_for_the_disk_to_bring_what_the_pool_holds(tmp_path: Path) -> None:
    keep_on_disk(tmp_path, prompt(700))
    vault = Vault(ScriptedEngine(SCRIPT), on_disk(tmp_path), warm_cells=None)
    first = Generation(1, prompt(700), 3)
    vault.transcript.ask(first)
    vault.stepper.scheduler.submit(first, 0.0)  # past the keeper, as if nothing were kept of it
    vault.drive()
    vault.ask(2, prompt(700))
    assert vault.stepper.scheduler.held_until(0.0) is None
    vault.drive()
    assert vault.transcript.cached[2, 0] == 699
    vault.keeper.close(0.0)


def test_the_bytes_that_redis_may_send_are_part_of_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    vault = Vault(ScriptedEngine(SCRIPT))
    asked: list[int] = []

    def estimate(_hit: Hit, shared: int = 0) -> float:
        asked.append(shared)
        return 0.02

    monkeypatch.setattr(vault.keeper._store, "beyond", lambda *_: (b"a" * 16, b"b" * 16))
    monkeypatch.setattr(vault.keeper._store, "estimate", estimate)
    monkeypatch.setattr(vault.keeper._store, "fetch", lambda *_: None)
    vault.ask(1, prompt(700))
    assert asked == [2 * 256 * 4]
    assert vault.stepper.scheduler.held_until(0.0) == pytest.approx(2 * ASK_S), "a question alone takes that long"


def test_what_is_idle_leaves_before_cells_are_loaded() -> None:
    """Otherwise the engine has no cells for the block when its turn comes."""

    class Tight(ScriptedEngine):
        def load(self, slot: int, start: int, end: int, payload: bytes) -> Sequence[int]:
            held = sum(map(len, self.slots.values()))
            return super().load(slot, start, end, payload) if held + end - start <= self.n_cells else ()

    vault = Vault(Tight(SCRIPT, cells=1000, n_ctx=1000))
    vault.ask(1, prompt(700))
    vault.drive()
    vault.put_away()
    vault.ask(2, prompt(500, 7))
    vault.drive()
    vault.ask(3, prompt(700))
    vault.drive()
    assert vault.transcript.cached[3, 0] == 699


def test_who_waits_for_the_disk_has_the_place_of_what_will_be_left_of_it(tmp_path: Path) -> None:
    keep_on_disk(tmp_path, prompt(700))
    vault = Vault(ScriptedEngine(SCRIPT), on_disk(tmp_path))
    vault.ask(1, prompt(700))
    (waiting,) = vault.stepper.scheduler.waiting
    assert waiting.known == 699
    assert waiting.due < 0.01
    fetched(vault)
    vault.drive()
    assert vault.transcript.cached[1, 0] == 699
    vault.keeper.close(0.0)


def test_a_fetch_that_takes_too_long_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_on_disk(tmp_path, prompt(700))
    vault = Vault(ScriptedEngine(SCRIPT), on_disk(tmp_path))
    monkeypatch.setattr(vault.keeper._store, "fetch", lambda *_: None)
    vault.ask(1, prompt(700))
    vault.clock.advance(1.0)
    while plan := vault.stepper.scheduler.plan(vault.clock()):
        vault.stepper.step(plan)
    assert vault.transcript.text(1) == "abc"
    assert vault.transcript.cached[1, 0] == 0
    vault.keeper.close(0.0)


def test_guesses_take_nothing_from_prompts() -> None:
    """A reader alone has all of the engine, guesses and all; a newcomer is not to think that it always will."""
    clock = ManualClock()

    def wait(seconds: float) -> bool:
        clock.advance(seconds)
        return False

    engine = ScriptedEngine([[bytes([c])] for c in b"over and " * 40], step_s=0.01, wait=wait, clock=clock)
    stepper = Stepper(engine, Limits(pace=Pace(), speculation=True), clock, lambda *_: None)
    stepper.scheduler.submit(Generation(1, prompt(20), 300, sampling=GREEDY), 0.0)
    while stepper.stats().drafts <= 20:
        plan = stepper.scheduler.plan(clock())
        assert plan is not None
        stepper.step(plan)
    assert stepper.stats().decode_share == 0.0
