"""llama.cpp's quantiser: a model file → the same model in another number format.

    python -m headrace.engines.quantiser SOURCE TARGET TYPE THREADS      0 done, 2 with one line on stderr

Rules: a child process does it, because the library may end its process and cannot be interrupted; nothing is under
TARGET's name before it is whole, and nothing is left of a file that was given up.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from headrace.core.errors import StartupError
from headrace.core.file_name import shown
from headrace.engines.gguf import read_head
from headrace.engines.ladder import Ending, told
from headrace.engines.last_words import words_of
from headrace.engines.llama_lib import C, recent_log

PART = ".part"
"""Ends the name of a file that is being written."""


def file_type(path: Path) -> int | None:
    """The `llama_ftype` in a file's metadata; None if there is none. Raises StartupError for what is no model.

    Read without the library: it may end the process of whoever shows it a broken file.
    """
    value = read_head(path).metadata.get("general.file_type")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def quantise(source: Path, target: Path, number: int, threads: int) -> None:
    """Write `source` as type `number` to `target`, in this process. Raises StartupError."""
    params = C.llama_model_quantize_default_params()
    params.ftype = number
    params.nthread = threads
    params.allow_requantize = True  # what that costs is told by `core.quantisation.loss`
    code = int(C.llama_model_quantize(os.fsencode(source), os.fsencode(target), params))
    if code != 0:
        raise StartupError(f"{shown(source.name)} cannot be converted: {recent_log() or f'llama.cpp gave {code}'}")


def make_file(source: Path, target: Path, number: int, threads: int, environ: Mapping[str, str]) -> None:
    """`quantise` in a child process, whole or not at all. Raises StartupError."""
    part = target.with_name(f".{target.name}.{os.getpid()}{PART}")
    words = [sys.executable, "-m", "headrace.engines.quantiser", str(source), str(part), str(number), str(threads)]
    try:
        done = subprocess.run(words, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode != 0 or not part.is_file():
            said = words_of(done.stderr)
            if done.returncode == 2 and said:
                raise StartupError(said)
            raise StartupError(f"{shown(source.name)} cannot be converted: {told(Ending(done.returncode, said))}")
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        part.replace(target)
    except OSError as error:
        raise StartupError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def main(source: str, target: str, number: str, threads: str) -> int:
    """The child process."""
    try:
        quantise(Path(source), Path(target), int(number), int(threads))
    except StartupError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
