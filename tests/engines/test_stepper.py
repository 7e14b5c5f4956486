from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import pytest

from engines.desk import PATIENCE, SCRIPT, Held, drive, prompt, running
from headrace.core.budget import Pace
from headrace.core.events import Admitted, Delta, Event, Failed, Finished, Marks
from headrace.core.limits import Limits
from headrace.core.plan import Chunk, StepResult
from headrace.core.request import Generation, Sampling
from headrace.engines.base import EngineStats, StepAborted
from headrace.engines.stepper import LOOK_UP_EVERY, Stepper
from headrace.testing import ManualClock, ScriptedEngine
from rig import GREEDY, Transcript

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


# --- when steps do not work out; by hand, without threads


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
