"""`report`: the page and the plots of a run's folder, made again, and its table.

Rules: nothing that was measured is changed; a run that was cut short has a page too, and it says so.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from headrace_bench.report import console, folder, page


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="as `headrace-bench run --out` made it")


def run(asked: argparse.Namespace) -> int:
    """0. Raises Misuse for a folder that is none."""
    found = folder.read(asked.folder)
    summary = page.summary_of(found)
    made = page.make(asked.folder)
    show = Console(highlight=False)
    show.print(console.final(summary))
    show.print(str(made), soft_wrap=True, markup=False)
    return 0
