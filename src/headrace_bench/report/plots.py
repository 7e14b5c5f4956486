"""The plots of a run, of a search and of a comparison. Each takes figures in milliseconds and gives a `Plot`.

Rules: axes have names and units; a logarithmic axis where values span decades; no requests, or none that ended well, is
a plot that says so. Latencies are of requests that ended well; those that failed are marked, by class, where time runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from headrace_bench.fault import Misuse
from headrace_bench.figures.definitions import STALL_S
from headrace_bench.figures.stats import percentile
from headrace_bench.report import palette
from headrace_bench.report.axes import (
    clock_axis,
    linear_axis,
    mark_percentiles,
    mark_size,
    say_empty,
    stacked,
    time_axis,
)
from headrace_bench.report.folder import save
from headrace_bench.report.palette import BLUE, FAINT, GREEN, ORANGE, RED, SERIES, figure, looks, unparsed
from headrace_bench.report.series import Point, slowest

MARKED = {50.0: 1, 90.0: 36, 95.0: 72, 99.0: 368}
"""Percentile → the fewest samples that bound it from both sides with 95 %."""
BUCKETS = ((0, 64), (64, 256), (256, 1024), (1024, None))
"""Prompt tokens: from, below."""
STALL_MS = STALL_S * 1000
CURVE = 1500
"""Most steps of a curve in a file."""


@dataclass(frozen=True, slots=True)
class Plot:
    """`name`: of its files. `caption`: what it shows and how to read it, a sentence or two."""

    name: str
    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One rate that a search tried. Requests a second; the interval is of 95 %."""

    rate: float
    goodput: float
    low: float | None
    high: float | None
    accepted: bool
    """The objective was met with confidence."""


def of_run(points: Sequence[Point]) -> list[Plot]:
    """All plots of one run, in a page's order."""
    ttft, e2e = _known([p.ttft for p in points]), _known([p.e2e for p in points])
    service, gaps = _known([p.service for p in points]), [ms for p in points for _, ms in p.gaps]
    both = {"from scheduled": ttft, "from sent": service}
    return [
        ecdf("ttft", "Time to first token", both, "no answer with a token"),
        timeline(points),
        ecdf("gaps", "Gaps between chunks", {"gaps": gaps}, "no answer with two chunks"),
        gap_map(points),
        ecdf("e2e", "From scheduled to the last token", {"end to end": e2e}, "no answer with a token"),
        waterfalls(points),
        stages(points),
        by_prompt(points),
    ]


def write(folder: Path, plots: Sequence[Plot]) -> None:
    """`NAME.png` and `NAME.svg` of each into `folder`, which is made."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise Misuse(f"{folder}: {error.strerror or error}") from None
    for plot in plots:
        save(folder / f"{plot.name}.png", palette.png(plot.figure))
        save(folder / f"{plot.name}.svg", palette.svg(plot.figure).encode())


def ecdf(
    name: str, title: str, curves: Mapping[str, Sequence[float]], nothing: str, *,
    marks: Mapping[float, int] = MARKED, marked: int = 1,
) -> Plot:  # fmt: skip
    """Share of samples at or below a time, log x. Percentiles of the first `marked` curves that have the samples."""
    with looks():
        drawn, axes = figure()
        axes.set_title(title)
        shown = {label: np.sort(np.asarray(values, dtype=float)) for label, values in curves.items() if len(values)}
        for place, (label, values) in enumerate(shown.items()):
            colour = SERIES[place % len(SERIES)]
            floor = np.maximum(values, 1e-3)
            kept = np.unique(np.linspace(0, len(values) - 1, min(len(values), CURVE)).astype(int))
            heights = (kept + 1) / len(values)
            text = f"{unparsed(label)} (n = {len(values):,})"
            style = "-" if place == 0 or marked > 1 else (0, (4, 2))
            axes.step([floor[0], *floor[kept]], [0, *heights], where="post", color=colour, linestyle=style, label=text)
            if place < marked:
                wanted = [p for p, least in marks.items() if len(values) >= least]
                right = wanted[: 9 * place] if marked > 1 else (95.0,)
                mark_percentiles(axes, wanted, values.tolist(), colour, right=right)
        time_axis(axes, "x", np.concatenate(list(shown.values())) if shown else None, nothing)
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylabel("share of samples")
        if shown:
            axes.legend(loc="lower right")
    caption = "Share of samples that took no longer than the time below, on a logarithmic axis."
    if any(least > max(map(len, curves.values()), default=0) for least in marks.values()):
        caption += " Percentiles are marked where there are enough samples to bound them."
    return Plot(name, title, caption, drawn)


def timeline(points: Sequence[Point]) -> Plot:
    """TTFT by scheduled time, log y; failures along the top, a marker a class."""
    with looks():
        drawn, axes = figure()
        axes.set_title("Time to first token by scheduled time")
        good = [p for p in points if p.ttft is not None]
        at, ttft = [p.at for p in good], [max(p.ttft or 0.0, 1e-3) for p in good]
        raster = len(good) > palette.RASTER_ABOVE
        if good:
            axes.scatter(
                at,
                ttft,
                s=mark_size(len(good)),
                color=BLUE,
                alpha=0.55,
                linewidths=0,
                rasterized=raster,
                label="first token",
            )
        if len(good) >= 60:
            edges = np.linspace(min(at), max(at), 31)
            places = np.clip(np.digitize(at, edges) - 1, 0, 29)
            middles = [percentile([t for t, q in zip(ttft, places, strict=True) if q == b], 50) for b in range(30)]
            kept = [(x, y) for x, y in zip((edges[:-1] + edges[1:]) / 2, middles, strict=True) if y is not None]
            axes.plot(*zip(*kept, strict=True), color=ORANGE, linewidth=1.6, label="median of the time about it")
        time_axis(axes, "y", ttft, "no answer with a token")
        classes = Counter(p.outcome for p in points if p.outcome != "ok")
        for row, (outcome, count) in enumerate(sorted(classes.items())):
            marker, colour = palette.FAILURES[outcome]
            when = [p.at for p in points if p.outcome == outcome]
            axes.scatter(
                when, [1.03 + 0.045 * row] * len(when), marker=marker, s=26, color=colour, clip_on=False,
                linewidths=1.2 if marker == "x" else 0, transform=axes.get_xaxis_transform(),
                label=f"{outcome} ({count})",
            )  # fmt: skip
        axes.set_title(axes.get_title(loc="left"), pad=10 + 11 * len(classes))
        clock_axis(axes, [p.at for p in points])
        if points:
            axes.legend(loc="upper left", bbox_to_anchor=(0, -0.21), ncols=3, handletextpad=0.4, columnspacing=1.2)
    return Plot(
        "timeline", "Time to first token by scheduled time",
        "Each dot is a request that ended well, at the time it was due. Those that failed stand above the axes.", drawn,
    )  # fmt: skip


def gap_map(points: Sequence[Point]) -> Plot:
    """Gaps between chunks over time: log bins of length by bins of time, colour is how many."""
    with looks():
        drawn, axes = figure()
        axes.set_title("Gaps between chunks over time")
        gaps = [(at, max(ms, 0.05)) for p in points for at, ms in p.gaps]
        if gaps:
            when, long = np.array(gaps).T
            spread = max(float(when.max() - when.min()), 1e-3)
            times = np.linspace(when.min(), when.min() + spread, int(np.clip(len(gaps) / 20, 8, 120)) + 1)
            low, high = np.floor(np.log10(long.min()) * 10), np.ceil(np.log10(long.max()) * 10 + 1e-9)
            lengths = 10 ** (np.arange(low, max(high, low + 1) + 1) / 10)
            counts, _, _ = np.histogram2d(when, long, (times, lengths))
            cells = np.ma.masked_equal(counts.T, 0)
            norm = LogNorm(1, max(2.0, float(counts.max())))
            mesh = axes.pcolormesh(times, lengths, cells, norm=norm, cmap="viridis_r", rasterized=True)
            bar = drawn.colorbar(mesh, ax=axes, pad=0.02, label="gaps in a cell")
            bar.outline.set_visible(False)
            bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            bar.ax.yaxis.set_minor_formatter(NullFormatter())
            if lengths[0] < STALL_MS < lengths[-1] * 1.2:
                axes.axhline(STALL_MS, color=RED, linestyle=(0, (4, 3)), linewidth=1.1)
                axes.annotate("stall", (0.995, STALL_MS), xycoords=("axes fraction", "data"), xytext=(0, 3),
                              textcoords="offset points", ha="right", color=RED, fontsize=9)  # fmt: skip
        time_axis(axes, "y", [ms for _, ms in gaps], "no answer with two chunks", "gap")
        clock_axis(axes, [at for at, _ in gaps])
    return Plot("gap_map", "Gaps between chunks over time",
                f"How many gaps of a length ended at a time. Above the broken line ({STALL_MS:g} ms) is a stall.",
                drawn)  # fmt: skip


def waterfalls(points: Sequence[Point], count: int = 50) -> Plot:
    """The slowest requests' TTFTs in their parts, longest on top."""
    slow = slowest(points, count)
    with looks():
        drawn, axes = figure(height=max(3.3, 1.3 + 0.145 * len(slow)))
        axes.set_title("The slowest first tokens, in their parts")
        rows = [p.split.by_name() for p in slow if p.split is not None]
        stacked(axes, rows, [f"#{p.index}" for p in slow], 0.8)
        axes.tick_params(axis="y", labelsize=7.5)
        linear_axis(axes, rows, "time from scheduled [ms]", "no answer with a token")
    return Plot("waterfalls", "The slowest first tokens, in their parts",
                "A bar is a request, from its scheduled time to its first token; the number is its place in the "
                "schedule.", drawn)  # fmt: skip


def stages(points: Sequence[Point]) -> Plot:
    """Mean time in each part of the TTFT, by length of the prompt. Means, since only those add up."""
    with looks():
        drawn, axes = figure(height=3.2)
        axes.set_title("Where the first token's time went")
        rows, names = [], []
        for label, members in _bucketed(points):
            splits = [p.split.by_name() for p in members if p.split is not None]
            if splits:
                parts = dict.fromkeys(name for name in palette.STAGES if any(name in one for one in splits))
                rows.append({name: sum(one.get(name, 0.0) for one in splits) / len(splits) for name in parts})
                names.append(f"{label}\nn = {len(splits)}")
        stacked(axes, rows, names, 0.62)
        for place, row in enumerate(rows):
            axes.annotate(f"{sum(row.values()):,.0f} ms", (sum(row.values()), place), xytext=(4, 0),
                          textcoords="offset points", va="center", fontsize=9)  # fmt: skip
        linear_axis(axes, rows, "mean time [ms]", "no answer with a token")
        axes.set_xlim(0, max((sum(row.values()) for row in rows), default=1.0) * 1.2)
        axes.set_ylabel("prompt tokens")
    return Plot("stages", "Where the first token's time went",
                "Mean time in each part, by length of the prompt. Client and network are as this machine saw them; "
                "the server's stages are its own.", drawn)  # fmt: skip


def by_prompt(points: Sequence[Point]) -> Plot:
    """TTFT against prompt tokens, with those apart that had some of the prompt from a cache."""
    with looks():
        drawn, axes = figure()
        axes.set_title("Time to first token by length of the prompt")
        good = [p for p in points if p.ttft is not None and p.prompt_tokens]
        for label, marker, colour, kept in (
            ("nothing from a cache", "o", BLUE, [p for p in good if not p.cached_tokens]),
            ("a prefix from a cache", "^", ORANGE, [p for p in good if p.cached_tokens]),
        ):
            if kept:
                x, y = [p.prompt_tokens or 1 for p in kept], [max(p.ttft or 0.0, 1e-3) for p in kept]
                raster = len(kept) > palette.RASTER_ABOVE
                axes.scatter(x, y, s=mark_size(len(good)), marker=marker, color=colour, alpha=0.55, linewidths=0,
                             rasterized=raster, label=f"{label} (n = {len(kept):,})")  # fmt: skip
        time_axis(axes, "y", [p.ttft or 0.0 for p in good], "no answer with a token and a count of its prompt")
        axes.set_xlabel("prompt tokens, as the server counts them")
        if good:
            counts = [p.prompt_tokens or 1 for p in good]
            if max(counts) >= 8 * min(counts):
                axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axes.legend(loc="upper left")
    return Plot("by_prompt", "Time to first token by length of the prompt",
                "Each mark is a request that ended well.", drawn)  # fmt: skip


def goodput(tried: Sequence[RatePoint], objective: str) -> Plot:
    """Goodput against the offered rate, with intervals; on the broken line every request is good."""
    with looks():
        drawn, axes = figure()
        axes.set_title(unparsed(f"Goodput by rate ({objective})"))
        ordered = sorted(tried, key=lambda point: point.rate)
        axes.plot([p.rate for p in ordered], [p.goodput for p in ordered], color=FAINT, linewidth=1, zorder=1)
        for label, marker, colour, kept in (
            ("met", "o", GREEN, [p for p in ordered if p.accepted]),
            ("not met", "X", RED, [p for p in ordered if not p.accepted]),
        ):
            if kept:
                errors = [[0.0 if end is None else max(0.0, abs(p.goodput - end)) for p, end in pairs] for pairs in
                          ([(p, p.low) for p in kept], [(p, p.high) for p in kept])]  # fmt: skip
                axes.errorbar([p.rate for p in kept], [p.goodput for p in kept], yerr=errors, fmt=marker, color=colour,
                              capsize=3, elinewidth=1.2, markersize=6, label=label)  # fmt: skip
        axes.set_xlabel("offered rate [requests/s]")
        axes.set_ylabel("good requests/s")
        top = max((p.rate for p in ordered), default=0.0)
        if ordered:
            axes.plot([0, top], [0, top], color=FAINT, linestyle=(0, (4, 3)), linewidth=1, label="every request good")
            axes.legend(loc="upper left")
            axes.set_xlim(0, top * 1.05)
            axes.set_ylim(0, None)
        else:
            say_empty(axes, "no rate was tried")
    return Plot("goodput", f"Goodput by rate ({objective})",
                "Requests a second that met every limit, by the rate they were sent at, with 95 % intervals.",
                drawn)  # fmt: skip


def overlay(a: str, b: str, of_a: Sequence[Point], of_b: Sequence[Point]) -> list[Plot]:
    """A against B: TTFT, gaps, end to end, a curve each."""
    first, second = (a, b) if a != b else (f"A: {a}", f"B: {b}")

    def both(name: str, title: str, values: Callable[[Point], Sequence[float]]) -> Plot:
        curves = {label: [ms for p in of for ms in values(p)] for label, of in ((first, of_a), (second, of_b))}
        return ecdf(name, title, curves, "no answer with a token", marks={50.0: 1, 95.0: 72}, marked=2)

    return [
        both("ab_ttft", "Time to first token, A and B", lambda p: _known([p.ttft])),
        both("ab_gaps", "Gaps between chunks, A and B", lambda p: [ms for _, ms in p.gaps]),
        both("ab_e2e", "From scheduled to the last token, A and B", lambda p: _known([p.e2e])),
    ]


def _bucketed(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    """All, then those of each length of prompt that has some."""
    out = [("all", list(points))]
    for low, below in BUCKETS:
        label = f"{low:,}–{below - 1:,}" if below is not None and low else f"< {below}" if below else f"≥ {low:,}"
        inside = [p for p in points if p.prompt_tokens is not None and low <= p.prompt_tokens < (below or 1 << 62)]
        if inside:
            out.append((label, inside))
    return out


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
