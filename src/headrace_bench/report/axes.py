"""Axes and what is put on them: times on logarithmic axes, seconds of a load, percentiles, stacked parts.

Rules: an axis says its unit at its ticks or in its name; one without samples says so in its middle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from headrace_bench.figures.stats import percentile
from headrace_bench.report import palette
from headrace_bench.report.palette import FAINT


def mark_percentiles(
    axes: Axes, wanted: Sequence[float], values: Sequence[float], colour: str, *, right: Sequence[float]
) -> None:
    """Percentiles as dots; those in `right` have their text below to the right, where two would cover each other."""
    for p in wanted:
        at = max(percentile(values, p) or 0.0, 1e-3)
        axes.plot([at], [p / 100], marker="o", markersize=4.5, color=colour)
        place, ha = ((7, -10), "left") if p in right else ((-7, 3), "right")
        axes.annotate(
            f"p{p:g}  {shown_ms(at)}", (at, p / 100), xytext=place, ha=ha, textcoords="offset points", fontsize=9
        )


def stacked(axes: Axes, rows: Sequence[Mapping[str, float]], labels: Sequence[str], height: float) -> None:
    """Horizontal bars from the top; a part that none of them has is not in the legend."""
    left = np.zeros(len(rows))
    for name, colour in palette.STAGES.items():
        widths = np.array([row.get(name, 0.0) for row in rows])
        if widths.any():
            axes.barh(range(len(rows)), widths, height, left=left, color=colour, linewidth=0, label=name)
            left += widths
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(max(len(rows), 1) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    if rows:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9, handlelength=1, handleheight=1)


def time_axis(
    axes: Axes, axis: str, values: Sequence[float] | np.ndarray | None, nothing: str, what: str = "time"
) -> None:
    """A logarithmic axis of milliseconds, labelled in ms or s."""
    if values is None or not len(values):
        say_empty(axes, nothing)
        return
    low, high = max(float(np.min(values)), 1e-3), max(float(np.max(values)), 1e-3)
    room = max((high / low) ** 0.06, 1.25)
    getattr(axes, f"set_{axis}scale")("log")
    getattr(axes, f"set_{axis}lim")(low / room, high * room)
    scale = getattr(axes, f"{axis}axis")
    scale.set_major_formatter(FuncFormatter(lambda value, _: shown_ms(value)))
    some = high / low * room * room < 400
    scale.set_minor_formatter(
        FuncFormatter(lambda value, _: shown_ms(value) if _leads(value, (2, 5)) else "") if some else NullFormatter()
    )
    getattr(axes, f"set_{axis}label")(f"{what} (logarithmic)")


def _leads(value: float, digits: Sequence[int]) -> bool:
    """The first digit is one of them, and the only one."""
    leading = value / 10 ** np.floor(np.log10(value))
    return any(abs(leading - digit) < 1e-6 for digit in digits)


def linear_axis(axes: Axes, rows: Sequence[object], label: str, nothing: str) -> None:
    """A horizontal axis from 0, with its unit in `label`."""
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    if not rows:
        say_empty(axes, nothing)


def mark_size(count: int) -> float:
    """Of a mark, so that a few are seen and many do not cover each other."""
    return 30 if count < 60 else 11


def clock_axis(axes: Axes, at: Sequence[float]) -> None:
    """A horizontal axis of seconds from the start of the load, with room at both ends."""
    axes.set_xlabel("time from the start [s]")
    if at:
        room = 0.02 * (max(at) - min(at)) or 1.0
        axes.set_xlim(min(at) - room, max(at) + room)


def say_empty(axes: Axes, text: str) -> None:
    """In the middle of axes that nothing is drawn on."""
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", color=FAINT)


def shown_ms(value: float) -> str:
    """As text, in ms or s."""
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms"
