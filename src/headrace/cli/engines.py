"""`headrace engines`: which engines a running server has, and how they are."""

from __future__ import annotations

import sys
from typing import Any

from rich.table import Table

from headrace.cli.operator import Operator
from headrace.cli.output import console

WIDTH = 200
"""Of the table where it is no terminal that it goes to: lines must not be wrapped."""


def run(server: Operator) -> int:
    """The verb; gives the exit status. Raises StartupError."""
    out = console(sys.stdout, width=None if sys.stdout.isatty() else WIDTH)
    rows = server.get("engines")["engines"]
    if not rows:
        out.print("There are no engines.")
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("engine", "kind", "model", "state", "for", "answers", "leases", "TTFT", "memory"):
        table.add_column(title, justify="right" if title in ("for", "leases", "TTFT", "memory") else "left")
    for row in rows:
        table.add_row(*_cells(row), style="dim" if row["state"] == "gone" else None)
    out.print(table)
    for row in rows:
        if row["reason"]:
            out.print(f"{row['name']}: {row['reason']}", style="yellow")
        if row.get("rung_note"):
            out.print(f"{row['name']}: {row['rung_note']}", style="yellow")
    return 0


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    shares = [f"{alias} {100 * share:.4g} %" for alias, share in row["weights"].items() if share]
    ttft, memory = row["predicted_ttft_ms"], row["memory_bytes"]
    # One that is loaded or drained takes no requests either, and is well.
    state = row["state"] + (", unwell" if row["state"] == "ready" and not row["healthy"] else "")
    return (
        row["name"],
        row["kind"],
        row["model"],
        state,
        _age(row["seconds"]),
        ", ".join(shares) or "–",
        str(row["leases"]),
        "–" if not ttft else f"{ttft:.0f} ms",
        "–" if memory is None else f"{memory / 2**20:.0f} MiB",
    )


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
