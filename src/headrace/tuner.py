"""Tries ways to run a model and keeps the files that this takes.

    weights                       settings of the best                        what helped, together
    ┌────────┐ round 1, 2, 3 …    ┌──────────┐ round 1, 2, 3 …                ┌──────────┐ round 1, 2, 3 …
    │ source │  ┌─► best          │ own      │  ┌─► best, if two changes      │ own      │
    │ q8_0   │ ─┘                 │ best     │ ─┘   helped: ────────────────► │ best     │ ──► Decision
    │ …      │                    │ threads… │                               │ both     │
    └────────┘                    └──────────┘                                └──────────┘

Rules: every stage compares with what is used untuned, in the same rounds; who is clearly slower after the first round
is not measured again; one that fails is shown as failed and the others go on. Whatever ends it, no file is left but the
chosen one and those that were there before. What is decided is decided in `core.tuning`; nothing is printed.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from headrace.core.errors import StartupError
from headrace.core.quantisation import SOURCE, Format, Loss, is_same, loss, most_bytes
from headrace.core.tuning import (
    BUSY,
    READERS,
    Candidate,
    Decision,
    Figures,
    Trial,
    choose,
    combined,
    passed_over,
    survivors,
    variants,
    waited,
)
from headrace.engines.trial import Report
from headrace.kv.blob import BLOCK

ABANDONED_S = 24 * 3600
"""A half-written file older than this belongs to nobody."""

FULL = (1024, 1536)
QUICK = (512, 1024)
"""Tokens of the long prompt, and of what is idle in the pool: as much as a server leaves there by default."""

PATIENCE_S = 20.0
"""The prompts of one trial take about that long at most, or they are shortened."""

LEAST_LONG = 128


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of a trial's prompts, tokens."""

    long: int
    idle: int


Measure = Callable[[Candidate, Path, Lengths], Report]
Make = Callable[[Path, Format], None]
"""Writes the model as that format under this path, or raises StartupError."""
Told = Callable[[str, bool], None]
"""(what, is it over?): once before and once after everything that takes time."""


def lengths(rate: float, *, quick: bool) -> Lengths:
    """How long the prompts may be at `rate` prompt tokens a second."""
    long, idle = QUICK if quick else FULL
    # Of what is idle, one block is computed.
    while long > LEAST_LONG and (long + BLOCK) / rate > PATIENCE_S:
        long = long // 2
    return Lengths(long, idle)


def available_memory() -> int | None:
    """Bytes that can be had without swapping; None where that cannot be told."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), "")
    return int(found.split()[1]) * 1024 if found else None


@dataclass(frozen=True, slots=True)
class Source:
    """The user's file."""

    path: Path
    digest: str
    number: int | None
    """Its `llama_ftype`."""

    @property
    def split(self) -> bool:
        """One of several files that are one model."""
        return re.search(r"-\d{5}-of-\d{5}$", self.path.stem) is not None

    def converted(self, folder: Path, target: Format) -> Path:
        """Where it is kept as `target`. Its digest is in the name: another file of this name has its own."""
        stem = re.sub(r"[.-](i?q\d\w*|b?f16|f32)$", "", self.path.stem, flags=re.IGNORECASE)
        return folder / f"{stem}-{self.digest[:8]}.{target.name.upper()}.gguf"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is tried, and how often."""

    own: Candidate
    """What is used untuned."""
    cores: int
    itl: float
    """Seconds."""
    rounds: int = 3
    quick: bool = False
    formats: tuple[Format, ...] = ()
    fixed: frozenset[str] = frozenset()
    """Fields of Candidate that the user has set and that are not varied."""
    allow_loss: bool = False
    keep: bool = False
    anyway: bool = False
    """Also on a machine that is busy with something else."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`trials`: each candidate by its last rounds. `path`: the weights of the chosen one."""

    decision: Decision
    trials: tuple[Trial, ...]
    path: Path
    made: bool = False
    """`path` was made by this run."""


@dataclass(slots=True)
class Tuner:
    """See the module. `run` is called once."""

    source: Source
    folder: Path
    """Where converted files are kept."""
    measure: Measure
    make: Make
    tell: Told
    memory: Callable[[], int | None] = available_memory
    _files: dict[str, Path] = field(default_factory=dict)
    _made: list[Path] = field(default_factory=list)
    """By this run: those that were there before are somebody's."""
    _losses: dict[str, Loss] = field(default_factory=dict)
    _lengths: Lengths = Lengths(*FULL)

    def run(self, plan: Plan) -> Outcome:
        """Raises StartupError if nothing can be chosen; then, as after any other end, the files are gone."""
        kept: Path | None = None
        try:
            outcome = self._run(plan)
            kept = outcome.path
            return outcome
        finally:
            for path in self._made:
                if path != kept and not (plan.keep and kept is not None):
                    path.unlink(missing_ok=True)

    def _run(self, plan: Plan) -> Outcome:
        self._files[SOURCE] = self.source.path
        self._probe(plan)
        refused = list(self._convert(plan))
        weights = self._rounds([msgspec.structs.replace(plan.own, weights=name) for name in self._files], plan)
        trials = {trial.candidate: trial for trial in (*refused, *weights)}
        decision = self._decided(weights, plan)
        best = decision.chosen
        others = variants(best.candidate, plan.cores, max(f.longest for f in best.rounds), plan.fixed)
        if others:
            settings = self._rounds(_unique([plan.own, best.candidate, *others]), plan)
            trials.update((trial.candidate, trial) for trial in settings)
            decision = self._decided(settings, plan)
            base = next(trial for trial in settings if trial.candidate == best.candidate)
            both = combined(base, settings, plan.itl) if base.measured else None
            if both is not None:
                final = self._rounds(_unique([plan.own, decision.chosen.candidate, both]), plan)
                trials.update((trial.candidate, trial) for trial in final)
                decision = self._decided(final, plan)
        every, chosen = tuple(trials.values()), decision.chosen
        _check_idle(waited(every), plan)
        passed = passed_over(every, chosen, plan.itl, allow_loss=plan.allow_loss)
        decision = replace(decision, reasons=(*decision.reasons, *passed))
        path = self._files[chosen.candidate.weights]
        return Outcome(decision, every, path, path in self._made)

    def _probe(self, plan: Plan) -> None:
        """How fast is this? A trial of a model that is a hundred times larger must not take a hundred times as long."""
        self.tell(f"loading {self.source.path.name}", False)
        report = self.measure(plan.own, self.source.path, Lengths(64, 0))
        if report.figures is None:
            raise StartupError(f"{self.source.path.name} cannot be measured: {report.failure}")
        _check_idle(report.figures.waited, plan)
        self._lengths = lengths(64 / report.figures.first_tokens[0][1], quick=plan.quick)
        self.tell(f"{self.source.path.name}: prompts of {self._lengths.long} tokens are measured", True)

    def _convert(self, plan: Plan) -> Iterable[Trial]:
        """Make the files; yields the candidates that there will be none for."""
        formats = [target for target in plan.formats if not is_same(self.source.number, target)]
        if self.source.split or not formats:
            return
        paths = {target.name: self.source.converted(self.folder, target) for target in formats}
        size = self.source.path.stat().st_size
        needed = {target.name: most_bytes(size, self.source.number, target) for target in formats}
        self._make_room(sum(needed[name] for name, path in paths.items() if not path.exists()))
        for target in formats:
            path, have = paths[target.name], self.memory()
            candidate = msgspec.structs.replace(plan.own, weights=target.name)
            self._losses[target.name] = lost = loss(self.source.number, target)
            if have is not None and not path.exists() and needed[target.name] > have:
                why = f"may need {needed[target.name] / 1e9:.1f} GB of memory, {have / 1e9:.1f} GB are there"
                self.tell(f"{target.name}: not tried, {why}", True)
                yield Trial(candidate, needed[target.name], lost, failure=why)
                continue
            try:
                if not path.exists():
                    self.tell(f"making {path.name}", False)
                    self._made.append(path)  # before it is there: an interrupt must find it
                    self.make(path, target)
                    self.tell(f"made {path.name}, {path.stat().st_size / 1e6:,.0f} MB", True)
                self._files[target.name] = path
            except StartupError as error:
                self.tell(f"{target.name}: {error.message}", True)
                yield Trial(candidate, 0, lost, failure=error.message)

    def _make_room(self, needed: int) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for part in self.folder.glob(".*.part"):
                if part.stat().st_mtime < time.time() - ABANDONED_S:
                    part.unlink(missing_ok=True)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise StartupError(f"cannot keep files in {self.folder}: {error.strerror or error}") from None
        if needed > free:
            raise StartupError(
                f"the files to try may need {needed / 1e6:,.0f} MB in {self.folder} and {free / 1e6:,.0f} MB are free: "
                "make room, set XDG_CACHE_HOME to keep them elsewhere, or try fewer with --only"
            )

    def _rounds(self, candidates: Sequence[Candidate], plan: Plan) -> list[Trial]:
        trials = {
            candidate: Trial(candidate, self._size(candidate), self._losses.get(candidate.weights, Loss.NOTHING))
            for candidate in candidates
        }
        running = list(candidates)
        for turn in range(plan.rounds):
            for candidate in running:
                trials[candidate] = self._once(trials[candidate], f"round {turn + 1}, {candidate}")
            now = [trials[candidate] for candidate in running]
            left = survivors(now, plan.own, plan.itl, allow_loss=plan.allow_loss) if turn == 0 else now
            running = [trial.candidate for trial in left if trial.measured]
            if len(running) < 2:
                break
        return list(trials.values())

    def _once(self, trial: Trial, what: str) -> Trial:
        self.tell(what, False)
        report = self.measure(trial.candidate, self._files[trial.candidate.weights], self._lengths)
        if report.figures is None:
            self.tell(f"{what}: failed, {report.failure}", True)
            return replace(trial, failure=report.failure or "no figures")
        self.tell(f"{what}: {_told(report.figures)}", True)
        return replace(trial, rounds=(*trial.rounds, report.figures))

    def _size(self, candidate: Candidate) -> int:
        return self._files[candidate.weights].stat().st_size

    def _decided(self, trials: Sequence[Trial], plan: Plan) -> Decision:
        decision = choose(trials, plan.own, plan.itl, allow_loss=plan.allow_loss)
        if decision is None:
            failures = "; ".join(trial.failure for trial in trials if trial.failure)
            raise StartupError(f"nothing could be measured that may be chosen: {failures or 'no candidates'}")
        return decision


def _check_idle(share: float, plan: Plan) -> None:
    if share > BUSY and not plan.anyway:
        raise StartupError(
            f"the machine is busy with something else (the engine waited for a core {share:.0%} of the time), so that "
            "times say little; nothing was written: try again when it is idle, or with --anyway"
        )


def _told(figures: Figures) -> str:
    return (
        f"first token {figures.ttft * 1e3:,.0f} ms, a step of one {figures.one * 1e3:.1f} ms, "
        f"of {READERS} {figures.many * 1e3:.1f} ms"
        + (f" (the machine is busy: waited {figures.waited:.0%} of the time)" if figures.waited > BUSY else "")
    )


def _unique(candidates: Iterable[Candidate]) -> list[Candidate]:
    return list(dict.fromkeys(candidates))
