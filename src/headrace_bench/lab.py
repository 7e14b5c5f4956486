"""Where the programs are, and how each server is started: the same GGUF, the same threads, loopback, a free port.

    headrace            with its defaults; or as it starts by itself, with what it measured at its first start
    headrace-off        with everything off that can be turned off
    llama-server        with its defaults
    llama-server-tuned  small batches, 16 slots over one KV buffer: what its users set for many short chats
    server.py           the batching example server of llama-cpp-python, on the same build of the library as ours
    llama_cpp.server    llama-cpp-python's own server, on the same build of the library, one request at a time
    vllm                on the CPU, with the file's weights unpacked into bfloat16

Rules: threads are given to all of them, as nobody's default is the same, but not to ours as it starts by itself, which
finds them out; everything else is either a server's own default or stands in its file in `peers/`, with the reason.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace_bench.peers import example_server, llama_server, python_server, vllm
from headrace_bench.server import READY_S, Server, free_port

HEADRACE = "headrace"
FIRST_S = 300.0
"""A first start measures the machine, and may make a file of weights."""

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
    python_server: Path | None = None
    """An interpreter that runs `-m llama_cpp.server`."""
    vllm: Path | None = None
    """An interpreter that runs vLLM."""
    vllm_weights: Path | None = None
    """The model's weights, tokenizer and template as vLLM takes them."""


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
    peers_model: Path | None = None
    """Another file for the peers, under the name of `model`."""
    cache: Path | None = None
    """Where ours keeps what it measured at its first start; with it, it starts by itself."""

    def headrace(self, *flags: str, model: str | None = None, name: str = HEADRACE, ssd: Path | None = None) -> Server:
        """The server under test, as a user would start it, but with an empty disk tier.

        What an earlier run left there would make a cold prompt warm. A directory given as `ssd` stays. Without `cache`
        what `headrace tune` or a first start found is not used: it may serve another file than the one that the tables
        name.
        """
        scratch = Path(tempfile.mkdtemp(prefix="headrace-bench-")) if ssd is None else None
        settings, env, ready_s = ["--set", f"tiers.ssd_path={ssd or scratch}"], None, READY_S
        if self.cache is not None and name == HEADRACE:
            env, ready_s = {"XDG_CACHE_HOME": str(self.cache)}, FIRST_S
        else:
            threads = [f"engine.threads={self.threads}", f"engine.threads_batch={self.threads}"]
            settings = [part for one in ("model.tuned=false", *threads) for part in ("--set", one)] + settings
        port = free_port()
        command = [sys.executable, "-m", "headrace", "serve", model or str(self.model), "--port", str(port)]
        command += [*settings, *flags]
        return self._server(name, command, port, "/readyz", env=env, scratch=scratch, ready_s=ready_s)

    @property
    def theirs(self) -> Path:
        """The file that the peers serve."""
        return self.peers_model or self.model

    def llama_server(self, *flags: str, name: str = "llama-server") -> Server:
        """llama-server with its defaults but for the number of threads, and `flags`."""
        program = self.programs.llama_server
        assert program is not None
        port = free_port()
        command = llama_server.command(program, self.theirs, port, self.threads, *flags)
        return self._server(name, command, port, "/health", env={"LD_LIBRARY_PATH": str(program.parent)})

    def server_py(self, name: str = "server.py") -> Server:
        """llama-cpp-python's example server. It takes a JSON file, which is written beside the results."""
        program = self.programs.server_py
        assert program is not None
        port = free_port()
        settings = self.folder / "server.py.json"
        settings.write_text(
            json.dumps(example_server.config(self.theirs, self.model.stem, port, self.threads), indent=1)
        )
        command = example_server.command(self.programs.peer_python, program, settings)
        return self._server(name, command, port, "/healthz")

    def python_server(self, name: str = python_server.NAME) -> Server:
        """llama-cpp-python's own server."""
        runs = self.programs.python_server
        assert runs is not None
        port = free_port()
        command = python_server.command(runs, self.theirs, self.model.stem, port, self.threads)
        return self._server(name, command, port, "/v1/models")

    def vllm(self, name: str = vllm.NAME) -> Server:
        """vLLM on as many cores as the others have threads."""
        runs, weights = self.programs.vllm, self.programs.vllm_weights
        assert runs is not None
        assert weights is not None
        port = free_port()
        command = vllm.command(runs, weights, self.model, port)
        env = vllm.environment(self.threads, sorted(os.sched_getaffinity(0)))
        return self._server(name, command, port, "/health", env=env, ready_s=vllm.READY_S)

    def peers(self) -> Mapping[str, Callable[[], Server]]:
        """Name → start, of those whose programs are there."""
        found: dict[str, Callable[[], Server]] = {}
        if self.programs.llama_server is not None:
            tuned = llama_server.TUNED_NAME
            found[llama_server.NAME] = self.llama_server
            found[tuned] = lambda: self.llama_server(*llama_server.TUNED, name=tuned)
        if self.programs.server_py is not None:
            found[example_server.NAME] = self.server_py
        if self.programs.python_server is not None:
            found[python_server.NAME] = self.python_server
        if self.programs.vllm is not None and self.programs.vllm_weights is not None:
            found[vllm.NAME] = self.vllm
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
        ready_s: float = READY_S,
    ) -> Server:
        log, url = self.folder / f"{name}.log", f"http://127.0.0.1:{port}"
        return Server(name, command, url=url, ready=ready, log=log, env=env, scratch=scratch, ready_s=ready_s)
