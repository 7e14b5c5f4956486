"""What steps of a file cost: a child process loads it, times a few of each kind, and tells.

    python -m headrace.engines.timing < Job > Report      both JSON

    slot 0   ┌ 512 ┬ 512 ┬ 512 ┐ 1        each timed, as deep as its seconds allow; then one row, that deep
    slot 1   │ 64 │                       beside what slot 0 holds, as a server leaves it in the pool
    slot 2 … │ 1, then READERS at a time, with outputs and without

Rules: as for `trial`, whose quick form this is: it takes about a second for a few layers of a model. What matters most
is timed first, and when the time is over it tells what it has.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.core.clock import Clock
from headrace.core.plan import Chunk, Draw
from headrace.core.request import Sampling
from headrace.core.timings import Timing
from headrace.core.tuning import MIXTURE, READERS
from headrace.engines.base import StepEngine, StepFailed
from headrace.engines.trial import answer_job, in_child, watched

ROWS = (512, 256, 128, 64)
"""Of a long prompt's steps: the longest of which three fit into the time."""
DEPTH = 1536
SHORT = MIXTURE[0][0]
REPEATS = 2
_GREEDY = Sampling(temperature=0.0)


class Job(msgspec.Struct, frozen=True):
    """What the child is to do."""

    factory: str
    """`module:function`, called with `settings` and a clock: see `engines.worker.Blueprint`."""
    settings: dict[str, Any]
    depth: int = DEPTH
    """Tokens of the long prompt, at most."""
    seconds: float = 3.0
    """That it may compute for, once it has loaded the file."""


class Report(msgspec.Struct, frozen=True):
    """What it found; `failure` if it failed."""

    timings: tuple[Timing, ...] = ()
    n_ctx: int = 0
    """Tokens that a sequence of the model may hold."""
    memory: int = 0
    """The most bytes that the process held."""
    waited: float = 0.0
    """See `core.tuning.Figures`."""
    failure: str = ""


class Timer:
    """Computes on an engine that is empty and stays with whoever made it."""

    def __init__(self, engine: StepEngine, job: Job, clock: Clock) -> None:
        self._engine, self._job, self._clock = engine, job, clock
        self._timings: list[Timing] = []
        self._until = 0.0

    def run(self) -> tuple[Timing, ...]:
        """Raises StepFailed."""
        self._until = self._clock() + self._job.seconds
        limit = min(self._job.depth, self._engine.info.n_ctx - 1)
        first = self._prompt(1, min(SHORT, limit))
        self._long(limit, first)
        for _ in range(REPEATS):
            self._prompt(1, min(SHORT, limit))
        for outputs in (True, False):
            for sequences in (1, READERS):
                self._readers(sequences, outputs=outputs)
        return tuple(self._timings)

    def _prompt(self, slot: int, rows: int) -> float:
        """A prompt of one step, forgotten again; seconds."""
        seconds = self._step([Chunk(slot, 0, _tokens(0, rows), None)], 0, outputs=False)
        self._engine.trim(slot, 0)
        return seconds

    def _long(self, limit: int, first: float) -> None:
        """As much of the long prompt as fits, and a reader behind it. `first`: seconds of SHORT rows."""
        # A third of the time is for what follows.
        until = self._until - self._job.seconds / 3
        fits = [rows for rows in ROWS if 3 * first * rows / SHORT <= until - self._clock()]
        rows = min(fits[0] if fits else ROWS[-1], limit)
        start, took = 0, 0.0
        while start + rows <= limit and (start == 0 or self._clock() + took < until):
            took = self._step([Chunk(0, start, _tokens(start, rows), None)], start, outputs=False)
            start += rows
        for at in range(start, min(start + 1 + REPEATS, self._engine.info.n_ctx)):
            self._step([Chunk(0, at, _tokens(at, 1), None)], start, outputs=False)

    def _readers(self, sequences: int, *, outputs: bool) -> None:
        # The first of a kind builds its graph.
        for at in range(1 + REPEATS):
            tokens = _tokens(at, 1)
            draw = Draw(_GREEDY, 0, at + 1, tokens, 1) if outputs else None
            self._step([Chunk(2 + one, at, tokens, draw) for one in range(sequences)], 0, outputs=outputs)
        for one in range(sequences):
            self._engine.trim(2 + one, 0)

    def _step(self, chunks: Sequence[Chunk], depth: int, *, outputs: bool) -> float:
        began = self._clock()
        if self._engine.step(chunks).broken:
            raise StepFailed("it computes numbers that are none (NaN or infinite logits)")
        seconds = max(1e-9, self._clock() - began)
        self._timings.append(Timing(sum(len(chunk.tokens) for chunk in chunks), depth, len(chunks), outputs, seconds))
        return seconds


def _tokens(start: int, rows: int) -> list[int]:
    """Any, of a vocabulary of 256 or more."""
    return [1 + (7919 * at) % 255 for at in range(start, start + rows)]


def run_timing(job: Job, environ: Mapping[str, str], timeout_s: float) -> Report:
    """Have a child do it. What goes wrong there is in the report."""
    answer = in_child("headrace.engines.timing", job, Report, environ, timeout_s)
    return Report(failure=answer) if isinstance(answer, str) else answer


def _time(job: Job) -> Report:
    from headrace.engines.worker import Blueprint, build

    engine = build(Blueprint(job.factory, job.settings, {}))
    timings, waited, memory = watched(Timer(engine, job, time.perf_counter).run)
    return Report(timings, engine.info.n_ctx, memory, waited)


def main() -> None:
    """The child process."""
    answer_job(Job, _time, lambda failure: Report(failure=failure))


if __name__ == "__main__":
    main()
