"""`headrace tune MODEL`: measure, decide, write the profile; print what is tried, the table, and why."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.status import Status
from rich.table import Table

from headrace import tuned
from headrace.assembly import make_candidate, make_job, make_pace
from headrace.cli.output import console
from headrace.cli.pull import fetch
from headrace.config import cache_home, engine_environment
from headrace.core.errors import StartupError
from headrace.core.quantisation import SOURCE, TARGETS, Format, format_name
from headrace.core.tuning import MIXTURE, READERS, Candidate, Trial
from headrace.engines.machine import machine
from headrace.engines.quantiser import file_type, make_file
from headrace.engines.trial import Report, run_trial
from headrace.models import script_rate
from headrace.settings import Config
from headrace.tuner import Lengths, Outcome, Plan, Source, Tuner


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked for."""

    rounds: int = 3
    quick: bool = False
    formats: tuple[Format, ...] = tuple(TARGETS.values())
    allow_loss: bool = False
    keep: bool = False
    anyway: bool = False


def formats(only: str | None) -> tuple[Format, ...]:
    """`q8_0,f16` → formats; `source` adds none. Raises StartupError."""
    if only is None:
        return tuple(TARGETS.values())
    names = list(dict.fromkeys(name.strip().lower() for name in only.split(",")))
    for name in names:
        if name != SOURCE and name not in TARGETS:
            raise StartupError(
                f"--only {name}: should be some of {', '.join(TARGETS)}, or {SOURCE}, with commas between"
            )
    return tuple(TARGETS[name] for name in names if name != SOURCE)


def run(config: Config, wish: Wish, given: frozenset[str] = frozenset()) -> int:
    """The verb. `given`: the settings that the user has set, by name. Raises StartupError."""
    model = _file(config)
    folder = tuned.weights_folder(_spelled(tuned.profile_file(cache_home(), model)))
    known = tuned.describe(model)
    source = Source(model, known.digest, file_type(model))
    own, fixed = make_candidate(config, given)
    environ = engine_environment(config.engine.spin)
    cores = tuned.cores()
    itl = make_pace(config).itl
    plan = Plan(own, cores, itl, wish.rounds, wish.quick, wish.formats, fixed, wish.allow_loss, wish.keep, wish.anyway)
    out = console(sys.stdout)
    out.print(
        f"{model.name} is {format_name(source.number)}. Aim: the first token as soon as can be, with steps of one "
        f"reader and of {READERS} within {itl * 1e3:g} ms (slo.profile {config.slo.profile})."
    )

    def measure(candidate: Candidate, weights: Path, lengths: Lengths) -> Report:
        return run_trial(make_job(config, candidate, weights, lengths.long, lengths.idle), environ)

    def make(path: Path, target: Format) -> None:
        make_file(model, path, target.number, cores, environ)

    began = time.monotonic()
    with stoppable(), Live() as live:
        outcome = Tuner(source, folder, measure, make, live.tell).run(plan)
        file = tuned.profile_file(cache_home(), model)
        try:
            profile = make_profile(config, known, outcome, own, itl)
            tuned.replace_profile(file, profile, keep=wish.keep)
        except BaseException:
            if outcome.made:
                outcome.path.unlink(missing_ok=True)
            raise
    _print(profile)
    out.print(f"{_ending(profile)} Measured in {time.monotonic() - began:.0f} s, written to {file}")
    return 0


def show(config: Config) -> int:
    """`--show`: the table that was decided on. Raises StartupError."""
    model = _file(config)
    file = tuned.profile_file(cache_home(), model)
    profile = tuned.load_profile(file)
    if profile is None:
        raise StartupError(
            f"there is no tuned profile for {model} on this machine: run `headrace tune {config.model.path}`"
        )
    _print(profile)
    out = console(sys.stdout)
    who = "by the first start" if profile.by == tuned.SERVE else "by `headrace tune`"
    out.print(f"{_ending(profile)} Measured {who} on {profile.made}, with the targets of {profile.slo}; {file}")
    if why := tuned.unusable(profile, model, file):
        out.print(f"It is not used: {why}; {tuned.AGAIN}")
    return 0


def forget(config: Config) -> int:
    """`--forget`: as if it had never been run. Raises StartupError."""
    model = _file(config)
    file = tuned.profile_file(cache_home(), model)
    unread = ""
    try:
        tuned.load_profile(file)
    except StartupError as error:
        unread = error.message
    removed = tuned.forget(file)
    out = console(sys.stdout)
    for path in removed:
        out.print(f"removed {path}")
    if unread and len(removed) < 2 and any(tuned.weights_folder(file).glob("*.gguf")):
        out.print(
            f"{unread.removesuffix(f': {tuned.AGAIN}')}; what was made for it may be in {tuned.weights_folder(file)}"
        )
    if not removed:
        out.print(f"there is no tuned profile for {model} on this machine")
    return 0


class Live:
    """What is being tried, on stderr: on a terminal it moves, elsewhere each act leaves one line when it is over."""

    def __init__(self) -> None:
        self._err = console(sys.stderr)
        self._status = Status("", console=self._err)

    def __enter__(self) -> Live:
        if self._err.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._status.stop()

    def tell(self, what: str, over: bool) -> None:
        """See `tuner.Told`."""
        if over:
            self._err.print(f"  {what}")
        elif self._err.is_terminal:
            self._status.update(f"{what} …")


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM ends it like Ctrl-C, so that no half-made file is left."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _file(config: Config) -> Path:
    if script_rate(config.model.path) is not None:
        raise StartupError(f"{config.model.path}: a scripted model computes nothing, there is nothing to tune")
    return _spelled(fetch(config.model.path))


def _spelled(path: Path) -> Path:
    """A profile is JSON, which holds no other names. Raises StartupError."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise StartupError(f"{str(path)!a}: the path is not UTF-8, so no profile can name it: rename it") from None
    return path


def make_profile(
    config: Config, source: tuned.Bytes, outcome: Outcome, own: Candidate, itl: float, by: str = tuned.TUNE
) -> tuned.Profile:
    """What is kept of it. Raises StartupError if the chosen file cannot be read."""
    chosen = outcome.decision.chosen.candidate
    settings: dict[str, bool | int | float | str] = {}
    if chosen.threads != own.threads:
        settings |= {"engine.threads": chosen.threads, "engine.threads_batch": chosen.threads}
    if chosen.flash_attention != own.flash_attention:
        settings["engine.flash_attention"] = chosen.flash_attention
    if chosen.extra_buffers != own.extra_buffers:
        settings["engine.extra_buffers"] = chosen.extra_buffers
    if chosen.step_tokens != own.step_tokens:
        settings["engine.step_tokens"] = chosen.step_tokens
    return tuned.Profile(
        schema=tuned.SCHEMA,
        made=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        model=config.model.path,
        source=source,
        machine=machine(),
        cores=tuned.cores(),
        library=tuned.library(),
        slo=config.slo.profile,
        itl_ms=itl * 1e3,
        settings=settings,
        weights=chosen.weights,
        converted=None if chosen.weights == SOURCE else tuned.describe(outcome.path),
        reasons=outcome.decision.reasons,
        rows=tuple(_row(trial, trial.candidate == chosen) for trial in outcome.trials),
        by=by,
    )


def _row(trial: Trial, chosen: bool) -> tuned.Row:
    one = trial.candidate
    row = partial(
        tuned.Row,
        one.weights,
        one.threads,
        one.flash_attention,
        one.step_tokens,
        trial.size,
        trial.loss.value,
        len(trial.rounds),
        chosen=chosen,
        failure=trial.failure,
        extra_buffers=one.extra_buffers,
    )
    if not trial.measured:
        return row()
    low, high = trial.interval
    by_tokens = {str(n): seconds * 1e3 for n, _ in MIXTURE if (seconds := trial.first_token(n)) is not None}
    return row(
        ttft_ms=trial.ttft * 1e3,
        ttft_low_ms=low * 1e3,
        ttft_high_ms=high * 1e3,
        ttft_by_tokens_ms=by_tokens,
        one_ms=trial.one * 1e3,
        many_ms=trial.many * 1e3,
        memory_bytes=max(figures.memory for figures in trial.rounds),
        save_ms=min(figures.save for figures in trial.rounds) * 1e3,
    )


def _print(profile: tuned.Profile) -> None:
    out = console(sys.stdout)
    mixture = ", ".join(f"{share:.0%} of {tokens}" for tokens, share in MIXTURE)
    out.print(f"\nMilliseconds to the first token, mean over prompts of {mixture} tokens; of a decode step; MB.")
    out.print("Stages were measured one after the other: compare what shares weights or settings.")
    # What is not a terminal has no width to keep to.
    wide = not out.is_terminal or out.width >= WIDE
    console(sys.stdout, width=max(out.width, WIDE) if wide else None).print(table(profile, wide=wide))
    for row in profile.rows:
        if row.failure:
            out.print(f"- {row.weights}, {row.threads} threads, steps of {row.step_tokens} failed: {row.failure}")
    for reason in profile.reasons:
        out.print(f"- {reason}")


WIDE = 140
"""Columns of a terminal that show all of the table."""


def table(profile: tuned.Profile, *, wide: bool = True) -> Table:
    """A line a candidate, the chosen one marked, the fastest first, those that failed last."""
    lengths = [str(tokens) for tokens, _ in MIXTURE]
    left = ["", "weights", "threads", "flash", "extra", "step", "first token", *(["low–high (rounds)"] if wide else [])]
    right = [*lengths, "1 reads", f"{READERS} read", *(["file", "memory"] if wide else []), "loses"]
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1 if wide else 0, 0, 0))
    for name in (*left, *right):
        grid.add_column(name, justify="left" if name in ("", "weights", "loses") else "right", no_wrap=wide)
    for row in sorted(profile.rows, key=lambda row: (row.ttft_ms is None, row.ttft_ms or 0.0)):
        spread = f"{_ms(row.ttft_low_ms)}–{_ms(row.ttft_high_ms)} ({row.rounds})" if row.ttft_ms is not None else ""
        grid.add_row(
            "→" if row.chosen else "",
            row.weights,
            str(row.threads),
            "on" if row.flash_attention else "off",
            "on" if row.extra_buffers else "off",
            str(row.step_tokens),
            "failed" if row.failure else _ms(row.ttft_ms),
            *([spread] if wide else []),
            *(_ms(row.ttft_by_tokens_ms.get(tokens)) for tokens in lengths),
            _ms(row.one_ms),
            _ms(row.many_ms),
            *([_mb(row.size_bytes), _mb(row.memory_bytes)] if wide else []),
            row.loses,
        )
    return grid


def _mb(size: int | None) -> str:
    return f"{size / 1e6:,.0f}" if size else ""


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _ending(profile: tuned.Profile) -> str:
    changes = [f"{name}={tuned.shown(value)}" for name, value in profile.settings.items()]
    if profile.converted is not None:
        changes.insert(0, f"{profile.weights} weights")
    if not changes:
        return "`headrace serve` does best as it is: nothing changes."
    return f"`headrace serve {profile.model}` uses: {', '.join(changes)}."
