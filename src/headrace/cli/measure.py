"""The first `headrace serve` of a file: measure it for some seconds, keep what was found, say it in one line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from rich.status import Status

from headrace import tuned
from headrace.assembly import make_candidate, make_pace, make_timing
from headrace.cli.output import console
from headrace.cli.tune import make_profile, stoppable
from headrace.config import cache_home, engine_environment
from headrace.core.errors import StartupError
from headrace.core.file_name import shown
from headrace.core.quantisation import SOURCE, Format
from headrace.core.tuning import BUSY, Candidate, waited
from headrace.engines import sample
from headrace.engines.quantiser import file_type, make_file
from headrace.engines.timing import Report, run_timing
from headrace.measure import LIMIT_S, Cutter, Found, Measurer, Plan
from headrace.settings import Config, Value
from headrace.tuner import Source

CUTTER = Cutter(sample.cut, sample.layer_count, sample.periods)


class Progress:
    """What is measured, on stderr: a status that is gone afterwards, or one line at the beginning if no terminal."""

    def __init__(self, name: str) -> None:
        self._what = f"Headrace: measuring {name} on this machine, once, for up to {LIMIT_S:.0f} s"
        self._err = console(sys.stderr)
        self._status = Status(f"{self._what} …", console=self._err)

    def __enter__(self) -> Progress:
        if self._err.is_terminal:
            self._status.start()
        else:
            self._err.print(f"{self._what} (--no-measure: not) …")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def tell(self, what: str) -> None:
        """On a terminal only."""
        self._status.update(f"{self._what}: {what} …")


def run(
    config: Config,
    given: Collection[str],
    model: Path,
    load: Callable[[Mapping[str, Value]], Config],
    *,
    allow_loss: bool = False,
) -> tuned.Applied | None:
    """How to serve `model`, measured; None: it was measured before, or is not to be. `given`: settings that the user
    has set, by name."""
    wanted = config.model.tuned and config.model.measure and not config.engine.in_process
    if not wanted or tuned.is_known(cache_home(), model):
        return None
    file = tuned.profile_file(cache_home(), model)
    own, fixed = make_candidate(config, given)
    environ = engine_environment(config.engine.spin)
    itl = make_pace(config).itl

    def measure(candidate: Candidate, weights: Path, depth: int, seconds: float, limit: float) -> Report:
        return run_timing(make_timing(config, candidate, weights, depth, seconds), environ, limit)

    def make(source: Path, path: Path, target: Format) -> None:
        make_file(source, path, target.number, tuned.cores(), environ)

    began = time.monotonic()
    with stoppable(), Progress(shown(model.name)) as progress:
        try:
            str(model.absolute()).encode()  # a profile is JSON, which holds no other names
            known = tuned.describe(model)
            source = Source(model, known.digest, file_type(model))
        except (StartupError, UnicodeEncodeError):
            return None  # whoever loads it says why it is none
        measurer = Measurer(source, tuned.weights_folder(file), measure, make, progress.tell, CUTTER)
        found = measurer.run(Plan(own, tuned.cores(), itl, fixed, allow_loss))
        if found.outcome is None:
            return None  # nor is it served like that: the load says why, or what it does without
        kept = ""
        try:
            profile = make_profile(config, known, found.outcome, own, itl, tuned.SERVE)
            if not found.busy:
                kept = _keep(file, profile)
        except BaseException:
            if found.outcome.made:
                found.outcome.path.unlink(missing_ok=True)
            raise
    applied, changed = tuned.use(tuned.Applied(config, model), profile, load)
    return replace(applied, note=told(found, changed, time.monotonic() - began) + kept)


def _keep(file: Path, profile: tuned.Profile) -> str:
    """Why it could not be kept, to be added to what is said; "" if it was."""
    try:
        tuned.replace_profile(file, profile)
    except StartupError as error:
        return f"; it holds for this start only ({error.message})"
    return ""


def told(found: Found, changed: list[str], seconds: float) -> str:
    """The line that says what was chosen and what it brings."""
    assert found.outcome is not None
    if found.busy:
        share = waited(found.outcome.trials)
        held = f"this start uses {', '.join(changed)}, for nothing else runs; " if changed else ""
        return (
            f"this machine is busy with something else (waited for a core {share:.0%} of the time, {BUSY:.0%} at most "
            f"should be): {held}nothing is kept, the next start measures again; --no-measure skips this"
        )
    if not found.outcome.decision.chosen.measured:
        return f"{found.outcome.decision.reasons[0]}; the file is served as it is, `headrace tune` measures longer"
    return (
        f"measured this machine in {seconds:.0f} s: {_choice(found, changed)}; "
        + (f"{found.offer}; " if found.offer else "")
        + "--no-measure skips this, `headrace tune` measures longer"
    )


def _choice(found: Found, changed: list[str]) -> str:
    if not changed:
        return "the file as it is does best"
    assert found.outcome is not None
    own = next(trial for trial in found.outcome.trials if trial.candidate.weights == SOURCE)
    if own.failure:
        return f"{', '.join(changed)}, for as it is, it failed ({own.failure})"
    if found.gain <= 0.0:
        return f"{', '.join(changed)}, for steps of readers that come nearer to the target"
    return f"{', '.join(changed)}, first token {found.gain:.0%} sooner"
