"""A measured table as it is kept: `table.json` in a result folder, with all that a reader needs to take it again.

Rules: every cell is text already, as it is shown; the figures behind the cells stand beside them, raw; a command is
shown with names in place of this machine's paths and ports, and without keys; the words of other programs are scrubbed
before they become a note or a cell, for a table may be published.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace_bench.fault import Misuse
from headrace_bench.report.folder import masked, save, without_keys
from headrace_bench.report.machine import Machine

FILE = "table.json"
SCHEMA = 1
HOST = re.compile(
    r"""(?<=host=)(?:'[^']*'|"[^"]*")"""
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"
    r"|\blocalhost:\d+"
    r"|\b(?:[a-z0-9-]+\.)+(?:com|org|net|io|ai|dev|app|cloud|edu|gov|local|internal|lan)\b(?::\d+)?",
    re.IGNORECASE,
)
QUOTED_PATH = re.compile(r"""(?<=['"])~?/[^'"]*/([^'"/]+)/?(?=['"])""")
PATH = re.compile(r"""(?<![\w./~])~?/(?!/)(?:[^\s'":,;()\[\]<>|`/]+/)+([^\s'":,;()\[\]<>|`/]*)""")
"""An absolute path of two parts or more; group 1 is the last."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """What a verb found."""

    schema: int = SCHEMA
    verb: str
    """`peers`, `busy`, `gateways`, `models`, `ablate`, `idle` or `switching`: the place that it takes in the page."""
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
    """`table.json`, and `table.md` for people, each whole or as it was before. Raises Misuse."""
    save(folder / FILE, msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    save(folder / "table.md", f"{markdown(table)}\n".encode())


def read(folder: Path) -> Table:
    """The table of a result folder. Raises Misuse: there is none, or it is of another schema."""
    file = folder / FILE
    try:
        table = msgspec.json.decode(file.read_bytes(), type=Table)
    except OSError as error:
        raise Misuse(
            f"{file}: {error.strerror}; name a folder that peers, models, ablate, idle or switching wrote"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
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


def scrubbed(text: object, limit: int = 200) -> str:
    """The start of what a program said, on one line, for strangers: without keys, this machine's folders, and hosts."""
    line = masked(" ".join(str(text).split()))
    line = re.sub(r"""\b[a-z][a-z0-9+.-]*://[^\s'"<>)\],;]+""", "URL", line, flags=re.IGNORECASE)
    return without_folders(HOST.sub("HOST", line))[:limit]


def without_folders(text: str) -> str:
    """Of each absolute path in `text` the last part alone. One with spaces is known by its quotes."""
    return PATH.sub(r"\1", QUOTED_PATH.sub(r"\1", text))


def shown(command: Sequence[str], names: Mapping[str, str]) -> str:
    """A command for people: `names` says what stands for a path or a port; other paths lose their folders.

    A word of several lines, a program given as an argument, is shown as `…`, and so is every key.
    """
    return " ".join(_word(word, names) for word in without_keys(command))


def _word(word: str, names: Mapping[str, str]) -> str:
    if word in names:
        return names[word]
    if "\n" in word:
        return "…"
    key, equals, value = word.rpartition("=")
    if value in names:
        return f"{key}{equals}{names[value]}"
    if value.startswith("/") and " -" not in value:
        return _quoted(f"{key}{equals}{Path(value).name}")
    for place, name in names.items():  # a word may hold a command line of its own; a port's number could be anything
        if "/" in place:
            word = word.replace(place, name)
    return _quoted(without_folders(word))


def _quoted(word: str) -> str:
    """As a shell takes it; dots for a key need no quotes."""
    plain = word.replace("…", "")
    return word if shlex.quote(plain) == plain or word == "…" else shlex.quote(word)
