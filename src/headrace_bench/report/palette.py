"""How plots look: colours that colour-blind readers tell apart, on light and on dark ground, and files that are the
same bytes for the same figures.

    figure() ─► Axes ─► svg()    text stays text, the ground is clear: a page recolours ink, grid and paper by CSS
                     └► png()    on white, for documents

Rules: no pyplot and no global figure; settings hold inside `looks()` only. Data colours are Okabe and Ito's set, the
yellow left out of lines and text; what matters is told by a marker or a label too, never by colour alone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, FAINT, GRID = "#20242b", "#6a7280", "#d9dde3"
BLUE, ORANGE, GREEN, RED, SKY, PINK, YELLOW, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#f0e442", "#9aa1ab",
)  # fmt: skip

SERIES = (BLUE, RED, GREEN, PINK)
STAGES = {
    "lag": "#5b626d", "connect": "#878e99", "send": "#b3b9c2",
    "network": PINK,
    "server+network": BLUE,
    "receive": YELLOW, "route": "#b8a000", "tokenize": "#8c6d1f", "queue": ORANGE, "restore": SKY, "prefill": BLUE,
    "sample": GREEN, "deliver": "#7fd1b9", "rest": "#7b6ea8",
}  # fmt: skip
"""The client is grey, the network pink; of the server's stages the three that are ever long differ most."""

FAILURES = {
    "http": ("x", RED), "stream_error": ("v", PINK), "truncated": ("s", ORANGE), "timeout": ("D", BLUE),
    "connect": ("P", "#5b626d"), "protocol": ("*", GREEN), "hung_up": ("<", SKY), "unfinished": (">", GREY),
}  # fmt: skip
"""Outcome → marker, colour."""

RASTER_ABOVE = 3000
"""Points from which they are one image inside the SVG: a browser draws ten thousand paths slowly."""

SETTINGS = {
    "font.size": 10.5, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"],
    "axes.edgecolor": FAINT, "axes.labelcolor": INK, "text.color": INK, "xtick.color": FAINT, "ytick.color": FAINT,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True,
    "axes.titlesize": 11.5, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 10,
    "legend.frameon": False, "legend.fontsize": 9.5, "lines.linewidth": 1.8,
    "svg.fonttype": "none", "svg.hashsalt": "headrace-bench", "path.simplify": True,
}  # fmt: skip


@contextmanager
def looks() -> Iterator[None]:
    """The house's settings, for the drawing and the saving of a figure."""
    with matplotlib.rc_context(SETTINGS):  # type: ignore[arg-type]
        yield


def figure(height: float = 3.7, width: float = 6.6) -> tuple[Figure, Axes]:
    """An empty figure with one pair of axes; inches."""
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made, made.add_subplot()


def png(drawn: Figure) -> bytes:
    out = io.BytesIO()
    with looks():
        drawn.savefig(out, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def svg(drawn: Figure) -> str:
    """A whole file. Without a date: the same figure gives the same bytes."""
    out = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with looks():
        drawn.savefig(out, format="svg", dpi=150, transparent=True, metadata=nothing)
    return out.getvalue().decode()


def inline(text: str, name: str, label: str) -> str:
    """`svg()`'s file as an element of a page: its ids carry `name`, its ink and grid are the page's own.

    `label` is what a reader hears who sees no picture; plain text without markup.
    """
    element = text[text.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(
        r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", re.sub(r"\s+", " ", element, count=0), count=1
    )
    element = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", element)
    for colour, role in ((INK, "ink"), (FAINT, "faint"), (GRID, "grid"), (BLUE, "blue"), (SKY, "sky")):
        element = element.replace(colour, f"var(--{role}, {colour})")
    return element.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def unparsed(text: str) -> str:
    """`text` as a label: a dollar sign in it begins no formula."""
    return text.replace("$", r"\$")
