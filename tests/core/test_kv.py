from __future__ import annotations

import msgspec

from headrace.core.kv import CellPool, Pin, PrefixIndex
from headrace.kv.pool import Pool
from headrace.kv.radix import Radix
from naive import CheckedIndex, CheckedPool


def test_the_books_fit_their_ports() -> None:
    index: PrefixIndex = Radix()
    pool: CellPool = Pool(cells=9, slots=1)
    checked: tuple[PrefixIndex, CellPool] = CheckedIndex(), CheckedPool(cells=9, slots=1)
    assert index.match([1]) == checked[0].match([1]) == (0, None)
    assert (pool.cells, pool.free, pool.slots_free) == (checked[1].cells, checked[1].free, checked[1].slots_free)


def test_a_pin_crosses_processes() -> None:
    pin = Pin("support", (1, 2, 3))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(pin), type=Pin) == pin
