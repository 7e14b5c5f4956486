"""`headrace pull NAME`: fetch a model, with a progress bar."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from headrace.cli.output import console
from headrace.config import cache_home
from headrace.models import CATALOG, Store


class ProgressBar:
    """The store's progress callback as a bar on stderr: on a terminal it moves, elsewhere it leaves one line an act."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console(sys.stderr),
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tasks:
            self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            # Started by the first progress, not before: pip draws its own bar until then.
            self._bar.start()
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done)


def fetch(name: str, *, accept_terms: bool = False) -> Path:
    """Path of the model's file; fetched if need be. Raises StartupError, also if its terms are not accepted."""
    with ProgressBar() as progress:
        return Store(cache_home() / "models", progress=progress, accept_terms=accept_terms).resolve(name)


def run(name: str, *, accept_terms: bool = False) -> int:
    """The verb."""
    terms = CATALOG[name].terms if name in CATALOG else ""
    if terms and accept_terms:
        console(sys.stderr).print(f"{name} comes under the {CATALOG[name].licence}, which you accept: {terms}")
    path = fetch(name, accept_terms=accept_terms)
    out = console(sys.stdout)
    licence = f" ({CATALOG[name].licence})" if name in CATALOG else ""
    out.print(f"{name}{licence} is at {path}")
    out.print(f"Serve it with: headrace serve {name}")
    return 0
