"""What rows of a prompt cost beside readers, one `llama_decode` or two: `python -m headrace_bench.cliff FILE …`.

    together   readers and prompt in one batch          apart     the readers' batch, then the prompt's
    padded     apart, the prompt's filled up to 64 rows that nobody reads

Rules: one thread and CPU time, so that what else the machine does lengthens nothing; the least of three; the library is
imported only when it runs as a program of its own. A line a depth, milliseconds.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import random
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROWS = (8, 20, 30, 50, 64, 128)
TILE = 64
SPARE = 30
"""The sequence of rows that nobody reads."""

Row = tuple[int, int, bool]
"""Sequence, position, whether its logits are wanted."""


class Steps:
    """One context of a model file, asked for single steps."""

    def __init__(self, file: Path, flash: bool) -> None:
        self.C: Any = importlib.import_module("llama_cpp.llama_cpp")
        self._log = self.C.llama_log_callback(lambda *_: None)
        self.C.llama_log_set(self._log, ctypes.c_void_p(0))
        self.C.llama_backend_init()
        self._model = self.C.llama_model_load_from_file(str(file).encode(), self.C.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"{file}: llama.cpp cannot load it")
        self._vocabulary = int(self.C.llama_vocab_n_tokens(self.C.llama_model_get_vocab(self._model)))
        params = self.C.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 16384, 1024, 1024, 32
        params.kv_unified, params.flash_attn_type = True, int(flash)
        params.n_threads = params.n_threads_batch = 1
        self._context = self.C.llama_init_from_model(self._model, params)
        self._memory = self.C.llama_get_memory(self._context)

    def step(self, rows: Sequence[Row]) -> float:
        """CPU seconds."""
        batch = self.C.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (sequence, position, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = random.randrange(self._vocabulary), position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, wanted
        began = time.process_time()
        code = self.C.llama_decode(self._context, batch)
        self.C.llama_get_logits(self._context)
        took = time.process_time() - began
        self.C.llama_batch_free(batch)
        if code:
            raise SystemExit(f"llama_decode gave {code}")
        return took

    def forget(self, sequence: int, length: int) -> None:
        """Positions from `length` on."""
        self.C.llama_memory_seq_rm(self._memory, sequence, length, -1)


def readers(count: int, read: int) -> list[Row]:
    """One row each, of the sequences 1 … `count`."""
    return [(1 + i, read, True) for i in range(count)]


def prompt(depth: int, rows: int) -> list[Row]:
    """`rows` of sequence 0 after its first `depth`."""
    return [(0, depth + i, False) for i in range(rows)]


def padding(rows: int) -> list[Row]:
    """What fills a batch of `rows` up to a tile."""
    return [(SPARE, i, False) for i in range(max(0, TILE - rows))]


def ways(count: int, read: int, depth: int, rows: int) -> dict[str, list[list[Row]]]:
    """Name → the batches of a step."""
    reading, computed = readers(count, read), prompt(depth, rows)
    found = {"together": [reading + computed], "apart": [reading, computed]}
    if rows < TILE:
        found["padded"] = [reading, computed + padding(rows)]
    return found


def measure(steps: Steps, count: int, read: int, depths: Iterable[int]) -> Iterable[str]:
    """A line a depth and number of rows."""
    for reader in range(1, count + 1):
        _fill(steps, reader, read)
    for depth in depths:
        steps.forget(0, 0)
        _fill(steps, 0, depth)
        for rows in ROWS:
            cells = []
            for name, batches in ways(count, read, depth, rows).items():
                least = min(_once(steps, batches, count, read, depth) for _ in range(3))
                cells.append(f"{name} {least * 1e3:.0f}")
            yield f"{count} readers of {read}, {rows} rows at depth {depth}: " + ", ".join(cells)


def _once(steps: Steps, batches: list[list[Row]], count: int, read: int, depth: int) -> float:
    took = sum(steps.step(batch) for batch in batches if batch)
    for sequence, length in ((0, depth), (SPARE, 0), *((1 + i, read) for i in range(count))):
        steps.forget(sequence, length)
    return took


def _fill(steps: Steps, sequence: int, length: int) -> None:
    for start in range(0, length, 256):
        steps.step([(sequence, at, False) for at in range(start, min(start + 256, length))])


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m headrace_bench.cliff")
    parser.add_argument("file", type=Path)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--read", type=int, default=500, help="tokens that each of them has read")
    parser.add_argument("--depths", default="0,512,1024", help="of the prompt")
    parser.add_argument("--no-flash", action="store_true")
    asked = parser.parse_args()
    depths = [int(word) for word in asked.depths.split(",")]
    for line in measure(Steps(asked.file, not asked.no_flash), asked.readers, asked.read, depths):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
