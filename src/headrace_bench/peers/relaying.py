"""How gateways stand: rounds of blocks as rows of a table, and the bars. Nothing here acts.

    load | figure | direct | headrace | each other | headrace ÷ other | its rounds | bar |

Rules: `direct` shows what client and kernel take by themselves; a gateway's cell is its figure less that of `direct`,
within a round; a ratio is taken within a round; a cell is the median over rounds, of an even number the worse; a block
whose client was not in order is in no figure; the bars are those of the last load, and the shares of every load of
several streams; a gateway without a core left is named, for its times grow for as long as a block lasts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace_bench.bars import middle, number
from headrace_bench.report.table import scrubbed

DIRECT = "direct"
FULL = 0.9
"""Of a core: a gateway of one thread that uses more has none left."""
WAITED = 0.02
"""Of a block; more, and the machine was not quiet enough for a p99."""
TELLABLE_MS = 0.01
"""Less that is added is noise, and a ratio to it is nothing."""
ALONE = "one stream"
"""The load that has one."""
Round = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Load's name → server → figures of its block."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A row."""

    name: str
    path: tuple[str, ...]
    added: bool
    """`direct` has it too, and is taken off."""
    bar: float | None = None
    share: float | None = None
    """Of the other gateway's, at most."""


FIGURES = (
    Figure("added TTFT p50, ms", ("ttft", "p50"), True, 1.0, 0.25),
    Figure("added TTFT p95, ms", ("ttft", "p95"), True),
    Figure("added gap p50, ms", ("gap", "p50"), True),
    Figure("added gap p99, ms", ("gap", "p99"), True, 1.0, 0.25),
    Figure("CPU a chunk, µs", ("cpu_us",), False, 60.0),
    Figure("memory, MB", ("rss_mb",), False),
)


def value(round_: Round, load: str, server: str, figure: Figure) -> float | None:
    """In one round; None where it was not measured, or does not count."""
    own = _raw(round_, load, server, figure)
    if own is None or not figure.added or server == DIRECT:
        return own
    floor = _raw(round_, load, DIRECT, figure)
    return None if floor is None else own - floor


def _raw(round_: Round, load: str, server: str, figure: Figure) -> float | None:
    result: Any = round_.get(load, {}).get(server, {})
    if result.get("invalid"):
        return None
    for key in figure.path:
        result = result.get(key) if isinstance(result, Mapping) else None
    return float(result) if isinstance(result, int | float) else None


def ratios(rounds: Sequence[Round], load: str, figure: Figure, ours: str, other: str) -> list[float]:
    """Ours over the other's, of each round in which both count and the other adds more than a clock can tell."""
    pairs = [(value(r, load, ours, figure), value(r, load, other, figure)) for r in rounds]
    least = TELLABLE_MS if figure.added else 0.0
    return [a / b for a, b in pairs if a is not None and b is not None and b > least]


def verdict(rounds: Sequence[Round], load: str, figure: Figure, ours: str, others: Sequence[str]) -> str:
    """`met`, `MISSED`, `not measured`; the bar and the share together. Empty: there is neither."""
    met: list[bool] = []
    missing: list[str] = []
    if figure.bar is not None:
        own = middle([v for r in rounds if (v := value(r, load, ours, figure)) is not None], more=False)
        if own is None:
            return "not measured"
        met.append(own <= figure.bar)
    if figure.share is not None:
        for other in others:
            ratio = middle(ratios(rounds, load, figure, ours, other), more=False)
            if ratio is None:
                missing.append(other)
            else:
                met.append(ratio <= figure.share)
    if not all(met):
        return "MISSED"
    if missing:
        return f"{'met; ' if met else ''}against {', '.join(missing)} not measured"
    return "met" if met else ""


def columns(servers: Sequence[str], ours: str) -> tuple[str, ...]:
    """The table's head; `servers` with `direct` and ours."""
    others = [name for name in servers if name not in (DIRECT, ours)]
    compared = [cell for name in others for cell in (f"{ours} ÷ {name}", "rounds")]
    return ("load", "figure", *servers, *compared, "bar", "")


def rows(rounds: Sequence[Round], loads: Sequence[str], servers: Sequence[str], ours: str) -> list[tuple[str, ...]]:
    """A row a figure and load."""
    others = [name for name in servers if name not in (DIRECT, ours)]
    found = []
    for load in loads:
        for figure in FIGURES:
            cells = []
            for name in servers:
                values = [v for r in rounds if (v := value(r, load, name, figure)) is not None]
                cells.append(number(middle(values, more=False)))
            compared = []
            for other in others:
                each = ratios(rounds, load, figure, ours, other)
                spread = f"{number(min(each))}–{number(max(each))}" if each else "–"
                compared += [number(middle(each, more=False)), spread]
            asked = figure if load == loads[-1] else replace(figure, bar=None)
            judgement = ("", "")
            if ours in servers and (load != ALONE or load == loads[-1]):
                judgement = (bar(asked), verdict(rounds, load, asked, ours, others))
            found.append((load, figure.name, *cells, *compared, *judgement))
    return found


def bar(figure: Figure) -> str:
    """As it is read."""
    own = [] if figure.bar is None else [f"<= {figure.bar:g}"]
    share = [] if figure.share is None else [f"ratio <= {figure.share:g}"]
    return ", ".join([*own, *share])


def notes(rounds: Sequence[Round], floor: float = 1.0) -> list[str]:
    """What a reader has to know: what failed, what does not count, what this machine cannot tell."""
    lines = []
    for turn, round_ in enumerate(rounds, 1):
        for load, results in round_.items():
            for name, result in results.items():
                where = f"round {turn}: {load}: `{name}`"
                if "failed" in result and not isinstance(result["failed"], int):
                    lines.append(f"{where}: {scrubbed(result['failed'])}")
                    continue
                lines += [f"{where} does not count: {scrubbed(why)}" for why in result.get("invalid", ())]
                if result.get("cores") is not None and result["cores"] > FULL:
                    lines.append(f"{where} used {result['cores']:.2f} cores: it could not keep up")
                if (result.get("waited") or 0.0) > WAITED:
                    lines.append(f"{where} had no core for {result['waited']:.0%} of the block: others were using it")
                wrong = [f"{result[key]} {key}" for key in ("failed", "lost", "doubled", "foreign") if result.get(key)]
                if wrong:
                    lines.append(f"{where}: {', '.join(wrong)} (streams, tokens, tokens, characters)")
            own = results.get(DIRECT, {}).get("gap", {}).get("p99")
            if own is not None and own > floor:
                lines.append(
                    f"round {turn}: {load}: without a gateway the gap p99 was {own:.2f} ms late: "
                    f"the machine itself is above a bar of {floor:g} ms"
                )
    return lines
