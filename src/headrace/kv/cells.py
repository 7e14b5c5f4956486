"""Where in the KV pool each slot's tokens lie: llama.cpp's own allocator, followed step by step.

    cell     0         1         2         3
             0123456789012345678901234567890123456789
    owner    aaaaaaMMMMbb..aabb....cccc..............     a slot's letter; M: several slots; .: free
                         ▲ next                   ▲ width 26: what every step has to look at, used or not

Rules, read from the library's source for one unified stream and steps of one ubatch:
1. The rows of a step take the lowest free cells, in the order of the batch; a step with more rows than free cells
   fails and changes nothing, and so does one that is given up.
2. A saved state is put back as one step's rows are.
3. A cell is free when its last slot lets go. Sharing a prefix moves nothing, and nothing ever moves by itself.
Why the lowest: the library searches from a `head`, around the end if need be. A step sets it behind what it filled,
and freeing pulls it back to the lowest cell that came free, so no cell below it is ever free. For the same reason its
rule for a head that has run ahead of the used cells never applies.
There is no call that tells any of this. It is followed because a step costs time for every cell below `width`, and
because a pool that falls to pieces would show in nothing else. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

PADDING = 256
"""Attention works on a multiple of this many cells."""


class Cells:
    """`n` cells; slots are small ints, at most 256 of them. What a slot holds is in the order of its positions."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.used = 0
        self.shared = 0
        """Cells that more than one slot has."""
        self.width = 0
        """The highest used cell + 1."""
        self._lowest = 0
        """No cell below is free."""
        self._taken = bytearray(n)
        self._taken_array = np.frombuffer(self._taken, dtype=np.uint8)  # the same memory, for whole slots at once
        self._further = np.zeros(n, dtype=np.uint8)
        """Slots that have the cell, beyond the first: 0 to 255."""
        self._slots: dict[int, array[int]] = {}

    def __repr__(self) -> str:
        return f"<Cells [{self.used} of {self.n} used, {self.shared} shared, width {self.width}]>"

    @property
    def attended(self) -> int:
        """Cells that attention works on: the width, padded as llama.cpp pads it."""
        return min(self.n, max(PADDING, -(-self.width // PADDING) * PADDING))

    @property
    def largest_free_run(self) -> int:
        """The longest row of free cells. Looks at all cells: for a scrape, not for a step."""
        edges = np.flatnonzero(np.diff(self._taken_array, prepend=1, append=1))
        return int((edges[1::2] - edges[::2]).max()) if len(edges) else 0

    @property
    def fragmentation(self) -> float:
        """Part of the free cells that is outside of their longest row, 0 to 1; 0 when nothing is free."""
        free = self.n - self.used
        return 1.0 - self.largest_free_run / free if free else 0.0

    def of(self, slot: int) -> list[int]:
        """The slot's cells, by position."""
        return list(self._slots.get(slot, ()))

    def place(self, rows: Sequence[tuple[int, int]]) -> bool:
        """One step's (slot, tokens) in batch order. False, and nothing is changed, if there is no room."""
        total = 0
        for _, count in rows:
            total += count
        if total > self.n - self.used:
            return False
        taken, slots = self._taken, self._slots
        at = self._lowest
        for slot, count in rows:
            held = slots.get(slot)
            if held is None:
                held = slots[slot] = array("i")
            if count == 1:  # a decode: on every token's path
                at = taken.find(0, at)
                taken[at] = 1
                held.append(at)
                at += 1
                continue
            while count:
                start = taken.find(0, at)
                end = min(start + count, self.n)
                found = taken.find(1, start, end)
                at = end if found < 0 else found
                taken[start:at] = b"\1" * (at - start)
                held.extend(range(start, at))
                count -= at - start
        self._lowest = at
        self.width = max(self.width, at)
        self.used += total
        return True

    def saved_order(self, slot: int, start: int, end: int) -> list[int]:
        """Positions [start, end) of the slot in the order in which llama.cpp saves them: by cell."""
        cells = self._slots[slot]
        return sorted(range(start, end), key=cells.__getitem__)

    def load(self, slot: int, positions: Sequence[int]) -> bool:
        """A saved state goes into the pool, behind what the slot holds; as `place` if there is no room.

        `positions`: those of the state in its own order, which is `saved_order` at the time of saving. The rows take
        cells in that order, so a position may come to lie elsewhere than computing it would have put it.
        """
        if not self.place([(slot, len(positions))]):
            return False
        held = self._slots[slot]
        for position, cell in zip(positions, held[-len(positions) :], strict=True):
            held[position] = cell
        return True

    def share(self, source: int, target: int, length: int) -> None:
        """The empty `target` gets the first `length` cells of `source`."""
        cells = self._slots.get(source, array("i"))[:length]
        if not cells:
            return
        at = np.array(cells)
        further = self._further[at]
        self.shared += int(np.count_nonzero(further == 0))
        self._further[at] = further + 1
        self._slots[target] = cells

    def truncate(self, slot: int, length: int) -> None:
        """Let go of the slot's cells from position `length` on."""
        cells = self._slots.get(slot)
        if cells is None or len(cells) <= length:
            return
        gone = np.array(cells[length:])
        if length:
            del cells[length:]
        else:
            del self._slots[slot]
        further = self._further[gone]
        alone = further == 0
        freed, kept = gone[alone], gone[~alone]
        if len(kept):
            self.shared -= int(np.count_nonzero(further == 1))
            self._further[kept] -= 1
        if len(freed):
            self._taken_array[freed] = 0
            self.used -= len(freed)
            self._lowest = min(self._lowest, int(freed.min()))
            if int(freed.max()) + 1 == self.width:
                self.width = self._taken.rfind(1, 0, self.width) + 1
