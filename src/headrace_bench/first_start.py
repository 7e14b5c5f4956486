"""The first start of a Headrace with a file: it measures the machine, and may choose other weights than it was given.

    fresh folder ─► start ─► measures, makes files ─► ready │ stop │ … every later start there finds what was chosen

Rules: the folder is the run's own, so that nothing that was found before, by another build or beside other work, is
used; it lies in the cache, not in a temporary folder, which may be memory, and is removed at the end; what was chosen
is read from the profile that Headrace leaves, from outside.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace_bench.fault import Fault
from headrace_bench.peers import kept
from headrace_bench.server import NotReady, Server

PREFIX = "bench-"


@contextmanager
def cache() -> Iterator[Path]:
    """A fresh folder for what first starts leave; removed at the end."""
    home = kept.home().parent
    home.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=PREFIX, dir=home))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def until_ready(server: Server) -> float:
    """Starts a server and ends it; the seconds from its start until it was ready. Raises Fault."""
    began = time.monotonic()
    try:
        with server:
            return time.monotonic() - began
    except NotReady as error:
        raise Fault(" ".join(str(error).split())) from None


def chosen(place: Path, model: Path) -> Path:
    """The file that the first start with `model` chose to serve: `model` itself, or one made of it. Raises Fault."""
    for file in sorted((place / "headrace" / "tuned").glob("*.json")):
        try:
            profile = json.loads(file.read_bytes())
            of, made = profile["source"]["path"], profile.get("converted")
            if Path(of).resolve() == model.resolve():
                return model if made is None else Path(made["path"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Fault(f"{file.name}: not a profile that can be read: {error}") from None
    return model
