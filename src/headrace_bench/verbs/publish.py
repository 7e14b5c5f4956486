"""`publish`: the tables of result folders, into a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace_bench.report.publish import publish


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="FOLDER[=PLACE]",
        help="what peers, busy, models, ablate, idle or switching wrote, and its place if that is not the verb's",
    )
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"), help="the page with the markers")


def run(asked: argparse.Namespace) -> int:
    """Says what was written. Raises Misuse."""
    named = [split(text) for text in asked.folders]
    written = publish(asked.page, [folder for folder, _ in named], [place for _, place in named])
    print(f"{asked.page}: {', '.join(written)}")
    return 0


def split(text: str) -> tuple[Path, str]:
    """A folder and its place, "" where none is named. A folder of that very name is one, with its `=`."""
    folder, _, place = text.rpartition("=")
    return (Path(folder), place) if folder and not Path(text).is_dir() else (Path(text), "")
