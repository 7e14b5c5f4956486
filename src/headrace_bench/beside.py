"""The neutral load client with one more scenario: `python -m headrace_bench.beside PEERLOAD FLAG…`, its own flags.

    mixed        three readers, and a prompt of 1,500 words beside them
    long_alone   the same kind of prompt, with new text, on a server that does nothing else

Rules: the client's own code does all that counts, so the scenario is timed and its text drawn as `mixed` is; everybody
gets the same seed and the same scenarios in the same order, hence the same text; it stands right behind `mixed`, so
that both see the same server and the same minute.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "long_alone"
WORDS = 1500
"""As many as `mixed` sends."""
NEEDED = ("Lab", "main")


def client(peerload: Path, scenarios: list[str]) -> list[str]:
    """The command of the load client: as it is, unless the scenario that it lacks is wanted."""
    if NAME in scenarios:
        return [sys.executable, "-m", "headrace_bench.beside", str(peerload)]
    return [sys.executable, str(peerload)]


def load(peerload: Path) -> ModuleType:
    """The client's module, its `Lab` with the scenario. ValueError: the file is another client's."""
    spec = importlib.util.spec_from_file_location("peerload", peerload)
    if spec is None or spec.loader is None:
        raise ValueError(f"{peerload}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    missing = [name for name in NEEDED if not hasattr(module, name)]
    if missing:
        raise ValueError(f"{peerload}: has no {' and no '.join(missing)}: `{NAME}` needs the neutral load client")
    theirs: Any = module.Lab

    class Lab(theirs):  # type: ignore[misc]
        async def long_alone(self) -> dict[str, float]:
            stamps = await self.c.chat("Summarise.", self.text(WORDS), 8)
            return {"long_ttft": round(stamps[0], 1)}

    module.Lab = Lab  # type: ignore[attr-defined]
    return module


def main(argv: list[str]) -> int:
    """The exit status: 1 with one line for a file that is another client's."""
    if not argv:
        sys.stderr.write("usage: python -m headrace_bench.beside PEERLOAD FLAG…\n")
        return 2
    try:
        module = load(Path(argv[0]))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.argv = [argv[0], *argv[1:]]
    asyncio.run(module.main())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
