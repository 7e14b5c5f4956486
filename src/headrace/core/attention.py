"""How llama.cpp's flash attention on a CPU cuts the rows of a step into tiles, and what that makes a step look at.

    head 0                head 1                head 2            all rows of one head, then of the next
    ├── rows ───────┤├── rows ───────┤├── rows ───────┤
    ├─ chunk 0 ─────────┼─ chunk 1 ─────────┼─ chunk 2 …          four chunks a thread, as long as each other
    [tile 64][rest][9]  [55][ tile 64 ]…                          a tile ends at 64 rows, a chunk's or a head's end

A step of fewer than TILE rows is computed row by row, each for its own positions, at three times the price and more.
From TILE rows on, a tile costs the same however few of its rows are used, and looks at all that one of them has to look
at. So 64 rows of nine heads on two threads are 16 tiles and not nine, and rows that nobody reads, at the end of a step,
cost little attention of their own: the tiles that hold only such rows have nothing to look at.
And one row of a reader makes its tile look at all that the reader has read, for all 64 rows: eight readers of 500
tokens made a step with 64 rows of a prompt three times as long as two steps, one for them and one for the prompt.

Rules: read from ggml_compute_forward_flash_attn_ext_f16 of llama.cpp (ggml-cpu/ops.cpp) and checked by measurement
(docs/benchmarks.md, "The cliff at 64 rows"): one cost a tile and position explains steps of 64, 103 and 256 rows at
depth 1,024 within 6 %, where a cost a row differs by half. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

TILE = 64
"""Rows of a tile, and the fewest of a step that is computed in tiles (GGML_FA_TILE_Q)."""

CHUNKS = 4
"""Chunks a thread."""


@dataclass(frozen=True, slots=True)
class Attention:
    """What an engine's attention is like. `heads`: query heads of a layer; `threads`: of a large step.

    `tiled` False: row by row at every size, as without flash attention or with a cache that is neither F16 nor F32.
    `splits`: the engine can compute readers and prompts of a step one after the other. `pads`: it can fill a step up
    with rows that nobody reads.
    """

    heads: int = 1
    threads: int = 1
    tiled: bool = True
    splits: bool = False
    pads: bool = False

    def share(self, rows: int, real: int) -> float:
        """How much more the tiles of a step look at than its rows would, >= 1: each tile as TILE rows.

        `rows` of the step, >= TILE, of which the first `real` count, >= 1.
        """
        return TILE * tiles(rows, real, self.heads, self.threads) / (self.heads * real)


@lru_cache(maxsize=16384)
def tiles(rows: int, real: int, heads: int, threads: int) -> int:
    """Tiles of one layer that hold one of the first `real` of `rows` rows."""
    total = rows * heads
    size = -(-total // (CHUNKS * threads))
    chunks = -(-total // size)
    if threads == 1 or chunks < threads:
        chunks = threads
    size = -(-total // chunks)
    found = 0
    for begin in range(0, total, size):
        at, end = begin, min(begin + size, total)
        while at < end:
            row = at % rows
            found += row < real
            at += min(TILE, end - at, rows - row)
    return found
