"""Who holds which part of the KV: slots of running sequences, and of finished ones kept for reuse.

    waiting ──enter──► running ──leave──► idle ──(least recently used)──► dropped
                          └────release────────────────────────────────────►┘

Rules: a running sequence is never robbed; idle slots go, least recently used first, when cells or slots are needed, or
when they are more than `idle_cells`; pinned ones only when nothing else is left. What is decided here leaves through
`take_ops`, in order, and is to be carried out before the next step. Prefixes are shared among sequences of one salt,
and those of the empty salt with nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from headrace.core.kv import CellPool, PrefixIndex
from headrace.core.plan import Copy, KvOp, Trim
from headrace.core.sequence import Sequence


class Residency:
    """Owner of index, pool and idle slots."""

    def __init__(
        self, *, index: Callable[[], PrefixIndex], pool: CellPool, idle_cells: int, prefix_cache: bool
    ) -> None:
        """`index` makes an empty one: each salt has its own."""
        self._make_index = index
        self._indexes: dict[str, PrefixIndex] = {"": index()}
        self._salts: dict[int, str] = {}
        self.pool = pool
        self.idle_cells = idle_cells
        self._prefix_cache = prefix_cache
        self.idle: dict[int, None] = {}
        """Slots of finished sequences, least recently used first."""
        self.pinned: set[int] = set()
        """Those of them that go last."""
        self._ops: list[KvOp] = []

    def __repr__(self) -> str:
        return f"<Residency [{len(self.idle)} idle slots, {len(self.pinned)} pinned, {self.pool!r}]>"

    def take_ops(self) -> list[KvOp]:
        """The KV operations since the last call, to be carried out in this order."""
        ops, self._ops = self._ops, []
        return ops

    def reuses(self, sequence: Sequence) -> bool:
        """May it read and leave cached prefixes?"""
        return self._prefix_cache and sequence.generation.cache

    def match(self, sequence: Sequence) -> tuple[int, int | None]:
        """(length, slot) of the prefix that need not be computed; the last token always is, for its logits."""
        if not self.reuses(sequence):
            return 0, None
        index = self._indexes.get(sequence.generation.salt)
        if index is None:
            return 0, None
        length, slot = index.match(sequence.tokens)
        length = min(length, len(sequence.tokens) - 1)
        return length, slot if length else None

    # Running.

    def enter(self, sequence: Sequence, source: int | None, shared: int) -> None:
        """Give a waiting sequence a slot that starts with the first `shared` cells of `source`. There is a free one."""
        slot = self.pool.take()
        self._salts[slot] = sequence.generation.salt
        if source is not None:
            self.pool.share(source, slot, shared)
            self._index(slot).extend(slot, sequence.tokens[:shared])
            self._ops.append(Copy(source, slot, shared))
            if source in self.idle:
                self.idle[source] = self.idle.pop(source)  # now the most recently used
        sequence.slot, sequence.computed = slot, shared

    def extend(self, sequence: Sequence, count: int) -> None:
        """Its next `count` tokens are computed."""
        slot, start = sequence.slot, sequence.computed
        assert slot is not None
        sequence.computed += count
        self.pool.extend(slot, count)
        if sequence.generation.cache:
            self._index(slot).extend(slot, sequence.tokens[start : sequence.computed])

    def cut(self, sequence: Sequence, length: int) -> None:
        """Forget what was computed of it from `length` on: guesses that were wrong."""
        slot = sequence.slot
        assert slot is not None
        sequence.computed = length
        self.pool.truncate(slot, length)
        self._index(slot).truncate(slot, length)
        self._ops.append(Trim(slot, length))

    def leave(self, sequence: Sequence) -> None:
        """It is over: its slot becomes an idle one, if anybody else could use it."""
        slot = sequence.slot
        assert slot is not None
        if not self.reuses(sequence) or self._index(slot).redundant(slot):
            self.release(sequence)
            return
        sequence.slot = None
        self.pool.retire(slot)
        self.idle[slot] = None
        index = self._index(slot)
        for other in [s for s in self.idle if s != slot and self._index(s) is index and index.redundant(s)]:
            if other in self.pinned:
                continue
            self.drop(other)

    def release(self, sequence: Sequence) -> None:
        """It is over or sent back: its slot is given up."""
        slot, sequence.slot = sequence.slot, None
        assert slot is not None
        self._give_up(slot)

    # Idle.

    def make_room(self, cells: int, slots: int, keep: Collection[int | None]) -> None:
        """Drop idle slots until `cells` cells and `slots` slots are free; those of `keep` are copied from."""
        while self.pool.slots_free < slots:
            self.drop(self._oldest(keep))
        while self.idle and self.pool.free < cells:
            self.drop(self._oldest(()))

    def shrink(self) -> None:
        """Keep what is idle within its bound."""
        if self.pool.idle <= self.idle_cells:
            return
        for slot in [slot for slot in self.idle if slot not in self.pinned]:
            if self.pool.idle <= self.idle_cells:
                return
            self.drop(slot)

    def drop(self, slot: int) -> None:
        """Give up an idle slot."""
        del self.idle[slot]
        self._give_up(slot)

    def _oldest(self, keep: Collection[int | None]) -> int:
        """Least recently used; a pinned one only if there are no others."""
        rest = [slot for slot in self.idle if slot not in keep]
        return next((slot for slot in rest if slot not in self.pinned), rest[0])

    def _index(self, slot: int) -> PrefixIndex:
        salt = self._salts[slot]
        index = self._indexes.get(salt)
        if index is None:
            index = self._indexes[salt] = self._make_index()
        return index

    def _give_up(self, slot: int) -> None:
        index, salt = self._index(slot), self._salts.pop(slot)
        index.remove(slot)
        if salt and salt not in self._salts.values():
            del self._indexes[salt]  # tenants come and go
        self.pinned.discard(slot)
        self.pool.release(slot)
        self._ops.append(Trim(slot, 0))
