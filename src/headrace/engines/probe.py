"""May a file's vocabulary be opened in this process? A child process tries it first.

    python -m headrace.engines.probe FILE      0 it may, 2 with one line on stderr; any other end: it must not

Rule: the library ends the process that shows it some broken files, so nobody opens one that nobody has opened before.
A server need not ask: its worker has loaded the whole file by then.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from headrace.core.errors import StartupError
from headrace.core.file_name import shown
from headrace.engines.ladder import Ending, told
from headrace.engines.last_words import words_of

TIMEOUT_S = 120.0


def check_vocabulary(path: Path, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> None:
    """Raises StartupError, in one line."""
    words = [sys.executable, "-m", "headrace.engines.probe", os.fspath(path)]
    try:
        done = subprocess.run(
            words, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise StartupError(f"{shown(path)}: its vocabulary could not be read in {timeout_s:.0f} s") from None
    said = words_of(done.stderr)
    if done.returncode == 2 and said:
        raise StartupError(said)
    if done.returncode != 0:
        raise StartupError(f"{shown(path)} cannot be read: {told(Ending(done.returncode, said))}; get it again")


def main(path: str) -> int:
    """The child process."""
    from headrace.engines.vocab import Vocabulary

    try:
        vocabulary = Vocabulary.open(Path(path))
        vocabulary.info("", 0, 0)
        vocabulary.encode("a b", special=True)
        return 0
    except StartupError as error:
        sys.stderr.write(f"{shown(error.message)}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
