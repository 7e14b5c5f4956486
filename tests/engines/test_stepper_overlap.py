"""Readers are told beside the next step, and cannot tell the difference."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from engines.desk import PATIENCE, Held, prompt, running
from headrace.core.budget import Pace
from headrace.core.events import Admitted, Delta, Event, Finished
from headrace.core.limits import Limits
from headrace.core.request import Generation, Sampling
from headrace.engines.base import EngineStats
from headrace.engines.stepper import Stepper
from headrace.testing import ManualClock, ScriptedEngine


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
