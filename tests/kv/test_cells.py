from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.core.plan import Chunk
from headrace.engines import llama_lib
from headrace.engines.base import StepAborted, StepFailed
from headrace.engines.llama import LlamaEngine, LlamaSettings
from headrace.engines.llama_lib import C
from headrace.kv.cells import Cells
from headrace.testing import ManualClock
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


def test_a_state_is_put_back_in_the_order_of_the_cells_it_came_from() -> None:
    cells = Cells(100)
    cells.place([(0, 4), (1, 3)])
    cells.truncate(0, 2)
    cells.place([(1, 3)])  # positions 3 to 5 lie in 2, 3 and 7
    assert cells.of(1) == [4, 5, 6, 2, 3, 7]
    order = cells.saved_order(1, 1, 6)
    assert order == [3, 4, 1, 2, 5]
    cells.truncate(1, 1)
    cells.place([(2, 1)])
    assert cells.load(1, order)
    assert cells.of(1) == [4, 6, 7, 3, 5, 8]
    assert cells.of(2) == [2]
    assert not cells.load(3, range(99))


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


# --- against the real allocator, which draws its cells into its log when it is asked to debug


class Watched:
    """A real engine beside `Cells`; every act is done to both. `seen`: (width, used, head, picture) at each search."""

    def __init__(self, path: Path) -> None:
        self.seen: list[tuple[int, int, int, str]] = []
        self._head: tuple[int, int, int] = (0, 0, 0)
        self.log = C.llama_log_callback(self._on_log)
        C.llama_log_set(self.log, ctypes.c_void_p(0))
        self.engine = LlamaEngine(
            LlamaSettings(path, "watched", cells=256, slots=8, batch=256, threads=1, threads_batch=1), ManualClock()
        )
        self.cells = Cells(self.engine.n_cells)
        self.seen.clear()

    def _on_log(self, _level: int, text: bytes, _data: Any) -> None:
        line = text.decode()
        found = re.match(r"find_slot: .* n = +(\d+), used = +(\d+), head = +(\d+)", line)
        picture = line.replace(" *", "").replace("\n", "")
        if found:
            self._head = int(found[1]), int(found[2]), int(found[3])
        elif re.fullmatch(r"[.0-9M]{256}", picture):
            self.seen.append((*self._head, picture))

    def picture(self) -> str:
        marks = ["."] * self.cells.n
        for slot in range(8):
            for cell in self.cells.of(slot):
                marks[cell] = str(slot) if marks[cell] == "." else "M"
        return "".join(marks)

    def step(self, rows: list[tuple[int, int]], *, abort: bool = False) -> str:
        """What came of it; the picture before it must have been the same on both sides."""
        before = self.picture()
        chunks = [Chunk(slot, len(self.cells.of(slot)), [5] * count, None) for slot, count in rows]
        room = sum(count for _, count in rows) <= self.cells.n - self.cells.used
        if abort:
            self.engine.abort()
        if not room:
            outcome = "failed"
            with pytest.raises(StepFailed, match="gave 1:"):
                self.engine.step(chunks)
            assert not self.cells.place(rows)
        elif abort:
            outcome = "aborted"
            with pytest.raises(StepAborted):
                self.engine.step(chunks)
        else:
            outcome = "done"
            self.engine.step(chunks)
            assert self.cells.place(rows)
        width, used, head, picture = self.seen[-1]
        assert picture == before
        assert (width, used) == (len(before.rstrip(".")), sum(mark != "." for mark in before))
        assert "." not in before[:head], "a free cell below the head: the search is not for the lowest one"
        return outcome

    def copy(self, source: int, target: int, length: int) -> None:
        self.engine.copy(source, target, length)
        self.cells.share(source, target, length)

    def trim(self, slot: int, length: int) -> None:
        self.engine.trim(slot, length)
        self.cells.truncate(slot, length)

    def reload(self, slot: int) -> None:
        """The slot's state out of the pool and in again: it moves to the lowest free cells."""
        context, order = self.engine._context, self.cells.saved_order(slot, 0, len(self.cells.of(slot)))
        size = C.llama_state_seq_get_size(context, slot)
        state = (ctypes.c_uint8 * size)()
        assert C.llama_state_seq_get_data(context, state, size, slot) == size
        self.trim(slot, 0)
        assert C.llama_state_seq_set_data(context, state, size, slot) == size
        assert self.cells.load(slot, order)


@pytest.fixture
def watched(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setenv("LLAMA_KV_CACHE_DEBUG", "3")
    one = Watched(demo_model)
    yield one
    one.engine.close()
    C.llama_log_set(llama_lib._on_log, ctypes.c_void_p(0))


@pytest.mark.real
def test_the_real_allocator_places_every_row_in_the_same_cell(watched: Watched) -> None:
    rng = random.Random(5)
    outcomes: list[str] = []
    cells = watched.cells
    for n in range(28):
        slot, target = rng.sample(range(8), 2)
        match n % 5:
            case 0 if cells.of(slot):
                watched.trim(target, 0)
                watched.copy(slot, target, rng.randint(1, len(cells.of(slot))))
            case 1 | 2:
                watched.trim(slot, rng.randint(0, len(cells.of(slot))))
            case 3 if cells.of(slot) and cells.n - cells.used > len(cells.of(slot)):
                watched.reload(slot)
        rows = [(s, 1) for s in rng.sample(range(8), rng.randint(1, 4))]
        if n % 2:
            rows[-1] = rows[-1][0], rng.choice([3, 12, 25, cells.n - cells.used - len(rows) + 2])
        outcomes.append(watched.step([row for row in rows if row[1] > 0], abort=n % 7 == 6))
    assert set(outcomes) == {"done", "failed", "aborted"}
    assert any("M" in picture for *_, picture in watched.seen)
    assert max(len(re.findall(r"\.+", picture)) for *_, picture in watched.seen) > 3, "the pool was never in pieces"
