"""Who of the waiting may start in this plan?

Rules: nobody is admitted whom the cells do not hold to the end of the prompt; a prompt whose prefix is being computed
or loaded for another is left waiting, the next plans will find it cached, and lends that one its turn; what is kept
outside the pool is loaded if that is predicted faster than computing it; once somebody finds no room, nobody behind
gets in, or large ones would starve. At most `max_batch` run, but whoever has burnt the fuse gets in up to
`max_running`; who is paused, because its reader is slow, takes no place.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.kv import Kept
from headrace.core.plan import Admission
from headrace.core.residency import Residency
from headrace.core.sequence import Sequence, common_prefix

WORTH_WAITING = 32
"""Shorter shared prefixes are computed again: waiting for the other's step costs more."""


class Door:
    """Places, slots and cells of one plan, counted as if those admitted before had started."""

    def __init__(
        self,
        residency: Residency,
        running: list[Sequence],
        *,
        max_batch: int,
        max_running: int,
        await_prefix: bool,
        prefill: Callable[[int, int], float],
    ) -> None:
        """`running`: all that hold a slot. `prefill(start, count)`: seconds to compute that part of a prompt."""
        self.admissions: list[Admission] = []
        self.awaited: Sequence | None = None
        """Whose prefix the last one that was not let in waits for."""
        self._residency = residency
        self._running = len(running)
        self._batch = sum(not s.paused for s in running)
        self._max_batch, self._max_running = min(max_batch, max_running), max_running
        self._await_prefix = await_prefix
        self._prefill = prefill
        self._prefilling = [s for s in running if s.pending > 1 and not s.paused]
        self._promised = residency.pool.held + sum(s.pending for s in running)
        self._counted: dict[int | None, int] = {s.slot: s.computed for s in running}
        """Slot → how many of its cells are in `_promised`."""
        self._loading: set[bytes] = set()
        self._slots = residency.pool.slots_free + len(residency.idle)
        self._shut = False

    def open(self, sequence: Sequence, *, burnt: bool) -> Admission | None:
        """Let a sequence in, or not."""
        self.awaited = None
        pool, idle, admissions = self._residency.pool, self._residency.idle, self.admissions
        batch = self._batch + len(admissions)
        if self._shut or batch >= (self._max_running if burnt else self._max_batch):
            return None
        shared, source = self._residency.match(sequence)
        length, loads = self._from_outside(sequence, shared)
        self.awaited = self._whose(sequence, length) if self._await_prefix else None
        if self.awaited is not None:
            return None
        if loads:
            if self._await_prefix and any(block.key in self._loading for block in loads):
                return None  # the next plan finds it in the cells
            shared = loads[0].start
            source = source if shared else None
        # Every admission takes a slot, and none that another one copies from. Alone, it rather takes than waits.
        if len(admissions) + len({source, *self._counted} & idle.keys()) >= self._slots:
            if admissions:
                self._shut = True
                return None
            shared, source, length, loads = 0, None, 0, ()
        if len(admissions) >= self._slots:
            self._shut = True
            return None
        # Idle cells that are shared become held, once; cells of a running source are counted already.
        need = len(sequence.tokens) + 1 - min(shared, self._counted.get(source, 0))
        if self._promised + need > pool.cells and (self._running or admissions):
            self._shut = True
            return None
        self._promised += need
        self._counted[source] = max(shared, self._counted.get(source, 0))
        self._prefilling.append(sequence)
        self._loading.update(block.key for block in loads)
        admissions.append(Admission(sequence, source, shared, length, loads))
        return admissions[-1]

    def _from_outside(self, sequence: Sequence, shared: int) -> tuple[int, tuple[Kept, ...]]:
        """(tokens that need not be computed, blocks to load for that): none if computing is predicted faster."""
        outside = sequence.outside
        if outside is None:
            return shared, ()
        length = min(outside.length, len(sequence.tokens) - 1)
        loads = tuple(block for block in outside.blocks if shared < block.end and block.start < length)
        if length <= shared or not loads:
            return shared, ()
        part = sum(b.end - b.start for b in loads) / max(1, outside.blocks[-1].end)
        if outside.seconds * part >= self._prefill(shared, length - shared):
            return shared, ()
        return length, loads

    def _whose(self, sequence: Sequence, have: int) -> Sequence | None:
        """For whom is a longer prefix of this prompt being computed right now?"""
        if not self._residency.reuses(sequence):
            return None
        most = len(sequence.tokens) - 1
        window = sequence.tokens[have : have + WORTH_WAITING]
        for other in self._prefilling:
            if not other.generation.cache or other.generation.salt != sequence.generation.salt:
                continue
            if window != other.tokens[have : have + WORTH_WAITING]:
                continue  # decides nearly all pairs without comparing whole prompts
            reach = min(common_prefix(sequence.tokens, other.tokens), most)
            if reach > other.computed and reach - have >= WORTH_WAITING:
                return other
        return None
