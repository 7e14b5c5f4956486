"""Measures a file that is served for the first time on this machine, in the seconds before the server is ready.

    file ──► sample of its first layers ──► as it is ► no extra buffers ► no flash attention ► formats ► again ► threads
                                            └─────────── each with the best so far, until LIMIT_S ──────────────┘
                                                                   │
                                             the choice `tune` would make ──► its file made now, or offered

Rules: the order is that of what can be gained, and the best so far holds when the time is over. A way whose process
dies is a failed one, so what does not work here is out whatever it would gain. On a busy machine only that counts.
Whatever ends it, the sample and what was made of it are gone. What is decided is decided in `core.tuning`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from headrace.core.clock import Clock
from headrace.core.errors import StartupError
from headrace.core.quantisation import SOURCE, TARGETS, Format, Loss, is_same, loss, most_bytes
from headrace.core.timings import Part, figures, sample_layers
from headrace.core.tuning import BUSY, Candidate, Decision, Trial, choose, waited
from headrace.engines.timing import DEPTH, Report
from headrace.tuner import ABANDONED_S, Outcome, Source, available_memory

LIMIT_S = 17.0
"""For all of it. A model of 1B is loaded and calibrated as well before it is ready: with 20 s that was after 30."""
WITHIN_S = 22.0
"""A file that is small is still made until then."""
SMALL = 300_000_000
"""Bytes of such a file."""
LARGEST = 1_500_000_000
"""Bytes of a file that is tried in other formats."""
WHOLE = 150_000_000
"""Bytes up to which a file of which no sample can be made is tried in other formats."""
TARGET = 16_000_000
"""Bytes of the layers of a sample: about a second's work for two cores."""
TRIAL_S = 3.0
"""That a trial may compute for."""
PREFIX = ".measure-"
ORDER = ("bf16", "q8_0", "f16", "q4_0")
"""Formats, by what they may bring."""

Measure = Callable[[Candidate, Path, int, float, float], Report]
"""(candidate, file, depth in tokens, seconds to compute for, seconds until it is given up)."""
Make = Callable[[Path, Path, Format], None]
"""Writes the first file as that format under the second path, or raises StartupError."""


@dataclass(frozen=True, slots=True)
class Cutter:
    """How a sample is made."""

    cut: Callable[[Path, Path, int], None]
    """Writes a file of so many of the first layers. Raises StartupError if that cannot be done with this model."""
    layers: Callable[[Path], int]
    period: Callable[[Path], int]
    """Layers after which their pattern comes again."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is tried."""

    own: Candidate
    """What is used unmeasured."""
    cores: int
    itl: float
    """Seconds."""
    fixed: frozenset[str] = frozenset()
    """Fields of Candidate that the user has set."""
    allow_loss: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """`outcome` None: nothing could be measured. `busy`: what the times say was not believed."""

    outcome: Outcome | None
    busy: bool = False
    offer: str = ""
    """What a file would bring that was not made."""
    failure: str = ""
    gain: float = 0.0
    """Share of the time to the first token that the choice saves; 0: none, or what is used unmeasured does not run."""


@dataclass(slots=True)
class Measurer:
    """See the module. `run` is called once."""

    source: Source
    folder: Path | None
    """Where converted files are kept; None: nowhere."""
    measure: Measure
    make: Make
    tell: Callable[[str], None]
    """What is tried now."""
    cutter: Cutter | None = None
    clock: Clock = time.monotonic
    memory: Callable[[], int | None] = available_memory
    _began: float = 0.0
    _part: Part = field(default_factory=lambda: Part(1, 1))
    _files: dict[str, Path] = field(default_factory=dict)
    _trials: dict[Candidate, Trial] = field(default_factory=dict)
    _losses: dict[str, Loss] = field(default_factory=dict)
    _depth: int = DEPTH
    _longest: float = 1.0
    """Seconds of the longest trial."""
    _making: float = 0.0
    """Seconds that a byte of the source takes to be converted, at most."""
    _making_sample: float = 0.0
    """Seconds that the sample took, at most."""
    _made: bool = False

    def run(self, plan: Plan) -> Found:
        """Does not raise for what goes wrong in a trial."""
        self._began = self.clock()
        with self._scratch() as scratch:
            self._sample(scratch)
            self._try(plan.own)
            if "extra_buffers" not in plan.fixed:
                self._try(msgspec.structs.replace(plan.own, extra_buffers=not plan.own.extra_buffers))
            best = self._best(plan)
            if best is None:
                return self._nothing(plan)
            if waited(self._trials.values()) <= BUSY:
                self._improve(plan, scratch)
        return self._chosen(plan)

    def _improve(self, plan: Plan, scratch: Path) -> None:
        """Try what may be faster than what is known to run."""
        if "flash_attention" not in plan.fixed:
            base = self._base(plan)
            self._try(msgspec.structs.replace(base, flash_attention=not base.flash_attention))
        base = self._base(plan)
        for target in self._formats(plan):
            if self._left() >= self._longest + self._making_sample and self._convert(target, scratch):
                self._try(msgspec.structs.replace(base, weights=target.name))
        rounds = self._again(plan)
        if "threads" not in plan.fixed:
            base = self._base(plan)
            for count in sorted({plan.cores - 1, plan.cores // 2, plan.cores} - {0, base.threads}, reverse=True):
                self._try(msgspec.structs.replace(base, threads=count), rounds)

    def _left(self) -> float:
        return self._began + LIMIT_S - self.clock()

    def _has_time(self, trials: int = 1) -> bool:
        return self._left() >= trials * self._longest

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A folder that is gone afterwards, beside the files that are kept, or else among the system's own."""
        place = None
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                for old in self.folder.glob(f"{PREFIX}*"):
                    if old.stat().st_mtime < time.time() - ABANDONED_S:
                        shutil.rmtree(old, ignore_errors=True)
                place = tempfile.mkdtemp(prefix=PREFIX, dir=self.folder)
            except OSError:
                self.folder = None
        if place is None:
            with suppress(OSError):
                place = tempfile.mkdtemp(prefix=f"headrace{PREFIX}")
        # Where nothing can be written, nothing is, and the file is measured as a whole.
        scratch = Path(place or os.devnull)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _sample(self, scratch: Path) -> None:
        """Of the file, if it has more layers than are needed; else the file itself is measured."""
        self._files[SOURCE] = path = self.source.path
        if self.cutter is None or self.source.split:
            return
        try:
            total = self.cutter.layers(path)
            layers = sample_layers(path.stat().st_size, total, self.cutter.period(path), TARGET)
            if layers >= total:
                return
            self.tell(f"taking {layers} of {total} layers")
            target = scratch / "sample.gguf"
            self.cutter.cut(path, target, layers)
        except (OSError, StartupError):
            return
        self._files[SOURCE], self._part = target, Part(layers, total)

    def _try(self, candidate: Candidate, rounds: int = 1) -> None:
        """Nothing if there is no time for it."""
        if candidate in self._trials or (self._trials and not self._has_time(rounds)):
            return
        trial = Trial(candidate, self._size(candidate), self._losses.get(candidate.weights, Loss.NOTHING))
        for _ in range(rounds):
            if not trial.failure:
                trial = self._undisturbed(trial)
        self._trials[candidate] = trial

    def _undisturbed(self, trial: Trial) -> Trial:
        """Once, or once more if something else took the cores meanwhile, which it did not before."""
        after = self._once(trial)
        calm = self._trials and waited(self._trials.values()) <= BUSY
        if calm and not after.failure and after.rounds[-1].waited > BUSY and self._has_time():
            again = self._once(trial)
            return after if again.failure else again
        return after

    def _once(self, trial: Trial) -> Trial:
        began, candidate = self.clock(), trial.candidate
        self.tell(str(candidate))
        left = max(1.0, self._left())
        report = self.measure(candidate, self._files[candidate.weights], self._depth, min(TRIAL_S, left / 2), left)
        self._longest = max(self._longest if self._trials else 0.0, self.clock() - began)
        if report.failure:
            return replace(trial, failure=report.failure)
        found = figures(report.timings, self._part, report.n_ctx)
        if found is None:
            return replace(trial, failure="too little could be timed")
        # All are timed as deep as the first: what is timed less deep looks faster.
        self._depth = max((t.depth + t.rows for t in report.timings if t.rows > t.sequences == 1), default=self._depth)
        found = msgspec.structs.replace(found, memory=report.memory, waited=report.waited)
        return replace(trial, rounds=(*trial.rounds, found))

    def _again(self, plan: Plan) -> int:
        """Once more those that tie for the first place, if there is time for all of them; rounds that the best has."""
        decision = self._decision(plan)
        if decision is None or len(decision.tied) < 2 or not self._has_time(len(decision.tied)):
            return 1
        again = {trial.candidate: self._once(trial) for trial in decision.tied}
        if any(trial.failure for trial in again.values()):
            return 1
        self._trials |= again
        return 2

    def _formats(self, plan: Plan) -> list[Format]:
        """Those worth trying, the most promising first."""
        size, number = self.source.path.stat().st_size, self.source.number
        most = WHOLE if self._files[SOURCE] == self.source.path else LARGEST
        if "weights" in plan.fixed or self.folder is None or self.source.split or size > most:
            return []
        have, free = self.memory(), shutil.disk_usage(self.folder).free
        found = []
        for target in (TARGETS[name] for name in ORDER):
            needed = most_bytes(size, number, target)
            # It is to be held by the server, beside its KV, and not only to be made.
            if is_same(number, target) or needed > free or (have is not None and 1.5 * needed > have):
                continue
            self._losses[target.name] = loss(number, target)
            if plan.allow_loss or self._losses[target.name] is not Loss.AGAIN:
                found.append(target)
        return found

    def _convert(self, target: Format, scratch: Path) -> bool:
        """Make it of the sample."""
        source, path = self._files[SOURCE], scratch / f"{target.name}.gguf"
        self.tell(f"making {target.name} of the sample")
        began = self.clock()
        try:
            self.make(source, path, target)
        except StartupError:
            return False
        took = self.clock() - began
        self._making_sample = max(self._making_sample, took)
        self._making = max(self._making, took / source.stat().st_size)
        self._files[target.name] = path
        return True

    def _size(self, candidate: Candidate) -> int:
        """Of the whole file; about, for one that is not made yet."""
        size = self.source.path.stat().st_size
        if candidate.weights == SOURCE:
            return size
        return int(size * self._files[candidate.weights].stat().st_size / self._files[SOURCE].stat().st_size)

    def _decision(self, plan: Plan, weights: Sequence[str] | None = None) -> Decision | None:
        trials = [t for t in self._trials.values() if weights is None or t.candidate.weights in weights]
        return choose(trials, plan.own, plan.itl, allow_loss=plan.allow_loss)

    def _best(self, plan: Plan) -> Trial | None:
        decision = self._decision(plan)
        return None if decision is None else decision.chosen

    def _base(self, plan: Plan) -> Candidate:
        best = self._best(plan)
        return plan.own if best is None else best.candidate

    def _nothing(self, plan: Plan) -> Found:
        own = self._trials[plan.own]
        if self._left() > 0.0:
            return Found(None, failure=own.failure)
        why = f"it could not be measured within {LIMIT_S:.0f} s: {own.failure}"
        return Found(
            Outcome(Decision(own, (why,)), tuple(self._trials.values()), self.source.path), failure=own.failure
        )

    def _chosen(self, plan: Plan) -> Found:
        trials = tuple(self._trials.values())
        own = self._trials[plan.own]
        if waited(trials) > BUSY:
            runs = own if own.measured else next(trial for trial in trials if trial.measured)
            return Found(Outcome(Decision(runs, ()), trials, self.source.path), busy=True)
        decision = self._decision(plan)
        assert decision is not None, "one was measured"
        path, offer, made = self.source.path, "", False
        if (name := decision.chosen.candidate.weights) != SOURCE:
            kept = self._kept(TARGETS[name], decision.chosen.size)
            if isinstance(kept, Path):
                path, made = kept, self._made
            else:
                saved = _gain(decision.chosen, own)
                offer = (
                    f"{name} weights would bring the first token {saved:.0%} sooner; {kept}: `headrace tune` makes them"
                )
                other = self._decision(plan, (SOURCE,))
                assert other is not None, "the source was measured before its formats"
                decision = replace(other, reasons=(*other.reasons, offer))
        return Found(Outcome(decision, trials, path, made), offer=offer, gain=_gain(decision.chosen, own))

    def _kept(self, target: Format, size: int) -> Path | str:
        """The whole file as `target`, made now; or why not. `size`: bytes that it will have, about."""
        assert self.folder is not None, "no formats are tried then"
        path = self.source.converted(self.folder, target)
        if path.exists():
            return path
        limit = WITHIN_S if size <= SMALL else LIMIT_S
        needed = self._making * self.source.path.stat().st_size
        if self.clock() - self._began + needed > limit:
            return f"to make the file takes about {needed:.0f} s"
        self.tell(f"making {path.name}")
        try:
            self.make(self.source.path, path, target)
            self._made = True
        except StartupError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return error.message
        return path


def _gain(chosen: Trial, own: Trial) -> float:
    return 1.0 - chosen.ttft / own.ttft if own.measured else 0.0
