"""How the command line writes: plain text, colour only on a terminal, never wrapped (lines are meant to be copied)."""

from __future__ import annotations

from typing import IO

from rich.console import Console


def console(stream: IO[str], *, width: int | None = None) -> Console:
    """A console on that stream that takes text as it is: no markup, no guessed highlighting. `width`: for tables."""
    return Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)
