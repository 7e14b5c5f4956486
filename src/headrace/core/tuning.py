"""Which way to run a model: what was measured of each becomes one choice, and the reason for it in words.

    steps of a prompt ─► Figures (of one round) ─► Trial (all rounds of a candidate) ─► choose() ─► Decision

Objective: the mean time to first token of a stated mixture of prompts, under the condition that a step of one reader
and of eight takes no longer than the target for gaps.

Rules: rounds go through all candidates in turn, so round i of one is compared with round i of another: what disturbs
the machine for a minute disturbs both. One is faster if its median says so by more than a margin and no round
contradicts; all else is a tie. A tie goes to what changes least: the user's own settings, then the user's own file,
then the smaller file. A candidate that loses precision is ranked and never chosen, unless that is allowed. Pure:
seconds come from outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

import msgspec

from headrace.core.costmodel import positions
from headrace.core.quantisation import SOURCE, Loss

MIXTURE = ((64, 0.5), (512, 0.35), (2048, 0.15))
"""Tokens of a prompt and its share: mostly questions, fewer pages, some documents."""

READERS = 8
"""Sequences of the wide decode step."""

MARGIN = 0.03
"""A difference of medians below this is none, however many the rounds."""

BUSY = 0.15
"""Figures of a machine on which threads wait longer than this share of the time (`Figures.waited`) say little."""

CLEARLY = 1.25
"""Who takes this many times as long as the best after one round is not measured again."""


class Candidate(msgspec.Struct, frozen=True):
    """A way to run the model."""

    weights: str
    """`quantisation.SOURCE`, or a name in `quantisation.TARGETS`."""
    threads: int
    flash_attention: bool
    step_tokens: int
    extra_buffers: bool = True
    """Weights may be laid out anew for kernels of this CPU (AMX, repacked)."""

    def __str__(self) -> str:
        flash = "" if self.flash_attention else ", no flash attention"
        plain = "" if self.extra_buffers else ", no extra buffers"
        return f"{self.weights}, {_plural(self.threads, 'thread')}, steps of {self.step_tokens}{flash}{plain}"

    def changes(self, other: Candidate) -> int:
        """In how many ways the two differ."""
        return sum(getattr(self, name) != getattr(other, name) for name in self.__struct_fields__)


class PromptStep(msgspec.Struct, frozen=True):
    """One step of a prompt: `count` tokens after the first `start`."""

    start: int
    count: int
    seconds: float


class Figures(msgspec.Struct, frozen=True):
    """What one round gave; seconds and bytes."""

    first_tokens: tuple[tuple[int, float], ...]
    """Tokens of a prompt → time to its first token."""
    one: float
    """A step of one reader."""
    many: float
    """A step of READERS readers."""
    memory: int
    """The most that the process held, the file's pages among it."""
    longest: int = 0
    """Tokens of the longest step of a prompt."""
    waited: float = 0.0
    """Share of the time in which a thread that had work got no core: 0 on a machine that does nothing else."""
    save: float = 0.0
    """To copy a block of KV out of the pool; 0: that cannot be done."""

    @property
    def ttft(self) -> float:
        """Of the mixture; lengths that the model cannot hold are left out of it."""
        known = dict(self.first_tokens)
        shares = [(known[tokens], share) for tokens, share in MIXTURE if tokens in known]
        return sum(seconds * share for seconds, share in shares) / sum(share for _, share in shares)

    def excess(self, itl: float) -> float:
        """By how much the slower of the two decode steps is beyond `itl`; at most 0: it is not."""
        return max(self.one, self.many) - itl


def prompt_seconds(steps: Sequence[PromptStep], tokens: int) -> float:
    """Time that a prompt of `tokens` takes, by the steps of one prompt. Seconds.

    A token costs b + e·position. Both are medians (Theil and Sen): what else the machine does in between lengthens some
    steps by far, and three in ten of them may be wrong before the line is.
    """
    # The last step may be a short one, and such have a price of their own.
    half = max(step.count for step in steps) / 2
    rates = [
        (positions(step.start, step.count) / step.count, step.seconds / step.count)
        for step in steps
        if step.count >= half
    ]
    slopes = [(y - v) / (x - u) for (u, v), (x, y) in combinations(rates, 2) if x != u]
    e = max(0.0, median(slopes)) if slopes else 0.0
    b = max(0.0, median(rate - e * middle for middle, rate in rates))
    return b * tokens + e * positions(0, tokens)


@dataclass(frozen=True, slots=True)
class Trial:
    """All that is known of a candidate. No figures: it failed, and `failure` says why."""

    candidate: Candidate
    size: int
    """Bytes of its file."""
    loss: Loss = Loss.NOTHING
    rounds: tuple[Figures, ...] = ()
    failure: str = ""

    @property
    def measured(self) -> bool:
        return bool(self.rounds) and not self.failure

    @property
    def ttft(self) -> float:
        """Median over the rounds."""
        return median(figures.ttft for figures in self.rounds)

    @property
    def interval(self) -> tuple[float, float]:
        """The lowest and the highest round of `ttft`: of few rounds there is no narrower one to be sure of."""
        values = [figures.ttft for figures in self.rounds]
        return min(values), max(values)

    def first_token(self, tokens: int) -> float | None:
        """Median for a prompt of that length; None if the model cannot hold it."""
        values = [dict(figures.first_tokens).get(tokens) for figures in self.rounds]
        return median(value for value in values if value is not None) if None not in values else None

    @property
    def one(self) -> float:
        return median(figures.one for figures in self.rounds)

    @property
    def many(self) -> float:
        return median(figures.many for figures in self.rounds)

    def excess(self, itl: float) -> float:
        return median(figures.excess(itl) for figures in self.rounds)


@dataclass(frozen=True, slots=True)
class Decision:
    """`chosen`, and why, a sentence each."""

    chosen: Trial
    reasons: tuple[str, ...]
    met: bool = True
    """The target for gaps."""
    tied: tuple[Trial, ...] = field(default=(), compare=False)
    """Those that are no slower than the fastest, as far as can be told."""


def waited(trials: Iterable[Trial]) -> float:
    """Median of `Figures.waited`; 0 without figures."""
    shares = [figures.waited for trial in trials for figures in trial.rounds]
    return median(shares) if shares else 0.0


def margin(rounds: int) -> float:
    """By how much the median must differ: the fewer the rounds, the likelier that they agree by chance."""
    return max(MARGIN, 0.15 / rounds)


def faster(a: Trial, b: Trial) -> bool:
    """Is `a` faster than `b`, beyond the margin and in every round that both took part in?"""
    pairs = [(x.ttft, y.ttft) for x, y in zip(a.rounds, b.rounds, strict=False)]
    return bool(pairs) and median(x / y for x, y in pairs) < 1.0 - margin(len(pairs)) and all(x < y for x, y in pairs)


STEPS = (64, 128, 256, 512, 1024)


def variants(base: Candidate, cores: int, longest: int, fixed: frozenset[str] = frozenset()) -> list[Candidate]:
    """`base` with one thing changed, for each change that can make a difference.

    `longest`: tokens of the longest step that `base` took: a limit above that changes nothing, unless it was the limit
    that made it so. `fixed`: fields of Candidate that are not to be varied.
    """
    found: list[Candidate] = []
    if "threads" not in fixed:
        counts = sorted({cores, cores - 1, cores // 2} - {0, base.threads}, reverse=True)
        found += [msgspec.structs.replace(base, threads=count) for count in counts]
    if "flash_attention" not in fixed:
        found.append(msgspec.structs.replace(base, flash_attention=not base.flash_attention))
    if "extra_buffers" not in fixed:
        found.append(msgspec.structs.replace(base, extra_buffers=not base.extra_buffers))
    if "step_tokens" not in fixed:
        limited = longest >= base.step_tokens
        steps = [step for step in STEPS if step < longest or (limited and step > base.step_tokens)]
        found += [msgspec.structs.replace(base, step_tokens=step) for step in steps]
    return found


def combined(base: Trial, others: Sequence[Trial], itl: float) -> Candidate | None:
    """`base` with every single change that made it faster; None if that was fewer than two."""
    changed: dict[str, tuple[float, object]] = {}
    for trial in others:
        # What breaks the target alone would break it in company.
        if not trial.measured or not faster(trial, base) or trial.excess(itl) > max(0.0, base.excess(itl)):
            continue
        names = [n for n in Candidate.__struct_fields__ if getattr(trial.candidate, n) != getattr(base.candidate, n)]
        if len(names) == 1 and trial.ttft < changed.get(names[0], (float("inf"), None))[0]:
            changed[names[0]] = trial.ttft, getattr(trial.candidate, names[0])
    if len(changed) < 2:
        return None
    return msgspec.structs.replace(base.candidate, **{name: value for name, (_, value) in changed.items()})


def survivors(trials: Sequence[Trial], own: Candidate, itl: float, *, allow_loss: bool) -> list[Trial]:
    """Those worth another round after the first: not clearly slower than the best that may be chosen.

    The user's own is kept whatever it gave: all others are compared with it.
    """
    running = [trial for trial in trials if trial.measured]
    allowed = [trial for trial in running if _allowed(trial, allow_loss)]
    within = [trial for trial in allowed if trial.excess(itl) <= 0.0] or allowed
    best = min((trial.rounds[-1].ttft for trial in within), default=0.0)
    return [trial for trial in running if trial.candidate == own or trial.rounds[-1].ttft <= CLEARLY * best]


def choose(trials: Iterable[Trial], own: Candidate, itl: float, *, allow_loss: bool = False) -> Decision | None:
    """The best of `trials`; None if there is none that may be chosen. `own`: what is used without a choice."""
    measured = [trial for trial in trials if trial.measured]
    allowed = [trial for trial in measured if _allowed(trial, allow_loss)]
    if not allowed:
        return None
    within = [trial for trial in allowed if trial.excess(itl) <= 0.0]
    if not within:
        near = _nearest(allowed, itl)
        best = _first(near, own)[0]
        why = (
            f"none keeps a step of one reader and of {READERS} within {_ms(itl)}: "
            f"{best.candidate} comes nearest, with {_ms(best.one)} and {_ms(best.many)}"
        )
        return Decision(best, (why,), met=False, tied=tuple(near))
    chosen, fastest, tied = _first(within, own)
    return Decision(chosen, tuple(_reasons(chosen, fastest, measured, own, itl)), tied=tied)


def _nearest(trials: Sequence[Trial], itl: float) -> list[Trial]:
    """Those whose slower decode step is no longer than the shortest of them, as far as can be told."""
    best = min(trials, key=lambda trial: trial.excess(itl))
    least = itl + best.excess(itl)
    return [trial for trial in trials if itl + trial.excess(itl) <= least * (1.0 + margin(len(trial.rounds)))]


def _first(within: Sequence[Trial], own: Candidate) -> tuple[Trial, Trial, tuple[Trial, ...]]:
    """The chosen one, the fastest, and those that tie with that."""
    most = max(len(trial.rounds) for trial in within)
    # Only those that went through all rounds: the others were clearly slower, or failed later.
    final = [trial for trial in within if len(trial.rounds) == most]
    fastest = min(final, key=lambda trial: trial.ttft)
    tied = tuple(trial for trial in final if trial is fastest or not faster(fastest, trial))
    return min(tied, key=lambda trial: _preference(trial, own)), fastest, tied


def _allowed(trial: Trial, allow_loss: bool) -> bool:
    return allow_loss or trial.loss is not Loss.AGAIN


def _preference(trial: Trial, own: Candidate) -> tuple[bool, bool, int, int, float]:
    """The least is taken."""
    candidate = trial.candidate
    return candidate != own, candidate.weights != SOURCE, trial.size, candidate.changes(own), trial.ttft


def _reasons(chosen: Trial, fastest: Trial, measured: Sequence[Trial], own: Candidate, itl: float) -> Iterable[str]:
    low, high = chosen.interval
    yield (
        f"{chosen.candidate}: {_ms(chosen.ttft)} to the first token over the mixture ({_ms(low)} to {_ms(high)}), with "
        f"steps of {_ms(chosen.one)} for one reader and {_ms(chosen.many)} for {READERS}: the target is {_ms(itl)}"
    )
    usual = next((trial for trial in measured if trial.candidate == own), None)
    if usual is not None and usual is not chosen:
        saved = 1.0 - median(a.ttft / b.ttft for a, b in zip(chosen.rounds, usual.rounds, strict=False))
        late = f", which misses the target ({_ms(usual.many)} for {READERS})" if usual.excess(itl) > 0.0 else ""
        yield f"that is {abs(saved):.0%} {'less' if saved >= 0.0 else 'more'} than what is used untuned{late}"
    if fastest is not chosen:
        yield (
            f"{fastest.candidate} may be faster ({_ms(fastest.ttft)}), but by no more than the noise: "
            "what changes less is taken"
        )


def passed_over(trials: Iterable[Trial], chosen: Trial, itl: float, *, allow_loss: bool) -> Iterable[str]:
    """Why a candidate that looks faster than the chosen one was not taken, a sentence each."""
    for trial in trials:
        if not trial.measured or trial.ttft >= (1.0 - MARGIN) * chosen.ttft:
            continue
        if not _allowed(trial, allow_loss):
            yield (
                f"{trial.candidate} may be faster ({_ms(trial.ttft)}), but loses precision: "
                "it is chosen only with --allow-loss"
            )
        elif trial.excess(itl) > 0.0:
            slow = max(trial.one, trial.many)
            yield f"{trial.candidate} may be faster ({_ms(trial.ttft)}), but its readers wait {_ms(slow)} for a step"


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.1f} ms" if ms < 100 else f"{ms:,.0f} ms"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
