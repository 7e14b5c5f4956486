"""The cells of one unified KV pool, counted the way llama.cpp counts them.

A cell belongs to every slot that shares it and is free when the last of them lets go. Slots share prefixes, so a slot
is a list of runs, and a run knows its slots:

    slot 0   ├──── run a (900) ────┤─ run b (40) ─┤
    slot 1   ├──── run a (900) ────┤─ run c (12) ─┤          used = 900 + 40 + 12

Rules: `used` counts each run once; a run is `held` while a running slot shares it, otherwise it is idle (kept for
reuse, free for the taking). llama.cpp has no call that tells these numbers, hence this ledger; the property test
checks it against a naive one.
The ledger counts what the scheduler decides, at once; `layout` says where the cells lie, and is told by the stepper
what the engine does, in the engine's order: a slot given up while a step is booked is emptied after all its rows.
"""

from __future__ import annotations

from headrace.kv.cells import Cells


class _Run:
    __slots__ = ("cells", "running", "slots")

    def __init__(self, cells: int, slots: set[int], running: int) -> None:
        self.cells = cells
        self.slots = slots
        self.running = running


class Pool:
    """Ledger of `cells` KV cells and `slots` sequence ids."""

    def __init__(self, *, cells: int, slots: int) -> None:
        self.cells = cells
        self.used = 0
        self.held = 0
        """Cells of running slots."""
        self.layout = Cells(cells)
        self._free = list(range(slots - 1, -1, -1))
        self._runs: dict[int, list[_Run]] = {}
        self._running: set[int] = set()

    def __repr__(self) -> str:
        return f"<Pool [{self.held} held, {self.idle} idle, {self.free} free cells; {len(self._free)} free slots]>"

    @property
    def free(self) -> int:
        """Cells nobody has."""
        return self.cells - self.used

    @property
    def idle(self) -> int:
        """Cells kept for reuse only."""
        return self.used - self.held

    @property
    def slots_free(self) -> int:
        return len(self._free)

    @property
    def slots_running(self) -> int:
        return len(self._running)

    @property
    def slots_idle(self) -> int:
        """Slots kept for reuse only."""
        return len(self._runs) - len(self._running)

    @property
    def width(self) -> int:
        """The highest used cell + 1, as of the engine's last act: what the next step has to look at."""
        return self.layout.width

    def length(self, slot: int) -> int:
        """Tokens in the slot."""
        return sum(run.cells for run in self._runs[slot])

    def take(self) -> int:
        """An empty slot, running. IndexError if there is none."""
        slot = self._free.pop()
        self._runs[slot] = []
        self._running.add(slot)
        return slot

    def share(self, source: int, target: int, length: int) -> None:
        """Give the empty, running `target` the first `length` cells of `source`."""
        self._cut(source, length)
        left = length
        for run in self._runs[source]:
            if left == 0:
                break
            run.slots.add(target)
            if run.running == 0:
                self.held += run.cells
            run.running += 1
            self._runs[target].append(run)
            left -= run.cells

    def extend(self, slot: int, cells: int) -> None:
        """The running slot computed `cells` more tokens."""
        runs = self._runs[slot]
        if runs and len(runs[-1].slots) == 1:
            runs[-1].cells += cells
        else:
            runs.append(_Run(cells, {slot}, 1))
        self.used += cells
        self.held += cells

    def truncate(self, slot: int, length: int) -> None:
        """Let go of the slot's cells from `length` on."""
        self._cut(slot, length)
        runs = self._runs[slot]
        kept = 0
        for i, run in enumerate(runs):
            if kept == length:
                for gone in runs[i:]:
                    self._let_go(gone, slot)
                del runs[i:]
                break
            kept += run.cells

    def retire(self, slot: int) -> None:
        """The slot stops running; its cells stay for reuse."""
        self._running.discard(slot)
        for run in self._runs[slot]:
            run.running -= 1
            if run.running == 0:
                self.held -= run.cells

    def release(self, slot: int) -> None:
        """Give the slot and its cells back."""
        self.truncate(slot, 0)
        self._running.discard(slot)
        del self._runs[slot]
        self._free.append(slot)

    def _let_go(self, run: _Run, slot: int) -> None:
        run.slots.discard(slot)
        if slot in self._running:
            run.running -= 1
            if run.running == 0:
                self.held -= run.cells
        if not run.slots:
            self.used -= run.cells

    def _cut(self, slot: int, at: int) -> None:
        """Make a run boundary at `at` in every slot that shares the run there."""
        start = 0
        for run in self._runs[slot]:
            if start < at < start + run.cells:
                upper = _Run(at - start, set(run.slots), run.running)
                run.cells -= upper.cells
                for sharer in run.slots:
                    runs = self._runs[sharer]
                    runs.insert(runs.index(run), upper)
                return
            start += run.cells
