from __future__ import annotations

import random

import pytest

from headrace.kv.cells import Cells
from naive import NaiveCells


def test_the_rows_of_a_step_lie_in_the_order_of_the_batch() -> None:
    cells = Cells(100)
    assert cells.place([(0, 4), (1, 1), (2, 3)])
    assert cells.place([(0, 1), (2, 1)])
    assert cells.of(0) == [0, 1, 2, 3, 8]
    assert cells.of(1) == [4]
    assert cells.of(2) == [5, 6, 7, 9]
    assert (cells.used, cells.shared, cells.width) == (10, 0, 10)


def test_a_shared_prefix_takes_no_cells() -> None:
    cells = Cells(100)
    cells.place([(0, 10)])
    cells.share(0, 1, 6)
    cells.share(0, 2, 3)
    assert (cells.used, cells.shared) == (10, 6)
    cells.truncate(0, 0)
    assert (cells.used, cells.shared, cells.width) == (6, 3, 6)
    cells.truncate(2, 0)
    assert (cells.used, cells.shared) == (6, 0)
    cells.truncate(1, 0)
    assert (cells.used, cells.shared, cells.width) == (0, 0, 0)


def test_freed_cells_are_used_before_new_ones() -> None:
    cells = Cells(100)
    cells.place([(0, 10)])
    cells.place([(1, 10)])
    cells.truncate(0, 4)
    cells.place([(2, 8)])
    assert cells.of(2) == [4, 5, 6, 7, 8, 9, 20, 21]


def test_without_room_nothing_changes() -> None:
    cells = Cells(10)
    cells.place([(0, 8)])
    assert not cells.place([(0, 1), (1, 2)])
    assert (cells.used, cells.width, cells.of(0), cells.of(1)) == (8, 8, list(range(8)), [])
    assert cells.place([(0, 1), (1, 1)])
    assert not cells.place([(0, 1)])


@pytest.mark.parametrize(("width", "attended"), [(0, 256), (1, 256), (256, 256), (257, 512), (900, 1000)])
def test_attention_works_on_multiples_of_256_cells(width: int, attended: int) -> None:
    cells = Cells(1000)
    if width:
        cells.place([(0, width)])
    assert cells.attended == attended


def test_fragmentation_compares_the_longest_free_row_with_all_free_cells() -> None:
    cells = Cells(100)
    assert (cells.largest_free_run, cells.fragmentation) == (100, 0.0)
    cells.place([(0, 20), (1, 20), (2, 40)])
    cells.truncate(0, 0)
    assert (cells.largest_free_run, cells.fragmentation) == (20, 0.5)
    cells.truncate(1, 0)
    assert cells.largest_free_run == 40
    assert cells.fragmentation == pytest.approx(1 / 3)
    cells.place([(3, 60)])
    assert (cells.largest_free_run, cells.fragmentation) == (0, 0.0)


def test_unknown_slots_hold_nothing() -> None:
    cells = Cells(10)
    cells.truncate(3, 0)
    cells.share(3, 4, 5)
    assert (cells.of(3), cells.of(4), cells.used) == ([], [], 0)


def test_256_slots_can_share_a_cell() -> None:
    cells = Cells(300)
    cells.place([(0, 2)])
    for slot in range(1, 256):
        cells.share(0, slot, 2)
    for slot in range(255):
        cells.truncate(slot, 0)
    assert (cells.used, cells.shared) == (2, 0)
    cells.truncate(255, 1)
    assert cells.used == 1


def test_it_says_how_full_it_is() -> None:
    cells = Cells(10)
    cells.place([(0, 3)])
    cells.share(0, 1, 2)
    assert repr(cells) == "<Cells [3 of 10 used, 2 shared, width 3]>"


def test_it_equals_an_allocator_that_looks_at_every_cell() -> None:
    refused = given_up = 0
    for seed in range(80):
        rng = random.Random(seed)
        n = rng.choice([20, 60, 200, 700])
        cells, naive = Cells(n), NaiveCells(n)
        for _ in range(200):
            slot = rng.randrange(8)
            match rng.randrange(8):
                case 0 | 1 | 2 | 3 as kind:
                    rows = [(s, 1) for s in rng.sample(range(8), rng.randint(1, 8))]
                    if rng.random() < 0.6:
                        rows[-1] = rows[-1][0], rng.randint(1, n // 3)
                    if kind == 3:
                        given_up += naive.give_up(rows)
                    else:
                        done = naive.place(rows)
                        assert cells.place(rows) == done
                        refused += not done
                case 4 if naive.slots[slot]:
                    target = next((s for s in range(8) if not naive.slots[s]), None)
                    if target is not None:
                        length = rng.randint(1, len(naive.slots[slot]))
                        cells.share(slot, target, length)
                        naive.share(slot, target, length)
                case 5 | 6:
                    length = rng.randint(0, len(naive.slots[slot]) + 2)
                    cells.truncate(slot, length)
                    naive.truncate(slot, length)
                case 7:
                    cells.truncate(slot, 0)
                    naive.truncate(slot, 0)
            for s in range(8):
                assert cells.of(s) == naive.slots[s]
            assert (cells.used, cells.shared, cells.width) == (naive.used, naive.shared, naive.width)
            assert cells.largest_free_run == naive.largest_free_run
    assert refused > 100
    assert given_up > 100
