"""A table of figures with bars, one a row: what a verb that measures a bar of ours leaves behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_bench.bars import number

COLUMNS = ("figure", "measured", "bar", "")


@dataclass(frozen=True, slots=True)
class Line:
    """A row; without a bar it is only told."""

    name: str
    key: str
    """Of the figures."""
    sign: str = ""
    bar: float | None = None
    unit: float = 1.0
    """What a figure is divided by before it is shown and judged."""


def value(line: Line, figures: Mapping[str, Any]) -> float | None:
    """As it is shown; None where it was not measured."""
    found = figures.get(line.key)
    return found / line.unit if isinstance(found, int | float) else None


def verdict(line: Line, figures: Mapping[str, Any]) -> str:
    """`met`, `MISSED`, `not measured`; empty without a bar."""
    if line.bar is None:
        return ""
    found = value(line, figures)
    if found is None:
        return "not measured"
    met = {"<=": found <= line.bar, ">=": found >= line.bar}[line.sign]
    return "met" if met else "MISSED"


def rows(lines: Sequence[Line], figures: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """All lines but those that have neither a figure nor a bar."""
    return tuple(
        (
            line.name,
            number(value(line, figures)),
            "" if line.bar is None else f"{line.sign} {line.bar:g}",
            verdict(line, figures),
        )
        for line in lines
        if line.bar is not None or value(line, figures) is not None
    )
