from __future__ import annotations

import random

import pytest

from headrace.kv.pool import Pool
from naive import CheckedPool


def test_shared_cells_count_once() -> None:
    pool = Pool(cells=1000, slots=4)
    a = pool.take()
    pool.extend(a, 900)
    b = pool.take()
    pool.share(a, b, 900)
    pool.extend(a, 40)
    pool.extend(b, 12)
    assert (pool.used, pool.held, pool.free, pool.idle) == (952, 952, 48, 0)
    assert (pool.length(a), pool.length(b)) == (940, 912)


def test_a_cell_is_free_when_the_last_slot_lets_go() -> None:
    pool = Pool(cells=100, slots=4)
    a = pool.take()
    pool.extend(a, 50)
    b = pool.take()
    pool.share(a, b, 20)
    pool.release(a)
    assert (pool.used, pool.free) == (20, 80)
    pool.release(b)
    assert (pool.used, pool.held, pool.free, pool.slots_free) == (0, 0, 100, 4)


def test_a_cell_is_idle_when_no_running_slot_has_it() -> None:
    pool = Pool(cells=100, slots=4)
    a = pool.take()
    pool.extend(a, 50)
    pool.retire(a)
    assert (pool.used, pool.held, pool.idle) == (50, 0, 50)
    b = pool.take()
    pool.share(a, b, 20)
    assert (pool.used, pool.held, pool.idle) == (50, 20, 30)
    pool.retire(b)
    assert (pool.held, pool.idle) == (0, 50)
    pool.release(a)
    assert (pool.used, pool.idle) == (20, 20)


def test_truncate_keeps_what_others_share() -> None:
    pool = Pool(cells=100, slots=4)
    a = pool.take()
    pool.extend(a, 50)
    b = pool.take()
    pool.share(a, b, 30)
    pool.truncate(a, 10)
    assert (pool.length(a), pool.length(b), pool.used) == (10, 30, 30)
    pool.truncate(a, 99)
    assert pool.length(a) == 10
    pool.extend(a, 5)
    assert (pool.length(a), pool.used) == (15, 35)


def test_slots_run_out() -> None:
    pool = Pool(cells=100, slots=2)
    assert {pool.take(), pool.take()} == {0, 1}
    with pytest.raises(IndexError):
        pool.take()


def test_slots_by_kind() -> None:
    pool = Pool(cells=100, slots=4)
    a, b = pool.take(), pool.take()
    pool.take()
    pool.extend(a, 3)
    pool.retire(a)
    assert (pool.slots_running, pool.slots_idle, pool.slots_free) == (2, 1, 1)
    pool.release(a)
    pool.release(b)
    assert (pool.slots_running, pool.slots_idle, pool.slots_free) == (1, 0, 3)


def test_its_width_is_that_of_the_layout() -> None:
    pool = Pool(cells=100, slots=4)
    pool.layout.place([(0, 12)])
    assert pool.width == 12


def test_it_says_how_full_it_is() -> None:
    pool = Pool(cells=100, slots=3)
    pool.extend(pool.take(), 30)
    a = pool.take()
    pool.extend(a, 20)
    pool.retire(a)
    assert repr(pool) == "<Pool [30 held, 20 idle, 50 free cells; 1 free slots]>"


def test_it_equals_a_pool_of_single_cells_whatever_is_done() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        pool = CheckedPool(cells=500, slots=6)
        slots, running = pool.naive.slots, pool.naive.running
        for _ in range(120):
            match rng.randrange(7):
                case 0 | 1 if pool.slots_free:
                    slot = pool.take()
                    sources = [s for s in slots if s != slot and slots[s]]
                    if sources and rng.random() < 0.7:
                        source = rng.choice(sources)
                        pool.share(source, slot, rng.randint(1, len(slots[source])))
                case 2 | 3 if running:
                    pool.extend(rng.choice(sorted(running)), rng.randint(1, 8))
                case 4 if slots:
                    slot = rng.choice(sorted(slots))
                    pool.truncate(slot, rng.randint(0, len(slots[slot]) + 1))
                case 5 if running:
                    pool.retire(rng.choice(sorted(running)))
                case 6 if slots:
                    pool.release(rng.choice(sorted(slots)))
        for slot in list(slots):
            pool.release(slot)
        assert (pool.used, pool.held, pool.slots_free) == (0, 0, 6)
