"""What one way to run a model costs: a child process loads it, computes a few prompts and answers, and tells.

    python -m headrace.engines.trial < Job > Report      both JSON

    pool    ┌ idle ──────┐┌ long ────────────┐┌ short ┐┌ readers …
            │ others' KV ││ in paced steps   ││ 64    ││ 1, then READERS at a time, at the end of `long`
            └────────────┘└──────────────────┘└───────┘└─────────

Steps are as long as the server would make them while nobody reads: by `core.budget`, with a cost model that learns from
these very steps. What is idle in the pool costs each of them what it costs in a server that has been in use.

Rules: a process of its own, because the library answers some failures by ending it, and because the next way to run
shall not inherit this one's memory; a way that ends badly is a failed one, with one line that says why.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import quantiles
from typing import Any, TypeVar

import msgspec

from headrace.core.budget import Room
from headrace.core.clock import Clock
from headrace.core.costmodel import CostModel, Work, positions
from headrace.core.errors import StartupError
from headrace.core.plan import Chunk, Draw
from headrace.core.request import Sampling
from headrace.core.tuning import MIXTURE, READERS, Figures, PromptStep, prompt_seconds
from headrace.engines.base import StepAborted, StepEngine, StepFailed
from headrace.engines.ladder import Ending, told
from headrace.engines.last_words import words_of
from headrace.kv.blob import BLOCK

SHORT = MIXTURE[0][0]
SLOTS = READERS + 8
"""KV sequence ids that a trial takes: the readers', the first of whom has the long prompt, one for a short prompt, and
those of what is idle."""
CELLS = 4096
TIMEOUT_S = 1800.0
Answer = TypeVar("Answer", bound=msgspec.Struct)
Asked = TypeVar("Asked", bound=msgspec.Struct)
Result = TypeVar("Result")
_GREEDY = Sampling(temperature=0.0)


class Job(msgspec.Struct, frozen=True):
    """What the child is to do. Tokens."""

    factory: str
    """`module:function`, called with `settings` and a clock: see `engines.worker.Blueprint`."""
    settings: dict[str, Any]
    long: int
    """Of the long prompt."""
    idle: int
    """In the pool, of nobody who is there."""
    step_tokens: int
    guard_s: float
    """Length of a step while nobody reads; 0: each has `step_tokens`."""
    decodes: int = 16
    """Steps of each kind of decode; at least 3."""


class Report(msgspec.Struct, frozen=True):
    """What it found. `figures` None: it failed."""

    figures: Figures | None = None
    failure: str = ""


class Trial:
    """Computes on an engine that is empty and stays with whoever made it."""

    def __init__(self, engine: StepEngine, job: Job, clock: Clock) -> None:
        self._engine, self._job, self._clock = engine, job, clock
        self._cost = CostModel(attention=engine.attention)
        self._held = 0
        """Cells in use."""

    def run(self) -> Figures:
        """Without `memory` and `waited`, which are the process's. Raises StepFailed."""
        job, engine = self._job, self._engine
        short, long = READERS, 0
        save = self._fill(range(READERS + 1, engine.n_slots)) if job.idle else 0.0
        steps = self._prompt(long, job.long)
        shorts: list[float] = []
        for _ in range(3):
            shorts.append(sum(step.seconds for step in self._prompt(short, min(SHORT, job.long))))
            engine.trim(short, 0)
            self._held -= min(SHORT, job.long)
        readers = list(range(READERS))
        for reader in readers[1:]:
            engine.copy(long, reader, job.long)
        one, at = self._decode(readers[:1], job.long)
        many, _ = self._decode(readers, at, aligned=job.long)
        limit = engine.info.n_ctx
        known = [(n, prompt_seconds(steps, n)) for n, _ in MIXTURE[1:] if n < limit]
        return Figures(
            first_tokens=((SHORT, min(shorts)), *known),
            one=one,
            many=many,
            memory=0,
            longest=max(step.count for step in steps),
            save=save,
        )

    def _fill(self, slots: Iterable[int]) -> float:
        """Put what is idle into the pool; the seconds that one block of it takes to be saved.

        One block is computed, which is the cost model's lessons too, and the others are copies of it: the pool is as
        wide as with any others.
        """
        engine, block = self._engine, min(BLOCK, self._job.idle)
        first, *others = slots
        self._prompt(first, block)
        if not engine.bytes_per_token:
            return 0.0
        payload, seconds = b"", []
        for _ in range(3):
            began = self._clock()
            payload = engine.save(first, 0, block)
            seconds.append(self._clock() - began)
        for slot in others[: self._job.idle // block - 1]:
            if engine.load(slot, 0, block, payload):
                self._held += block
        return min(seconds)

    def _prompt(self, slot: int, tokens: int) -> list[PromptStep]:
        """Compute a prompt that nobody sent before, in steps of the server's length."""
        steps: list[PromptStep] = []
        start, vocabulary = 0, self._engine.info.n_vocab
        ids = [(7 + 7919 * (at + self._held)) % vocabulary for at in range(tokens)]
        while start < tokens:
            count = self._count(start, tokens - start)
            end = start + count
            draw = Draw(_GREEDY, 0, tokens, ids, tokens) if end == tokens else None
            seconds = self._step([Chunk(slot, start, ids[start:end], draw)])
            self._cost.observe(Work(count, 0, positions(start, count), self._held + count), seconds)
            self._held += count
            steps.append(PromptStep(start, count, seconds))
            start = end
        return steps

    def _count(self, start: int, pending: int) -> int:
        job = self._job
        model = self._cost if job.guard_s else None
        room = Room(model, Work(width=self._held), seconds=job.guard_s, tokens=job.step_tokens)
        return max(1, room.give(start, pending))

    def _decode(self, slots: list[int], start: int, *, aligned: int | None = None) -> tuple[float, int]:
        """(seconds of a step, where the sequences end). `aligned`: where all but the first sequence begin."""
        seconds: list[float] = []
        for turn in range(self._job.decodes):
            chunks = []
            for at, slot in enumerate(slots):
                position = turn + (start if at == 0 or aligned is None else aligned)
                ids = [1 + (turn + slot) % 255]
                chunks.append(Chunk(slot, position, ids, Draw(_GREEDY, 0, position + 1, ids, 1)))
            seconds.append(self._step(chunks))
        self._held += len(slots) * self._job.decodes
        # The first of a kind builds its graph. What else the machine does only lengthens steps: of equal ones the
        # shorter ones tell what they cost.
        return quantiles(seconds[1:], n=4)[0], start + self._job.decodes

    def _step(self, chunks: list[Chunk]) -> float:
        began = self._clock()
        if self._engine.step(chunks).broken:
            raise StepFailed("it computes numbers that are none (NaN or infinite logits)")
        return max(1e-9, self._clock() - began)


def run_trial(job: Job, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> Report:
    """Have a child do it. What goes wrong there is in the report."""
    answer = in_child("headrace.engines.trial", job, Report, environ, timeout_s)
    return Report(failure=answer) if isinstance(answer, str) else answer


def in_child(
    module: str, job: msgspec.Struct, kind: type[Answer], environ: Mapping[str, str], timeout_s: float
) -> Answer | str:
    """What `python -m MODULE < job` answers; a line that says why there is no answer."""
    words = [sys.executable, "-m", module]
    try:
        done = subprocess.run(
            words,
            input=msgspec.json.encode(job),
            env=dict(environ),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"took longer than {timeout_s:.0f} s"
    if done.returncode == 0:
        try:
            return msgspec.json.decode(done.stdout, type=kind)
        except msgspec.DecodeError:
            pass
    return told(Ending(done.returncode, words_of(done.stderr)))


def run_delays(tasks: Path = Path("/proc/self/task")) -> dict[str, float]:
    """Thread → seconds that it has waited for a core; empty where the kernel does not tell."""
    found: dict[str, float] = {}
    for file in tasks.glob("*/schedstat"):
        try:
            found[file.parent.name] = int(file.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # the thread has ended
            continue
    return found


def watched(act: Callable[[], Result]) -> tuple[Result, float, int]:
    """What `act` gives, the share of the time in which a thread of this process waited for a core meanwhile, and the
    most bytes that the process held."""
    began, before = time.perf_counter(), run_delays()
    result = act()
    seconds, after = time.perf_counter() - began, run_delays()
    waited = max((delay - before.get(thread, 0.0) for thread, delay in after.items()), default=0.0)
    return result, waited / seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def answer_job(
    kind: type[Asked], act: Callable[[Asked], msgspec.Struct], failed: Callable[[str], msgspec.Struct]
) -> None:
    """All of a child: read the job, answer it, and be gone."""
    # A terminal's ^C reaches the whole group; the parent ends this process in its own time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=kind)
    try:
        report = act(job)
    except (StartupError, StepFailed, StepAborted) as error:
        report = failed(str(error) or type(error).__name__)
    sys.stdout.buffer.write(msgspec.json.encode(report))
    sys.stdout.buffer.flush()
    os._exit(0)  # the library's own end is of no use here, and may fail after all was told


def _try(job: Job) -> Report:
    from headrace.engines.worker import Blueprint, build

    engine = build(Blueprint(job.factory, job.settings, {}))
    figures, waited, memory = watched(Trial(engine, job, time.perf_counter).run)
    return Report(msgspec.structs.replace(figures, memory=memory, waited=waited))


def main() -> None:
    """The child process."""
    answer_job(Job, _try, lambda failure: Report(failure=failure))


if __name__ == "__main__":
    main()
