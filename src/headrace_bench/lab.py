"""Where the programs are, and how each server is started: the same GGUF, the same threads, loopback, a free port.

    headrace            with its defaults
    llama-server        with its defaults
    llama-server-tuned  small batches, 16 slots over one KV buffer: what its users set for many short chats
    server.py           the batching example server of llama-cpp-python, on the same build of the library as ours

Rules: threads are given to all of them, as nobody's default is the same; everything else is either a server's own
default or stands in `TUNED` or `server_py_config`.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_bench.server import Server, free_port

HEADRACE = "headrace"
TUNED = ("-b", "128", "-ub", "128", "-np", "16", "-kvu", "--no-cache-idle-slots")
BATCH = 128
SEQUENCES = 16
CELLS = 16384

# server.py loads the multimodal library when it is imported and uses it for images only; our build leaves it out.
WITHOUT_IMAGES = """
import runpy, sys, types
sys.modules["llama_cpp.mtmd_cpp"] = types.ModuleType("llama_cpp.mtmd_cpp")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

WORDS = "river stone light water bridge morning letter garden window market winter story mountain road music".split()


def words(rng: random.Random, n: int) -> str:
    """`n` words, each about a token."""
    return " ".join(rng.choice(WORDS) for _ in range(n))


@dataclass(frozen=True, slots=True)
class Programs:
    """The peers' files; None for one that is not there."""

    llama_server: Path | None = None
    server_py: Path | None = None
    """The example server's source."""
    peer_python: Path = Path(sys.executable)
    """An interpreter that can import what `server_py` needs."""


@dataclass(frozen=True, slots=True)
class Lab:
    """Where things are and how often to repeat them."""

    model: Path
    folder: Path
    """Logs and results."""
    programs: Programs = Programs()
    peerload: Path | None = None
    threads: int = 2
    rounds: int = 5

    def headrace(self, *flags: str, model: str | None = None, name: str = HEADRACE, ssd: Path | None = None) -> Server:
        """The server under test, as a user would start it, but with an empty disk tier.

        What an earlier run left there would make a cold prompt warm. A directory given as `ssd` stays.
        """
        scratch = Path(tempfile.mkdtemp(prefix="headrace-bench-")) if ssd is None else None
        settings = ["--set", f"engine.threads={self.threads}", "--set", f"engine.threads_batch={self.threads}"]
        settings += ["--set", f"tiers.ssd_path={ssd or scratch}"]
        port = free_port()
        command = [sys.executable, "-m", "headrace", "serve", model or str(self.model), "--port", str(port)]
        return self._server(name, [*command, *settings, *flags], port, "/readyz", scratch=scratch)

    def llama_server(self, *flags: str, name: str = "llama-server") -> Server:
        """llama-server with its defaults but for the number of threads, and `flags`."""
        program = self.programs.llama_server
        assert program is not None
        port = free_port()
        command = [str(program), "-m", str(self.model), "--host", "127.0.0.1", "--port", str(port)]
        threads = ["-t", str(self.threads), "-tb", str(self.threads)]
        libraries = {"LD_LIBRARY_PATH": str(program.parent)}
        return self._server(name, [*command, *threads, *flags], port, "/health", env=libraries)

    def server_py(self, name: str = "server.py") -> Server:
        """llama-cpp-python's example server. It takes a JSON file, which is written beside the results."""
        program = self.programs.server_py
        assert program is not None
        port = free_port()
        config = self.folder / "server.py.json"
        config.write_text(json.dumps(server_py_config(self.model, port, self.threads), indent=1))
        command = [str(self.programs.peer_python), "-c", WITHOUT_IMAGES, str(program), "-C", str(config)]
        return self._server(name, command, port, "/healthz")

    def peers(self) -> Mapping[str, Callable[[], Server]]:
        """Name → start, of those whose programs are there."""
        found: dict[str, Callable[[], Server]] = {}
        if self.programs.llama_server is not None:
            found["llama-server"] = self.llama_server
            found["llama-server-tuned"] = lambda: self.llama_server(*TUNED, name="llama-server-tuned")
        if self.programs.server_py is not None:
            found["server.py"] = self.server_py
        return found

    def _server(
        self,
        name: str,
        command: list[str],
        port: int,
        ready: str,
        *,
        env: Mapping[str, str] | None = None,
        scratch: Path | None = None,
    ) -> Server:
        log = self.folder / f"{name}.log"
        return Server(name, command, url=f"http://127.0.0.1:{port}", ready=ready, log=log, env=env, scratch=scratch)


def server_py_config(model: Path, port: int, threads: int) -> dict[str, Any]:
    """The example server's configuration.

    Its defaults are a context of 512 tokens and one sequence, which serves none of the scenarios: it gets as many KV
    cells as Headrace's default and as many sequences as the tuned llama-server.
    """
    return {
        "server": {"host": "127.0.0.1", "port": port},
        "model": {
            "path": str(model),
            "alias": model.stem,
            "n_ctx": CELLS,
            "n_batch": BATCH,
            "n_seq_max": SEQUENCES,
            "threads": threads,
            "threads_batch": threads,
        },
    }
