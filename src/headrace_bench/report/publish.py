"""Tables into a page, between markers: `<!-- begin: peers -->` … `<!-- end: peers -->`.

Rules: what stands between two markers is made, what stands outside is never touched; the same tables give the same
page, to the byte; a page without the markers of a table is not guessed at; a table brings all that it was measured
with, so that one can be made again without the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from headrace_bench.fault import Misuse
from headrace_bench.report import table as tables
from headrace_bench.report.folder import save
from headrace_bench.report.machine import Machine
from headrace_bench.report.table import Table

GIB = 1 << 30


def publish(page: Path, folders: Sequence[Path], places: Sequence[str] = ()) -> list[str]:
    """Writes the tables of result folders into `page`; the names of what was written. Raises Misuse: nothing was.

    `places`: for each folder the place of its table; "" is that of the verb, as for those that are not named.
    """
    found = [tables.read(folder) for folder in folders]
    try:
        text = page.read_bytes().decode()
    except OSError as error:
        raise Misuse(f"{page}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Misuse(f"{page}: not UTF-8 at byte {error.start}; name the page with the markers") from None
    blocks = made(found, places)
    for name, block in blocks.items():
        text = between(text, name, block)
    save(page.resolve(), text.encode())
    return list(blocks)


def made(found: Sequence[Table], places: Sequence[str] = ()) -> dict[str, str]:
    """Marker → what stands there. Raises Misuse: nothing to publish, or two tables for one place."""
    if not found:
        raise Misuse("no result folder: name those that peers, models, ablate, idle or switching wrote")
    blocks: dict[str, str] = {}
    for i, table in enumerate(found):
        place = (places[i] if i < len(places) else "") or table.verb
        if place in blocks:
            raise Misuse(f"two tables of {place}: a page has one place for it; FOLDER=PLACE names another")
        blocks[place] = f"{tables.markdown(table)}\n\n{origin(table)}"
    return blocks


def between(page: str, name: str, block: str) -> str:
    """`page` with `block` between the markers of `name`. Raises Misuse unless each marker is there once, in order."""
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise Misuse(f"the page needs the markers {begin} and {end}, once each and in this order")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{block}\n\n{end}{after}"


def origin(table: Table) -> str:
    """Where the figures come from: when, on what, by which command, with what beside the servers named above it."""
    when = datetime.fromisoformat(table.wall).date().isoformat()
    others = [f"{name} {version}" for name, version in sorted(table.versions.items()) if name not in table.commands]
    versions = f", with {', '.join(others)}" if others else ""
    return f"Measured on {when} on {described(table.machine)}, by `{table.command}`{versions}."


def described(machine: Machine) -> str:
    """A machine in one line."""
    memory = "" if machine.memory is None else f", {machine.memory / GIB:.0f} GiB"
    cores = "1 core" if machine.cores == 1 else f"{machine.cores} cores"
    features = f" ({' '.join(machine.features)})" if machine.features else ""
    return f"{cores} of {machine.cpu or 'an unnamed processor'}{features}{memory}, {machine.kernel}"
