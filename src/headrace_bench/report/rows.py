"""A summary as rows: one list of figures for the terminal, the page and the CSV file, each with what it means.

Rules: milliseconds; `–` is "not known" and "too few samples", never 0; a value stands with its 95 % interval, and an
end of it that the samples cannot give is left open: `198 [184–]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace_bench.figures.paired import Comparison
from headrace_bench.figures.schema import Figures, Spread, Summary, Value

BLANK = "–"
PERCENTILES = ("p50", "p90", "p95", "p99")

FIGURES: tuple[tuple[str, str, str, str], ...] = (
    ("ttft_ms", "TTFT", "ms",
     "First token − scheduled; in a closed loop, − dispatched. A role or an empty chunk is no token."),
    ("ttft_service_ms", "TTFT from sent", "ms", "First token − the request's last byte: what the server owes."),
    ("ttfo_ms", "first output", "ms", "First token that is no reasoning − scheduled time."),
    ("tpot_ms", "TPOT", "ms", "(last − first token) / (tokens − the first chunk's). None where all came at once."),
    ("gap_ms", "gap", "ms", "Each gap between two chunks with tokens, raw, of all requests."),
    ("longest_gap_ms", "longest gap", "ms", "Of each request."),
    ("tail_ms", "gap tail", "ms", "Mean of a request's longest 10 % of gaps."),
    ("itl_est_ms", "ITL (derived)", "ms", "Gaps split over the tokens of their chunks: an estimate."),
    ("stalls", "stalls", "", "Gaps of a request over the threshold and over 3 times its median."),
    ("stalled_ms", "stalled", "ms", "Their total time, of each request."),
    ("e2e_ms", "end to end", "ms", "Last token − scheduled time."),
    ("e2e_closed_ms", "end to end, closed", "ms", "Stream closed − scheduled time: usage and [DONE] included."),
    ("norm_latency_ms", "end to end / token", "ms", "End to end over completion tokens."),
    ("fluidity", "fluidity", "", "Share of token deadlines kept (Etalon's index): 1 is perfect."),
    ("qoe", "QoE", "", "1 − delay seen by a reader / whole (Andes): 1 is perfect."),
)  # fmt: skip
"""Field of `schema.Figures`, label, unit, definition."""
GLANCE = ("ttft_ms", "ttft_service_ms", "tpot_ms", "gap_ms", "longest_gap_ms", "e2e_ms", "fluidity")
"""Those that a terminal shows."""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure and how it is spread."""

    name: str
    label: str
    unit: str
    definition: str
    spread: Spread

    def cells(self) -> list[str]:
        """Count, p50, p90, p95, p99 with intervals, max."""
        spread = self.spread
        return [f"{spread.count:,}", *(interval(getattr(spread, p)) for p in PERCENTILES), number(spread.max)]


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of two sides. `a` and `b`: its middle over the runs of a side."""

    label: str
    unit: str
    a: float | None
    b: float | None
    comparison: Comparison

    def effect(self) -> str:
        """`+7.0 % [+3.1 %, +11.2 %]`, or in the figure's unit where it has no ratio."""
        found = self.comparison
        if found.ratio is None:
            return BLANK
        ends = (found.ratio, found.low, found.high)
        if found.scale == "ratio":
            shown = [BLANK if end is None else f"{(end - 1) * 100:+.1f} %" for end in ends]
        else:
            shown = [BLANK if end is None else f"{end:+.4g}" for end in ends]
        return f"{shown[0]} [{shown[1]}, {shown[2]}]"

    def floor(self) -> str:
        found = self.comparison
        if found.floor is None:
            return BLANK
        return f"±{found.floor * 100:.1f} %" if found.scale == "ratio" else f"±{found.floor:.4g}"


def rows(figures: Figures, names: Sequence[str] | None = None) -> list[Row]:
    """Those that any request has; all of them by default."""
    wanted = [entry for entry in FIGURES if names is None or entry[0] in names]
    found = [Row(*entry, getattr(figures, entry[0])) for entry in wanted]
    return [row for row in found if row.spread.count]


def parts(summary: Summary) -> list[Row]:
    """TTFT by side, then the server's own stages; empty where no server tells."""
    if summary.split is None:
        return []
    sides = (
        ("client", "Scheduled to sent: lag, connection, sending.", summary.split.client_ms),
        ("network", "What is left: both ways, and reading.", summary.split.network_ms),
        ("server", "By the server's own clock.", summary.split.server_ms),
    )
    stages = [Row(name, f"server: {name}", "ms", "", spread) for name, spread in summary.stages.items()]
    return [*(Row(name, name, "ms", text, spread) for name, text, spread in sides), *stages]


def table(summary: Summary) -> list[dict[str, Any]]:
    """Lines of summary.csv: all figures, then stages. None: blank."""
    every = [Row(*entry, getattr(summary.figures, entry[0])) for entry in FIGURES]
    out = []
    for row in [*every, *parts(summary)]:
        line: dict[str, Any] = {"figure": row.name, "unit": row.unit, "count": row.spread.count}
        for name in ("mean", *PERCENTILES):
            value: Value | None = getattr(row.spread, name)
            line |= {
                name: value and value.value,
                f"{name}_low": value and value.low,
                f"{name}_high": value and value.high,
            }
        out.append({**line, "max": row.spread.max})
    return out


def number(value: float | None) -> str:
    """Three digits or more: 0.42, 9.87, 98.7, 1,234; whole numbers stay whole."""
    if value is None:
        return BLANK
    size = abs(value)
    if size >= 99.95 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}" if size >= 0.0995 else f"{value:.3g}"


def interval(value: Value | None) -> str:
    """`198 [184–210]`, `198 [184–]` without an upper end; without brackets where it has no interval at all."""
    if value is None:
        return BLANK
    if value.low is None and value.high is None:
        return number(value.value)
    low, high = ("" if end is None else number(end) for end in (value.low, value.high))
    return f"{number(value.value)} [{low}–{high}]"


def share(value: Value | None) -> str:
    """`97.2 % [95.0 %, 98.4 %]`."""
    if value is None:
        return BLANK
    low, high = (BLANK if end is None else f"{end * 100:.1f} %" for end in (value.low, value.high))
    return f"{value.value * 100:.1f} % [{low}, {high}]"


def failures(summary: Summary) -> str:
    """`http 5 (503: 5), timeout 2`; empty where nothing failed."""
    statuses = ", ".join(f"{status}: {count}" for status, count in summary.counts.by_status.items())
    return ", ".join(
        f"{name} {count}" + (f" ({statuses})" if name == "http" and statuses else "")
        for name, count in summary.counts.by_outcome.items()
    )
