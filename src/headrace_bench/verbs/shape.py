"""`shape`: a model file with random weights of a published model's shape, made once; its path is printed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headrace_bench.peers import kept
from headrace_bench.shapes import made


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.add_argument("--folder", type=Path, metavar="PATH", help="where it is kept (headrace/shapes in the cache)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another one makes other weights (1)")


def run(asked: argparse.Namespace) -> int:
    """Prints the path. Raises Fault."""
    folder = asked.folder or kept.home().parent / "shapes"
    print(made.file(folder, lambda line: print(line, file=sys.stderr, flush=True), seed=asked.seed))
    return 0
