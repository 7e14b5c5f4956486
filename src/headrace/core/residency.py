"""Who holds which part of the KV: slots of running sequences, and of finished ones kept for reuse.

    waiting ──enter──► running ──leave──► idle ──(least recently used)──► dropped
                          └────release────────────────────────────────────►┘

Rules: a running sequence is never robbed; idle slots go, least recently used first, when cells or slots are needed, or
when they are more than `idle_cells`, and those that are saved outside already at `warm_cells`, because every step pays
for the width of the pool. What is decided here leaves through
`take_ops`, in order, and is to be carried out before the next step. Prefixes are shared among sequences of one salt,
and those of the empty salt with nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from headrace.core.kv import CellPool, Kept, PrefixIndex
from headrace.core.plan import Admission, Copy, KvOp, Load, Trim
from headrace.core.sequence import Sequence


class Residency:
    """Owner of index, pool and idle slots."""

    def __init__(
        self,
        *,
        index: Callable[[], PrefixIndex],
        pool: CellPool,
        idle_cells: int,
        prefix_cache: bool,
        warm_cells: int | None = None,
    ) -> None:
        """`index` makes an empty one: each salt has its own. `warm_cells`: what idle slots keep of what is saved."""
        self._make_index = index
        self._indexes: dict[str, PrefixIndex] = {"": index()}
        self._salts: dict[int, str] = {}
        self.pool = pool
        self.idle_cells = idle_cells
        self._warm_cells = idle_cells if warm_cells is None else warm_cells
        self._prefix_cache = prefix_cache
        self.idle: dict[int, None] = {}
        """Slots of finished sequences, least recently used first."""
        self.saved: set[int] = set()
        """Those of them whose KV is kept outside as well: they go first, and early."""
        self._passed: set[int] = set()
        """Those that are not worth keeping outside, or could not be."""
        self._ops: list[KvOp] = []

    def __repr__(self) -> str:
        return f"<Residency [{len(self.idle)} idle slots, {len(self.saved)} saved, {self.pool!r}]>"

    def take_ops(self) -> list[KvOp]:
        """The KV operations since the last call, to be carried out in this order."""
        ops, self._ops = self._ops, []
        return ops

    def reuses(self, sequence: Sequence) -> bool:
        """May it read and leave cached prefixes?"""
        return self._prefix_cache and sequence.generation.cache

    def match(self, sequence: Sequence) -> tuple[int, int | None]:
        """(length, slot) of the prefix that need not be computed; the last token always is, for its logits."""
        index = self._indexes.get(sequence.generation.salt)
        if index is None or not self.reuses(sequence):
            return 0, None
        length, slot = index.match(sequence.tokens)
        length = min(length, len(sequence.tokens) - 1)
        return length, slot if length else None

    def resident(self, tokens: list[int], salt: str) -> int:
        """How many tokens from the beginning of these the cells hold."""
        index = self._indexes.get(salt)
        return 0 if index is None else index.match(tokens)[0]

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

    def cut(self, sequence: Sequence, length: int, *, told: bool = False) -> None:
        """Forget what was computed of it from `length` on. `told`: the engine has no more of it, nothing is to do."""
        slot = sequence.slot
        assert slot is not None
        sequence.computed = length
        self.pool.truncate(slot, length)
        self._index(slot).truncate(slot, length)
        if not told:
            self._ops.append(Trim(slot, length))

    def restore(self, admissions: Collection[Admission]) -> None:
        """Load what those who have just entered have outside, and make room for it."""
        loading = [admission for admission in admissions if admission.loads]
        self.make_room(sum(block.end - block.start for one in loading for block in one.loads), 0, ())
        for one in loading:
            self.load(one.sequence, one.loads, one.length)

    def load(self, sequence: Sequence, blocks: tuple[Kept, ...], length: int) -> None:
        """Fill it up to `length` from blocks that follow on what it has; the last one may go beyond."""
        slot, start = sequence.slot, sequence.computed
        assert slot is not None
        for block in blocks:
            self.pool.extend(slot, block.end - block.start)
            self._ops.append(Load(slot, block.start, block.end, block.key))
        if blocks[-1].end > length:
            self.pool.truncate(slot, length)
            self._ops.append(Trim(slot, length))
        sequence.computed = length
        self._index(slot).extend(slot, sequence.tokens[start:length])

    def settle(self, sequence: Sequence, guesses: int, right: int) -> None:
        """Of `guesses` tokens that were computed on trial, the first `right` are its next ones, the others are gone."""
        slot = sequence.slot
        assert slot is not None
        self.pool.extend(slot, guesses)
        start = sequence.computed
        sequence.computed += right
        if sequence.generation.cache:
            self._index(slot).extend(slot, sequence.tokens[start : sequence.computed])
        if right < guesses:
            self.pool.truncate(slot, sequence.computed)
            self._ops.append(Trim(slot, sequence.computed))

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
        idle, warm = self.pool.idle, min(self.idle_cells, self._warm_cells)
        if idle <= warm or (idle <= self.idle_cells and not self.saved):
            return
        for slot in [slot for slot in self.idle if slot in self.saved]:
            if self.pool.idle <= warm:
                return
            self.drop(slot)
        for slot in list(self.idle):
            if self.pool.idle <= self.idle_cells:
                return
            self.drop(slot)

    def pass_over(self, slot: int) -> None:
        """An idle slot's KV will not be kept outside."""
        self._passed.add(slot)

    def unsaved(self, least: int) -> tuple[int, list[int], str] | None:
        """(slot, tokens, salt) of the idle slot that will go next of those with `least` tokens and nothing outside."""
        for slot in self.idle:
            if slot not in self.saved and slot not in self._passed:
                tokens = self._index(slot).tokens(slot)
                if len(tokens) >= least:
                    return slot, tokens, self._salts[slot]
                self._passed.add(slot)
        return None

    def drop(self, slot: int) -> None:
        """Give up an idle slot."""
        del self.idle[slot]
        self._give_up(slot)

    def _oldest(self, keep: Collection[int | None]) -> int:
        """The least recently used one."""
        return next(slot for slot in self.idle if slot not in keep)

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
        self.saved.discard(slot)
        self._passed.discard(slot)
        self.pool.release(slot)
        self._ops.append(Trim(slot, 0))
