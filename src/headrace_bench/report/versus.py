"""A comparison, told: comparison.json, a table, plots of A over B.

Rules: JSON has milliseconds and per cent where its names say so, and null for what is not known; each run of the
comparison is in it, those of dropped pairs by their reasons; a claim is one sentence, the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from headrace_bench.figures.claim import Claim, Merged, Row
from headrace_bench.figures.paired import Comparison
from headrace_bench.figures.trial import SHOWN, Both, Figure, Trial
from headrace_bench.report.folder import save
from headrace_bench.report.rows import Compared, number

SCHEMA = 1
SUFFIX = {"ms": "_ms", "/s": "", "%": "_percent"}
NAME = "comparison.json"


def compared(claim: Claim) -> list[Compared]:
    """Rows for a terminal and a page, the primary figure marked."""
    return [
        Compared(
            row.figure.name + (" (primary)" if row.figure.name == claim.primary else ""),
            row.figure.unit,
            _shown(row.a, row.figure),
            _shown(row.b, row.figure),
            _scaled(row),
        )
        for row in claim.rows
    ]


def valued(trial: Trial, figure: Figure) -> str:
    """`198 ms`."""
    return f"{number(_shown(trial.figures[figure.name], figure))} {figure.unit}"


def merged(one: Merged) -> str:
    """A line: `ttft_p99 of all requests together: 812 ms and 640 ms, ratio 0.79 [0.70, 0.91]`."""
    if one.a is None or one.b is None:
        return f"{one.figure} of all requests together: too few to tell"
    ends = "" if one.low is None else f" [{number(one.low)}, {number(one.high)}]"
    ratio = "" if one.ratio is None else f", ratio {number(one.ratio)}{ends}"
    return f"{one.figure} of all requests together: {number(one.a * 1e3)} ms and {number(one.b * 1e3)} ms{ratio}"


def document(
    a: str,
    b: str,
    claim: Claim,
    pairs: Sequence[Both],
    floor: Sequence[Both],
    dropped: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole of comparison.json. `about`: how it was asked for."""
    return {
        "schema": SCHEMA,
        "a": a,
        "b": b,
        "sentence": claim.sentence,
        "claimed": claim.claimed,
        "primary": claim.primary,
        "notes": list(notes),
        **about,
        "figures": {row.figure.name + SUFFIX[row.figure.unit]: _row(row) for row in claim.rows},
        "merged": {f"{one.figure}_ms": _merged(one) for one in claim.merged},
        "pairs": [[_trial(one, claim) for one in both] for both in pairs],
        "floor": [[_trial(one, claim) for one in both] for both in floor],
        "dropped": list(dropped),
    }


def write(folder: Path, told: Mapping[str, Any]) -> None:
    """comparison.json into `folder`."""
    save(folder / NAME, msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")


def _row(row: Row) -> dict[str, Any]:
    found = _scaled(row)
    return {
        "a": _shown(row.a, row.figure),
        "b": _shown(row.b, row.figure),
        "scale": found.scale,
        "effect": found.ratio,
        "low": found.low,
        "high": found.high,
        "p": found.p,
        "floor": found.floor,
        "pairs": found.pairs,
        "verdict": found.verdict,
    }


def _merged(one: Merged) -> dict[str, float | None]:
    a, b = (None if value is None else value * 1e3 for value in (one.a, one.b))
    return {"a": a, "b": b, "ratio": one.ratio, "low": one.low, "high": one.high}


def _trial(trial: Trial, claim: Claim) -> dict[str, Any]:
    kinds = {row.figure.name: row.figure for row in claim.rows}
    return {
        "side": trial.side,
        "pair": trial.place.pair + 1,
        "place": trial.place.nth + 1,
        "seed": trial.seed,
        "scheduled": trial.scheduled,
        "outcomes": dict(trial.outcomes),
        "figures": {
            name + SUFFIX[kinds[name].unit]: _shown(value, kinds[name])
            for name, value in trial.figures.items()
            if name in kinds
        },
    }


def _shown(value: float | None, figure: Figure) -> float | None:
    return None if value is None else value * SHOWN[figure.unit]


def _scaled(row: Row) -> Comparison:
    """A difference in the unit that is shown; a ratio has none."""
    found = row.found
    if found.scale == "ratio":
        return found
    effect, low, high, floor = (_shown(x, row.figure) for x in (found.ratio, found.low, found.high, found.floor))
    return replace(found, ratio=effect, low=low, high=high, floor=floor)
