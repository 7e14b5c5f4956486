"""Servers in processes of their own that answer every chat at known times; the model is `m`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PROGRAM = """
import asyncio, sys
from headrace_bench.client.script import even
from headrace_bench.client.scripted import Scripted

async def serve(first, gap, tokens, key, port):
    server = Scripted({"m": even(float(first), float(gap), int(tokens))}, key=key or None)
    await server.start(int(port))
    print(server.url, flush=True)
    await asyncio.sleep(120)

asyncio.run(serve(*sys.argv[1:]))
"""


@dataclass(frozen=True, slots=True)
class Serving:
    url: str
    process: subprocess.Popen[str]

    def die(self) -> None:
        self.process.kill()
        self.process.wait()


def command(first: float, gap: float = 0.005, tokens: int = 4, key: str = "", port: str = "0") -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(first), str(gap), str(tokens), key, port]


@contextmanager
def serving(first: float, gap: float = 0.005, tokens: int = 4, key: str = "") -> Iterator[Serving]:
    """The first token after `first` seconds, one every `gap`."""
    with subprocess.Popen(command(first, gap, tokens, key), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Serving(process.stdout.readline().strip(), process)
        finally:
            process.kill()
