"""A measured table as it is kept: `table.json` in a result folder, with all that a reader needs to take it again.

Rules: every cell is text already, as it is shown; the figures behind the cells stand beside them, raw; a command is
shown with names in place of this machine's paths and ports.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace_bench.fault import Misuse
from headrace_bench.report.machine import Machine

FILE = "table.json"
SCHEMA = 1


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """What a verb found."""

    schema: int = SCHEMA
    verb: str
    """`peers`, `models` or `ablate`: the place that it takes in the page."""
    wall: str
    """ISO 8601, when it began."""
    command: str
    """What was typed, with names for paths."""
    machine: Machine
    versions: dict[str, str] = {}
    """What was measured and what measured it."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    commands: dict[str, str] = {}
    """Server → how it was started."""
    notes: tuple[str, ...] = ()
    """What a reader of the figures has to know, and what was left out."""
    figures: dict[str, Any] = {}
    """What the cells were made of."""


def write(folder: Path, table: Table) -> None:
    """`table.json`, and `table.md` for people."""
    (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    (folder / "table.md").write_text(markdown(table) + "\n", encoding="utf-8")


def read(folder: Path) -> Table:
    """The table of a result folder. Raises Misuse: there is none, or it is of another schema."""
    file = folder / FILE
    try:
        table = msgspec.json.decode(file.read_bytes(), type=Table)
    except OSError as error:
        raise Misuse(f"{file}: {error.strerror}; name a folder that peers, models or ablate wrote") from None
    except msgspec.MsgspecError as error:
        raise Misuse(f"{file}: not a table: {error}") from None
    if table.schema != SCHEMA:
        raise Misuse(f"{file}: schema {table.schema}, this program reads {SCHEMA}")
    return table


def markdown(table: Table) -> str:
    """The table, then how each server was started, then the notes."""
    parts = [grid(table.columns, table.rows)]
    if table.commands:
        known = table.versions
        parts.append(
            grid(
                ("server", "version", "command"),
                [(f"`{name}`", known.get(name, "–"), f"`{command}`") for name, command in table.commands.items()],
            )
        )
    if table.notes:
        parts.append("\n".join(f"- {note}" for note in table.notes))
    return "\n\n".join(parts)


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. A bar inside a cell would end it."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def shown(command: Sequence[str], names: Mapping[str, str]) -> str:
    """A command for people: `names` says what stands for a path or a port; other paths lose their folders.

    A word of several lines, a program given as an argument, is shown as `…`.
    """
    return " ".join(_word(word, names) for word in command)


def _word(word: str, names: Mapping[str, str]) -> str:
    if word in names:
        return names[word]
    if "\n" in word:
        return "…"
    key, equals, value = word.rpartition("=")
    if value in names:
        return f"{key}{equals}{names[value]}"
    if value.startswith("/"):
        value = Path(value).name
    return shlex.quote(f"{key}{equals}{value}")
