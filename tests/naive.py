"""Slow and obvious versions of what `headrace.kv` does cleverly, and pairs that compare both at every call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count

from headrace.kv.pool import Pool
from headrace.kv.radix import Radix


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


class NaiveIndex:
    """A list of tokens a slot."""

    def __init__(self) -> None:
        self.slots: dict[int, list[int]] = {}

    def longest(self, tokens: Sequence[int]) -> int:
        return max((shared(held, tokens) for held in self.slots.values()), default=0)

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        self.slots.setdefault(slot, []).extend(tokens)

    def truncate(self, slot: int, length: int) -> None:
        if slot in self.slots:
            del self.slots[slot][length:]
            if not self.slots[slot]:
                del self.slots[slot]

    def redundant(self, slot: int) -> bool:
        mine = self.slots.get(slot, [])
        return not mine or any(held[: len(mine)] == mine for other, held in self.slots.items() if other != slot)

    def __repr__(self) -> str:
        prefixes = {tuple(held[: i + 1]) for held in self.slots.values() for i in range(len(held))}
        return f"<Radix [{len(self.slots)} slots, {len(prefixes)} tokens]>"  # a tree holds each distinct prefix once


class CheckedIndex:
    """`Radix`, compared with `NaiveIndex` at every call."""

    def __init__(self) -> None:
        self.real = Radix()
        self.naive = NaiveIndex()

    def match(self, tokens: list[int]) -> tuple[int, int | None]:
        length, slot = self.real.match(tokens)
        assert length == self.naive.longest(tokens)
        if length:
            assert slot is not None
            assert self.naive.slots[slot][:length] == tokens[:length]
        else:
            assert slot is None
        return length, slot

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        self.real.extend(slot, tokens)
        self.naive.extend(slot, tokens)
        self.compare(slot)

    def truncate(self, slot: int, length: int) -> None:
        self.real.truncate(slot, length)
        self.naive.truncate(slot, length)
        self.compare(slot)

    def tokens(self, slot: int) -> list[int]:
        found = self.real.tokens(slot)
        assert found == self.naive.slots.get(slot, [])
        return found

    def remove(self, slot: int) -> None:
        self.real.remove(slot)
        self.naive.truncate(slot, 0)
        self.compare(slot)

    def redundant(self, slot: int) -> bool:
        answer = self.real.redundant(slot)
        assert answer == self.naive.redundant(slot)
        return answer

    def compare(self, slot: int) -> None:
        mine = self.naive.slots.get(slot, [])
        assert self.real.length(slot) == len(mine)
        assert self.real.tokens(slot) == mine

    def compare_all(self) -> None:
        for slot in self.naive.slots:
            self.compare(slot)
        assert repr(self.real) == repr(self.naive)


class NaivePool:
    """Every cell is a number of its own; a slot is a list of them."""

    def __init__(self, cells: int, slots: int) -> None:
        self.cells = cells
        self.unused = set(range(slots))
        self.slots: dict[int, list[int]] = {}
        self.running: set[int] = set()
        self._fresh = count()

    @property
    def used(self) -> int:
        return len({cell for held in self.slots.values() for cell in held})

    @property
    def held(self) -> int:
        return len({cell for slot in self.running for cell in self.slots[slot]})

    def take(self, slot: int) -> None:
        self.unused.remove(slot)
        self.slots[slot] = []
        self.running.add(slot)

    def extend(self, slot: int, cells: int) -> None:
        self.slots[slot] += [next(self._fresh) for _ in range(cells)]

    def release(self, slot: int) -> None:
        del self.slots[slot]
        self.running.discard(slot)
        self.unused.add(slot)


class CheckedPool:
    """`Pool`, compared with `NaivePool` at every call; misuse is refused."""

    def __init__(self, *, cells: int, slots: int) -> None:
        self.real = Pool(cells=cells, slots=slots)
        self.naive = NaivePool(cells, slots)
        self.cells = cells
        self.used = self.held = 0

    @property
    def free(self) -> int:
        return self.real.free

    @property
    def width(self) -> int:
        return self.real.width

    @property
    def idle(self) -> int:
        return self.real.idle

    @property
    def slots_free(self) -> int:
        return self.real.slots_free

    def take(self) -> int:
        slot = self.real.take()
        self.naive.take(slot)
        self.compare()
        return slot

    def share(self, source: int, target: int, length: int) -> None:
        assert source != target
        assert 0 < length <= len(self.naive.slots[source])
        assert target in self.naive.running
        assert not self.naive.slots[target], "the target of a share must be empty"
        self.real.share(source, target, length)
        self.naive.slots[target] = self.naive.slots[source][:length]
        self.compare()

    def extend(self, slot: int, cells: int) -> None:
        assert slot in self.naive.running
        assert cells > 0
        self.real.extend(slot, cells)
        self.naive.extend(slot, cells)
        self.compare()

    def truncate(self, slot: int, length: int) -> None:
        self.real.truncate(slot, length)
        del self.naive.slots[slot][length:]
        self.compare()

    def retire(self, slot: int) -> None:
        assert slot in self.naive.running
        self.real.retire(slot)
        self.naive.running.remove(slot)
        self.compare()

    def release(self, slot: int) -> None:
        self.real.release(slot)
        self.naive.release(slot)
        self.compare()

    def compare(self) -> None:
        real, naive = self.real, self.naive
        self.used, self.held = real.used, real.held
        used, held = naive.used, naive.held
        assert (real.used, real.held, real.free, real.idle) == (used, held, naive.cells - used, used - held)
        assert real.slots_free == len(naive.unused)
        for slot, cells in naive.slots.items():
            assert real.length(slot) == len(cells)


class NaiveCells:
    """llama.cpp's search for free cells with its moving `head`, one cell at a time; `owners[cell]`: who has it."""

    def __init__(self, n: int) -> None:
        self.owners: list[set[int]] = [set() for _ in range(n)]
        self.slots: dict[int, list[int]] = defaultdict(list)
        self.head = 0

    @property
    def used(self) -> int:
        return sum(bool(owners) for owners in self.owners)

    @property
    def shared(self) -> int:
        return sum(len(owners) > 1 for owners in self.owners)

    @property
    def width(self) -> int:
        return max((cell + 1 for cell, owners in enumerate(self.owners) if owners), default=0)

    @property
    def largest_free_run(self) -> int:
        picture = "".join("x" if owners else "." for owners in self.owners)
        return max(map(len, picture.split("x")))

    def _search(self, tokens: int) -> list[int] | None:
        at = self.head
        if at > self.used + 2 * tokens:
            at = 0
        found: list[int] = []
        for step in range(len(self.owners)):
            cell = (at + step) % len(self.owners)
            if not self.owners[cell]:
                found.append(cell)
                if len(found) == tokens:
                    return found
        return None

    def place(self, rows: Sequence[tuple[int, int]]) -> bool:
        found = self._search(sum(count for _, count in rows))
        if found is None:
            return False
        order = [slot for slot, count in rows for _ in range(count)]
        for slot, cell in zip(order, found, strict=True):
            self.owners[cell].add(slot)
            self.slots[slot].append(cell)
        self.head = found[-1] + 1
        return True

    def give_up(self, rows: Sequence[tuple[int, int]]) -> bool:
        """A step that is aborted: its rows are placed, then removed slot by slot. False if there was no room."""
        before = {slot: len(self.slots[slot]) for slot, _ in rows}
        if not self.place(rows):
            return False
        for slot in sorted(before):
            self.truncate(slot, before[slot])
        return True

    def share(self, source: int, target: int, length: int) -> None:
        self.slots[target] = self.slots[source][:length]
        for cell in self.slots[target]:
            self.owners[cell].add(target)

    def truncate(self, slot: int, length: int) -> None:
        gone = self.slots[slot][length:]
        del self.slots[slot][length:]
        freed = []
        for cell in gone:
            self.owners[cell].discard(slot)
            if not self.owners[cell]:
                freed.append(cell)
        self.head = min([self.head, *freed])
