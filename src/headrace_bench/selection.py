"""The selection table: what each model costs and how well it predicts, a line each. Nothing here acts.

Rules: a time is the median over rounds with its 95 % interval by order statistics, so without one below 6 samples; TPOT
is a mean with the standard deviation over answers; what could not be measured is `–`, never 0; a model that could not
be read is a note, and no row.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace_bench.figures.stats import estimate

PROMPTS = (64, 512, 2048)
"""Tokens, as the server counts them, template included."""
NEAR = 0.05
"""A prompt that misses its length by more than this share is not counted as one of it."""
COLUMNS = (
    "model",
    "parameters",
    "quantisation",
    "file, MB",
    "prefill, tok/s",
    *(f"TTFT at {n:,}, ms" for n in PROMPTS),
    "TPOT mean ± sd, ms",
    "perplexity",
    "bits/byte",
)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What `headrace_bench.gguf` prints of a file."""

    quantisation: str
    parameters: int
    size: int
    """Bytes."""
    context: int
    vocabulary: int
    architecture: str | None = None
    perplexity: float | None = None
    bits_per_byte: float | None = None
    scored_tokens: int | None = None
    scored_bytes: int | None = None
    prefill: tuple[float, ...] = ()
    """Tokens per second."""


class Fit(msgspec.Struct, frozen=True):
    """How many words make a prompt of so many tokens: tokens = base + slope · words."""

    base: float
    slope: float

    def words(self, tokens: int) -> int:
        """At least one."""
        return max(1, round((tokens - self.base) / self.slope))


def fit(few: tuple[int, int], many: tuple[int, int]) -> Fit:
    """From two prompts, each (words, tokens). ValueError: more words were no more tokens."""
    slope = (many[1] - few[1]) / (many[0] - few[0])
    if slope <= 0:
        raise ValueError(f"{many[0]} words are {many[1]} tokens, {few[0]} words {few[1]}")
    return Fit(few[1] - slope * few[0], slope)


class Measured(msgspec.Struct):
    """One model's samples, as they come in; seconds."""

    name: str
    facts: Facts | None = None
    ttft: dict[int, list[float]] = {}
    """Length asked for → TTFT of each."""
    tpot: list[float] = []
    """Of each answer."""
    prefill: list[float] = []
    notes: list[str] = []

    def took(self, asked: int, tokens: int | None, ttft: float) -> bool:
        """Books a TTFT; False if the prompt was not of the length that was asked for."""
        if tokens is None or abs(tokens - asked) > NEAR * asked:
            return False
        self.ttft.setdefault(asked, []).append(ttft)
        return True


def rows(models: Sequence[Measured]) -> list[tuple[str, ...]]:
    """A row a model that could be read, in the order given."""
    return [_row(model, model.facts) for model in models if model.facts is not None]


def _row(model: Measured, facts: Facts) -> tuple[str, ...]:
    return (
        model.name,
        parameters(facts.parameters),
        facts.quantisation,
        f"{facts.size / 1e6:,.0f}",
        middle(model.prefill, 1.0),
        *(middle(model.ttft.get(n, []), 1e3) for n in PROMPTS),
        spread([value * 1e3 for value in model.tpot]),
        "–" if facts.perplexity is None else f"{facts.perplexity:.2f}",
        "–" if facts.bits_per_byte is None else f"{facts.bits_per_byte:.4f}",
    )


def parameters(n: int) -> str:
    """`135 M`, `1.7 B`."""
    return f"{n / 1e9:.1f} B" if n >= 1e9 else f"{n / 1e6:.0f} M"


def middle(values: Sequence[float], times: float) -> str:
    """The median, times `times`, and its interval: `146 (139–160)`; an end that few samples cannot give is `?`."""
    found = estimate(sorted(values), 50)
    if found is None:
        return "–"
    low, high = ("?" if end is None else figure(end * times) for end in (found.low, found.high))
    return f"{figure(found.value * times)} ({low}–{high})"


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation; the latter from two values on."""
    if not values:
        return "–"
    mean = statistics.fmean(values)
    return f"{mean:.2f} ± {statistics.stdev(values):.2f}" if len(values) > 1 else f"{mean:.2f}"


def figure(value: float) -> str:
    """Three digits, or as many as stand before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def notes(models: Sequence[Measured], window: int, step: int, start: int) -> list[str]:
    """How perplexity was taken, and whatever went wrong, a line each."""
    scored = next((m.facts for m in models if m.facts is not None and m.facts.scored_bytes is not None), None)
    lines = []
    if scored is not None:
        lines.append(
            f"Perplexity is of a fixed English text, its bytes from {start:,} on ({scored.scored_bytes:,} bytes, "
            f"{scored.scored_tokens:,} tokens for {_first(models)}): a window of {window} tokens moves by {step}, and "
            "its second half is scored. It is a figure per token: across vocabularies compare bits per byte."
        )
    lines.append(
        "TTFT and TPOT are over HTTP, from `headrace serve`, one request at a time, every prompt new; prefill is a "
        "bare `llama_decode` of 512 tokens. In brackets the 95 % interval of the median."
    )
    vocabularies = {m.facts.vocabulary for m in models if m.facts is not None}
    if len(vocabularies) > 1:
        sizes = ", ".join(f"{size:,}" for size in sorted(vocabularies))
        lines.append(
            f"These models have different vocabularies ({sizes} tokens): a token is not the same thing in all rows."
        )
    return lines + [f"{model.name}: {note}" for model in models for note in model.notes]


def _first(models: Sequence[Measured]) -> str:
    return next(m.name for m in models if m.facts is not None)


def figures(models: Sequence[Measured]) -> dict[str, Any]:
    """All samples, for the file."""
    return {model.name: msgspec.to_builtins(model, str_keys=True) for model in models}


def fits(size: int, free: int | None) -> str | None:
    """Why a file of `size` bytes is too large for `free` bytes of memory; None: it is not, or nobody knows."""
    if free is None or size <= free:
        return None
    return f"its {size / 1e9:.1f} GB do not fit into the {free / 1e9:.1f} GB of memory that are free"
