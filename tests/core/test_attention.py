"""Tiles, counted as llama.cpp cuts them."""

from __future__ import annotations

import pytest

from headrace.core.attention import CHUNKS, TILE, Attention, tiles
from headrace.core.costmodel import CostModel, Work, positions


def by_hand(rows: int, real: int, heads: int, threads: int) -> int:
    """Row by row: who is in which tile."""
    total = rows * heads
    chunk = -(-total // (CHUNKS * threads))
    count = -(-total // chunk)
    if threads == 1 or count < threads:
        chunk = -(-total // threads)
    else:
        chunk = -(-total // count)
    found: set[int] = set()
    tile, length = -1, 0
    for at in range(total):
        if at % chunk == 0 or at % rows == 0 or length == TILE:
            tile, length = tile + 1, 0
        length += 1
        if at % rows < real:
            found.add(tile)
    return len(found)


@pytest.mark.parametrize("heads", [1, 3, 9, 14, 32])
@pytest.mark.parametrize("threads", [1, 2, 4, 7])
def test_tiles_are_those_that_a_count_by_hand_finds(heads: int, threads: int) -> None:
    for rows in (64, 65, 72, 100, 128, 200):
        for real in (1, 2, 20, 61, 64, rows):
            assert tiles(rows, real, heads, threads) == by_hand(rows, real, heads, threads)


def test_heads_that_are_no_whole_chunks_waste_tiles() -> None:
    assert tiles(64, 64, 9, 2) == 16
    assert tiles(512, 512, 9, 2) == 72
    assert tiles(64, 64, 32, 2) == 32
    assert Attention(32, 2).share(64, 64) == 1.0
    assert Attention(9, 2).share(64, 64) == pytest.approx(16 / 9)


def test_rows_that_nobody_reads_cost_less_than_rows() -> None:
    """As measured: 20 rows filled up to 64 looked at eleven tiles, 61 rows at sixteen."""
    assert tiles(64, 20, 9, 2) == 11
    assert tiles(64, 61, 9, 2) == 16


def test_a_share_is_never_below_one() -> None:
    for heads in (1, 2, 9, 16):
        for threads in (1, 2, 3, 8):
            for rows in range(TILE, 300, 7):
                for real in (1, rows // 2, rows):
                    assert Attention(heads, threads).share(rows, real) >= 1.0


# Milliseconds of one step, SmolLM2-135M in BF16, two threads of an AMD EPYC with AVX-512: at depth 0, at depth 1,024.
MEASURED = {(0, 64): (67, 150), (0, 256): (252, 470), (3, 61): (78, 162), (3, 100): (113, 242)}


def test_one_cost_a_tile_explains_what_was_measured() -> None:
    attention = Attention(9, 2)
    costs = []
    for (readers, prompt), (shallow, deep) in MEASURED.items():
        rows = readers + prompt
        back = attention.share(rows, rows) * (positions(1024, prompt) - positions(0, prompt))
        costs.append((deep - shallow) / back)
    assert max(costs) / min(costs) < 1.12
    per_row = [(deep - shallow) / (1024 * prompt) for (_, prompt), (shallow, deep) in MEASURED.items()]
    assert max(per_row) / min(per_row) > 1.45, "a cost a row does not"


def test_without_tiles_every_row_costs_alike() -> None:
    terms = (1e-3, 1e-3, 0.0, 1e-3, 1e-6, 3e-6, 0.0)
    model = CostModel(terms, attention=Attention(9, 2, tiled=False))
    assert model.predict(Work(128, 0, 1000, 0)) == pytest.approx(1e-3 + 128e-3 + 3e-3)
    assert model.prefill(1000, 10) == pytest.approx(10e-3 + 3e-6 * positions(1000, 10))


def test_a_reader_in_a_tile_is_looked_at_by_the_whole_tile() -> None:
    model = CostModel((0.0, 0.0, 0.0, 0.0, 1e-6, 0.0, 0.0), attention=Attention(32, 2))
    alone = model.predict(Work(64, 0, 64_000, 0))
    beside = model.predict(Work(63, 1, 63_000 + 500, 0, reading=500))
    assert beside - alone == pytest.approx(1e-6 * (64 * 500 - 1000), rel=1e-3)
