"""`publish`: the tables of result folders, into a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace_bench.report.publish import publish


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="what peers, models, ablate, idle or switching wrote"
    )
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"), help="the page with the markers")


def run(asked: argparse.Namespace) -> int:
    """Says what was written. Raises Misuse."""
    written = publish(asked.page, asked.folders)
    print(f"{asked.page}: {', '.join(written)}")
    return 0
