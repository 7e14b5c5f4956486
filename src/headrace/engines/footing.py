"""Where an engine stands on its ladder, and where it stood last time.

Rules: one small file for each model file (path, size, modification time), machine and build of the library: whoever
builds anew starts at the top again. One that cannot be read counts as none, one that cannot be written is not worth
failing for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from headrace.engines.ladder import Ending, Kept, Rung, descends, first_rung, given_up, stepped_down, told
from headrace.engines.machine import build, machine
from headrace.kv.blob import fingerprint


def rung_file(folder: Path, model: Path) -> Path:
    """Where it is kept for the file `model`, here and now."""
    try:
        status = model.stat()
        file = os.fsencode(model.resolve()), status.st_size, status.st_mtime_ns
    except OSError:
        file = os.fsencode(model), 0, 0
    return folder / f"{fingerprint(*file, machine(), build()).hex()}.json"


def load_rung(file: Path) -> Kept | None:
    """None if there is none that can be used."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError):
        return None


def save_rung(file: Path, kept: Kept | None) -> None:
    """Write it, or with None forget it, if that can be done."""
    own = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        if kept is None:
            file.unlink(missing_ok=True)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        own.write_bytes(msgspec.json.encode(kept))
        own.replace(file)


class Footing:
    """One engine's place on `rungs`, best first. `model` and `folder` None: nothing is kept.

    `begin` once, then after each worker that died before it was up `fall`, until one comes up: `stand`.
    """

    def __init__(
        self, rungs: Sequence[Rung] = (Rung(),), model: Path | None = None, folder: Path | None = None
    ) -> None:
        self._rungs = tuple(rungs)
        self._model, self._folder = model, folder
        self._file: Path | None = None
        self._at = self._began = 0
        self._why = ""
        """What ended the worker on the rung above."""

    def __repr__(self) -> str:
        return f"<Footing {self.rung.name} [{self._at} of {len(self._rungs) - 1}]>"

    @property
    def rung(self) -> Rung:
        return self._rungs[self._at]

    @property
    def depth(self) -> int:
        """Rungs below what was configured."""
        return self._at

    @property
    def note(self) -> str:
        """What is to be said of an engine that stands here, in one line; "" at the top."""
        return stepped_down(self.rung, self._why, self._at) if self._at else ""

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Go to the rung that was kept for an engine of these settings. Reads the library's files: some 10 ms."""
        if self._folder is not None and self._model is not None and len(self._rungs) > 1:
            self._file = rung_file(self._folder, self._model)
            kept = load_rung(self._file)
            self._at = self._began = first_rung(self._rungs, kept, settings)
            self._why = kept.why if kept is not None else ""

    def fall(self, ending: Ending) -> str:
        """A worker died here before it was up: one rung down, or the line that says why there is none to try."""
        if descends(ending) and self._at + 1 < len(self._rungs):
            self._at += 1
            self._why = told(ending)
            return ""
        tried = self._at - self._began + 1
        if self._began and self._file is not None:
            save_rung(self._file, None)  # what is kept does not help: the next start tries all
        return given_up(ending, tried)

    def stand(self) -> None:
        """A worker is up here: keep that, if it is news."""
        if self._file is not None and self._at != self._began:
            save_rung(self._file, Kept(self.rung.settings, self._why))
            self._began = self._at
