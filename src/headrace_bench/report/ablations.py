"""The ablation table: what each switch is worth, a row each, and the figures that the cells were made of.

Rules: `on` stands before `off`; times in ms with 95 % intervals; `–` is too few samples; no switch is left out, also
one that could not be measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace_bench.ablation import Finding, Side
from headrace_bench.figures.schema import Value
from headrace_bench.report.machine import Machine
from headrace_bench.report.rows import BLANK, interval, number, share
from headrace_bench.report.table import Table, scrubbed

HEADS = (
    "switch", "figure", "on", "off", "on against off", "A/A floor", "verdict", "TTFT p50", "TTFT p95", "TTFT p99",
    "gap p99", "stalled", "in SLO", "pairs",
)  # fmt: skip


def row(found: Finding) -> dict[str, Any]:
    """A finding as plain data."""
    unit = 100.0 if found.exhibit.primary.figure == "in_time" else 1000.0
    effect = found.comparison

    def scaled(value: float | None) -> float | None:
        """A difference in the figure's unit; a ratio has none."""
        return value if value is None or effect.scale == "ratio" else value * unit

    return {
        "switch": found.exhibit.switch,
        "load": found.exhibit.load,
        "settings": dict(found.exhibit.settings),
        "figure": str(found.exhibit.primary),
        "unit": "%" if found.exhibit.primary.figure == "in_time" else "ms",
        "on": None if found.middle_on is None else found.middle_on * unit,
        "off": None if found.middle_off is None else found.middle_off * unit,
        "scale": effect.scale,
        "effect": scaled(effect.ratio),
        "low": scaled(effect.low),
        "high": scaled(effect.high),
        "p": effect.p,
        "floor": scaled(effect.floor),
        "verdict": found.verdict,
        "pairs": found.pairs,
        "dropped": list(found.dropped),
        "slo": found.slo,
        "sides": {name: _side(side) for name, side in (("on", found.on), ("off", found.off))},
        "took_s": round(found.took_s, 1),
    }


def _side(side: Side) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(side)
    return plain


def failed(switch: str, why: str) -> dict[str, Any]:
    """The row of a switch that could not be measured; `why` may be a program's words."""
    return {"switch": switch, "failed": scrubbed(why, 300)}


def table(
    rows: Sequence[Mapping[str, Any]], *, command: str, wall: str, machine: Machine, versions: Mapping[str, str]
) -> Table:
    """All rows, what each load is, and the figures behind."""
    loads = [
        f"`{one['switch']}`: {one['load']}"
        + "".join(f", with `{name}={value}`" for name, value in one["settings"].items())
        for one in rows
        if "failed" not in one
    ]
    return Table(
        verb="ablate",
        wall=wall,
        command=command,
        machine=machine,
        versions=dict(versions),
        columns=HEADS,
        rows=tuple(tuple(cells(one)) for one in rows),
        notes=("Cells with two sides: on / off.", *loads),
        figures={"switches": list(rows)},
    )


def cells(one: Mapping[str, Any]) -> list[str]:
    """A row's texts, in the order of `HEADS`."""
    if "failed" in one:
        return [f"`{one['switch']}`", f"not measured: {one['failed']}", *[BLANK] * (len(HEADS) - 2)]
    unit = one["unit"]
    on, off = one["sides"]["on"], one["sides"]["off"]
    return [
        f"`{one['switch']}`",
        f"{one['figure']}, {unit}",
        number(one["on"]),
        number(one["off"]),
        effect(one),
        _floor(one),
        f"**{one['verdict']}**",
        *(_both(on["ttft_ms"], off["ttft_ms"], name) for name in ("p50", "p95", "p99")),
        _both(on["gap_ms"], off["gap_ms"], "p99"),
        f"{share(_value(on['stalled']))} / {share(_value(off['stalled']))}",
        f"{share(_value(on['goodput']))} / {share(_value(off['goodput']))}",
        f"{one['pairs']}" + (f" (and {len(one['dropped'])} dropped)" if one["dropped"] else ""),
    ]


def effect(one: Mapping[str, Any]) -> str:
    """`×0.31 [0.28, 0.36]`, or `+41 % [38, 45]` where the figure is a share."""
    middle, low, high = one["effect"], one["low"], one["high"]
    if middle is None:
        return BLANK
    if one["scale"] == "ratio":
        return f"×{middle:.3g} [{low:.3g}, {high:.3g}]"
    return f"{middle:+.3g} points [{low:+.3g}, {high:+.3g}]"


def _floor(one: Mapping[str, Any]) -> str:
    level = one["floor"]
    if level is None:
        return BLANK
    return f"±{level * 100:.1f} %" if one["scale"] == "ratio" else f"±{level:.3g} points"


def _both(on: Mapping[str, Any], off: Mapping[str, Any], name: str) -> str:
    return f"{interval(_value(on.get(name)))} / {interval(_value(off.get(name)))}"


def _value(plain: Mapping[str, Any] | None) -> Value | None:
    return None if plain is None else msgspec.convert(plain, Value)
