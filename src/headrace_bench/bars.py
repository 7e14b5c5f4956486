"""The bars of a busy server: which figure of which scenario, against whom, and whether it is met. Nothing here acts.

Rules: a ratio is taken within a round, against that round's best peer for that figure; the figure is the median over
rounds, of an even number the worse of the two in the middle. A scenario that failed for us counts as the worst there
is; one that failed for a peer leaves that peer out of that round. The bars are against llama.cpp's servers that serve
many at once (JUDGED): one that takes a request at a time has the shortest gaps there can be, whoever waits. A server
whose name begins with ours and a dash is ours too, started in another way, and no peer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Mapping[str, Any]]
"""Of one round: server → what the load client printed."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table."""

    scenario: str
    name: str
    path: tuple[str, ...]
    """Where it stands in the scenario's result; of two for `over`, see there."""
    bar: float
    more: bool = False
    """More is better."""
    over: tuple[str, ...] = ()
    """The figure is `path` over this one, a scenario and where it stands there, of the same server and the same round,
    and stands alone: no peer in it."""
    absolute: bool = False
    """The figure itself is held to the bar, not its ratio to a peer's."""

    @property
    def alone(self) -> bool:
        """No peer is in it."""
        return self.absolute or bool(self.over)

    @property
    def scenarios(self) -> set[str]:
        """All that it is made of."""
        return {self.scenario, *self.over[:1]}

    @property
    def sign(self) -> str:
        """How the bar is read."""
        return ">=" if self.more else "<="

    @property
    def worst(self) -> float:
        """The ratio of a scenario that failed."""
        return 0.0 if self.more else math.inf

    def value(self, result: Mapping[str, Any]) -> float | None:
        """The figure in one result; None where there is none."""
        top = _at(result, (self.scenario, *self.path))
        if not self.over:
            return top
        bottom = _at(result, self.over)
        return None if top is None or not bottom else top / bottom


def _at(result: Any, path: Sequence[str]) -> float | None:
    for key in path:
        result = result.get(key) if isinstance(result, Mapping) else None
    return float(result) if isinstance(result, int | float) else None


ITL_HARD_MS, STALL_MS = 130.0, 580.0
"""What Headrace's profile `chat` sets: the length of a step while somebody reads, and of one for a crowd."""
OVERRUN = 1.15
"""A step may take so much longer than it was to."""

FIGURES = (
    Figure("mixed", "readers' longest gap, ms: itself", ("reader_gap", "max"), ITL_HARD_MS * OVERRUN, absolute=True),
    Figure("mixed", "readers' longest gap, ms", ("reader_gap", "max"), 0.5),
    Figure("mixed", "long prompt's TTFT, ms", ("long_ttft",), 1.6),
    Figure("mixed", "long prompt's TTFT ÷ alone", ("long_ttft",), 2.2, over=("long_alone", "long_ttft")),
    Figure("behind", "short prompts' TTFT p95, ms", ("short_ttft", "p95"), 0.12),
    Figure("shared", "cold p95, ms", ("cold", "p95"), 0.3),
    Figure("shared", "warm p95, ms", ("warm", "p95"), 0.75),
    Figure("shared", "warm and alone, TTFT p50, ms", ("warm_alone", "p50"), 0.6),
    Figure("shared", "warm and alone ÷ single", ("warm_alone", "p50"), 2.2, over=("single", "ttft", "p50")),
    Figure("single", "TTFT p50, ms", ("ttft", "p50"), 1.0),
    Figure("full", "chunks per second", ("chunks_per_s",), 1.05, more=True),
    Figure("full", "TTFT p95, ms", ("ttft", "p95"), 0.7),
    Figure("full", "gap p99, ms: itself", ("gap", "p99"), STALL_MS, absolute=True),
    Figure("full", "longest gap, ms: itself", ("gap", "max"), STALL_MS * OVERRUN, absolute=True),
    Figure("leave", "TTFT after hang-up ÷ alone", ("ttft_after_hang_up",), 1.2, over=("leave", "ttft_alone")),
)
SCENARIOS = ("single", "shared", "mixed", "long_alone", "behind", "full", "leave")
JUDGED = ("llama-server", "llama-server-tuned", "server.py")
"""The peers against whom the bars are."""


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a figure."""

    figure: Figure
    values: Mapping[str, float | None]
    """Server → median over the rounds that it finished; ours under its own name."""
    best: str | None
    """The peer that was best in most rounds."""
    ratio: float | None
    """None where there was nothing to compare with."""
    rounds: Sequence[float]
    """The ratio of each round."""

    @property
    def verdict(self) -> str:
        """`met`, `MISSED`, or `not measured`."""
        if self.ratio is None:
            return "not measured"
        met = self.ratio >= self.figure.bar if self.figure.more else self.ratio <= self.figure.bar
        return "met" if met else "MISSED"


def best(round_: Results, figure: Figure, ours: str) -> tuple[str, float] | None:
    """The peer whose figure is best in a round, and that figure."""
    found = [
        (name, value)
        for name, r in round_.items()
        if name != ours and not name.startswith(f"{ours}-") and (value := figure.value(r)) is not None
    ]
    if not found:
        return None
    return (max if figure.more else min)(found, key=lambda pair: pair[1])


def ratio(round_: Results, figure: Figure, ours: str) -> float | None:
    """Ours over the best peer's, or ours itself where no peer is in it. None: nobody to compare with."""
    top = best(round_, figure, ours)
    if ours not in round_ or (top is None and not figure.alone):
        return None
    value = figure.value(round_[ours])
    if value is None:
        return figure.worst
    if figure.alone:
        return value
    assert top is not None
    return value / top[1] if top[1] else figure.worst


def middle(values: Sequence[float], more: bool) -> float | None:
    """The median; of an even number, the worse of the two."""
    ordered = sorted(values, reverse=more)
    return ordered[len(ordered) // 2] if ordered else None


def judge(rounds: Sequence[Results], figure: Figure, ours: str) -> Row:
    """A figure over all rounds."""
    names = list(dict.fromkeys(name for round_ in rounds for name in round_))
    values = {
        name: middle(
            [v for round_ in rounds if name in round_ and (v := figure.value(round_[name])) is not None], figure.more
        )
        for name in names
    }
    ratios = [r for round_ in rounds if (r := ratio(round_, figure, ours)) is not None]
    winners = [top[0] for round_ in rounds if (top := best(round_, figure, ours)) is not None]
    winner = max(dict.fromkeys(winners), key=winners.count) if winners else None
    return Row(figure, values, winner, middle(ratios, figure.more), ratios)


def judged(rounds: Sequence[Results], ours: str) -> list[Results]:
    """The rounds with ours and the peers that the bars are against, and nobody else."""
    return [{name: r for name, r in round_.items() if name == ours or name in JUDGED} for round_ in rounds]


def cells(
    rounds: Sequence[Results], ours: str, scenarios: Sequence[str] = SCENARIOS
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The table's head, and a line for each figure whose scenarios were asked for."""
    rows = [judge(rounds, figure, ours) for figure in FIGURES if figure.scenarios <= set(scenarios)]
    names = list(dict.fromkeys([ours, *(name for row in rows for name in row.values)]))
    head = ("scenario", "figure", *names, "best peer", "ratio", "rounds", "bar", "")
    lines = []
    for row in rows:
        figures = [number(row.values.get(name)) for name in names]
        bar = f"{row.figure.sign} {row.figure.bar:g}"
        best_peer = "–" if row.figure.alone else row.best or "–"
        shown = number(row.ratio)
        spread = " ".join(map(number, row.rounds)) or "–"
        lines.append((row.figure.scenario, row.figure.name, *figures, best_peer, shown, spread, bar, row.verdict))
    return head, lines


def table(rounds: Sequence[Results], ours: str, scenarios: Sequence[str] = SCENARIOS) -> str:
    """Markdown, a line a figure."""
    head, lines = cells(rounds, ours, scenarios)
    return "\n".join(map(_line, (head, ["---"] * len(head), *lines)))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None) -> str:
    """Three digits, or as many as stand before the point; `–` for nothing, `failed` for what never came."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "failed"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
