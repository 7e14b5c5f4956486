"""How the servers stand: the rounds of a load client's scenarios as rows of a table. Nothing here acts.

    scenario | figure | headrace | each peer | best peer | headrace ÷ best | its rounds [| headrace ÷ headrace-off]

Rules: a cell is the median over the rounds that the server finished, of an even number the worse of the two in the
middle; the best of a row is bold; a ratio is taken within a round against that round's best peer; a row that we lose
is a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_bench import bars
from headrace_bench.bars import Figure, Results, number
from headrace_bench.report.table import scrubbed

COLUMNS = ("scenario", "figure")
EVEN = 1.0
"""The bar of every row: as good as the best peer."""


def _figure(scenario: str, name: str, *path: str, more: bool = False) -> Figure:
    return Figure(scenario, name, path, EVEN, more)


FIGURES = (
    _figure("single", "TTFT p50, ms", "ttft", "p50"),
    _figure("single", "TTFT p95, ms", "ttft", "p95"),
    _figure("single", "gap p50, ms", "gap", "p50"),
    _figure("single", "gap p99, ms", "gap", "p99"),
    _figure("shared", "cold TTFT p95, ms", "cold", "p95"),
    _figure("shared", "warm TTFT p95, ms", "warm", "p95"),
    _figure("shared", "warm and alone, TTFT p50, ms", "warm_alone", "p50"),
    _figure("mixed", "readers' gap p99, ms", "reader_gap", "p99"),
    _figure("mixed", "readers' longest gap, ms", "reader_gap", "max"),
    _figure("mixed", "long prompt's TTFT, ms", "long_ttft"),
    _figure("long_alone", "the same prompt's TTFT alone, ms", "long_ttft"),
    _figure("behind", "short prompts' TTFT p95, ms", "short_ttft", "p95"),
    _figure("behind", "long prompt's TTFT, ms", "long_ttft"),
    _figure("full", "chunks per second", "chunks_per_s", more=True),
    _figure("full", "TTFT p50, ms", "ttft", "p50"),
    _figure("full", "TTFT p95, ms", "ttft", "p95"),
    _figure("full", "gap p99, ms", "gap", "p99"),
    _figure("full", "longest gap, ms", "gap", "max"),
    _figure("leave", "TTFT alone, ms", "ttft_alone"),
    _figure("leave", "TTFT after a hang-up, ms", "ttft_after_hang_up"),
)


def columns(servers: Sequence[str], ours: str) -> tuple[str, ...]:
    """The table's head."""
    found = (*COLUMNS, *servers, "best peer", f"{ours} ÷ best", "rounds")
    return (*found, f"{ours} ÷ {off(ours)}") if off(ours) in servers else found


def off(ours: str) -> str:
    """The name of ours with everything off."""
    return f"{ours}-off"


def rows(
    rounds: Sequence[Results], servers: Sequence[str], ours: str, scenarios: Sequence[str]
) -> list[tuple[str, ...]]:
    """A row a figure of the scenarios that were asked for."""
    found = []
    for figure in FIGURES:
        if figure.scenario not in scenarios:
            continue
        row = bars.judge(rounds, figure, ours)
        values = {name: row.values.get(name) for name in servers}
        there = [value for value in values.values() if value is not None]
        top = (max if figure.more else min)(there) if there else None
        cells = [
            f"**{number(value)}**" if value is not None and value == top else number(value) for value in values.values()
        ]
        line = (figure.scenario, figure.name, *cells, row.best or "–", number(row.ratio), spread(row.rounds))
        found.append((*line, number(_worth(rounds, figure, ours))) if off(ours) in servers else line)
    return found


def _worth(rounds: Sequence[Results], figure: Figure, ours: str) -> float | None:
    """What everything is worth: on over off, taken within a round."""
    both = [{ours: r[ours], "off": r[off(ours)]} for r in rounds if ours in r and off(ours) in r]
    return bars.judge(both, figure, ours).ratio


def spread(ratios: Sequence[float]) -> str:
    """The lowest and the highest of the rounds' ratios; `–` of none."""
    return f"{number(min(ratios))}–{number(max(ratios))}" if ratios else "–"


def figures(rounds: Sequence[Results]) -> list[dict[str, dict[str, Any]]]:
    """The rounds as they go into a file: what is no JSON number is None."""
    return [{name: dict(_finite(result)) for name, result in round_.items()} for round_ in rounds]


def _finite(result: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            kept[key] = _finite(value)
        else:
            kept[key] = None if isinstance(value, float) and not math.isfinite(value) else value
    return kept


def failures(rounds: Sequence[Results], scenarios: Sequence[str]) -> list[str]:
    """What did not go as it should, a line each."""
    lines = []
    for turn, round_ in enumerate(rounds, 1):
        for name, result in round_.items():
            if "failed" in result:
                lines.append(f"round {turn}: `{name}`: {scrubbed(result['failed'])}")
            for scenario in scenarios:
                failed = result.get(scenario, {}).get("failed")
                if failed:
                    what = f"{failed} requests failed" if isinstance(failed, int) else scrubbed(failed)
                    lines.append(f"round {turn}: `{name}`: {scenario}: {what}")
    return lines
