"""Brings KV out of the pool into the store, and back, beside the steps.

    finished sequence ──idle──► save, a block at a time ──► store (RAM ► SSD ► Redis)
    new prompt ──► longest prefix kept? ──in RAM──► loaded when it is admitted
                                        └─on SSD, in Redis──► fetched by the store's thread, meanwhile others go on

Rules: engine thread only, but for the store's `done`; a copy is one block (`kv.blob.BLOCK` tokens), so no step waits
longer than for that; while the engine has work, copies take at most SHARE of its time; what is predicted slower than
computing is left alone. Pinned prefixes stay in RAM, whatever else has to go.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headrace.core.clock import Clock
from headrace.core.kv import Kept, Outside, Pin
from headrace.core.plan import Load
from headrace.core.request import BATCH, Generation, Sampling
from headrace.core.scheduler import Scheduler
from headrace.engines.base import StepEngine, StepFailed
from headrace.kv.blob import BLOCK
from headrace.kv.disk import Disk
from headrace.kv.mining import Miner
from headrace.kv.shared import Shared
from headrace.kv.store import Store
from headrace.kv.tiers import Hit, TierStats

MIB = 2**20

SHARE = 0.05
"""Of the engine's time that copies may take while it has work."""

PATIENCE = 2.0
"""Times its predicted length that a fetch may take before the prompt is computed instead."""

WAKE_S = 0.005
"""Until the store's thread has begun with a fetch and the engine's has heard of its end."""

ASK_S = 0.05
"""The least that is allowed for asking Redis, which may turn out to have nothing."""

LEAST_RAM_MIB = 64
"""What comes from the disk or from Redis goes through RAM."""

OPEN_S = 5.0
"""How long the start waits until it is known what the directory holds: the first prompt shall find it."""

COPY_S = 0.005
"""What the first copy of a block is expected to take; each next one as long as the last."""

LOOK_S = 20.0
"""Seconds between two looks at what the traffic has in common."""

TRIES = 2
"""A prefix to pin that is not there after it was computed so often is left alone: it does not fit."""

Inbox = Callable[[Callable[[], None]], None]


class TierSettings(msgspec.Struct, frozen=True):
    """What `open_store` needs; MiB, s and tokens."""

    ram_mib: int = 0
    ssd_mib: int = 0
    ssd_path: str = ""
    redis_url: str = ""
    redis_ttl_s: float = 3600.0
    redis_timeout_s: float = 0.05
    least: int = 64
    """Shorter sequences are not saved."""
    mined: int = 0
    """Prefixes that may be pinned because the traffic shows that they pay."""
    look_s: float = LOOK_S
    """Between two looks for such prefixes."""


def open_store(settings: TierSettings, engine: StepEngine, clock: Clock) -> Store:
    """A started store. Raises StartupError if the address of Redis is none."""
    disk = shared = None
    if settings.ssd_mib and settings.ssd_path:
        disk = Disk(Path(settings.ssd_path), settings.ssd_mib * MIB, engine.fingerprint)
    if settings.redis_url:
        shared = Shared(
            settings.redis_url,
            engine.fingerprint,
            clock,
            timeout=settings.redis_timeout_s,
            ttl=settings.redis_ttl_s,
            random=random.random,
        )
    ram_mib = max(settings.ram_mib, LEAST_RAM_MIB if disk or shared else 0)
    store = Store(engine.fingerprint, ram_mib * MIB, clock, disk=disk, shared=shared)
    store.start()
    store.opened(OPEN_S)
    return store


class Keeper:
    """Owner of what of an engine's KV is kept outside. `call` runs a command on the engine thread, from any thread."""

    def __init__(
        self,
        engine: StepEngine,
        scheduler: Scheduler,
        store: Store,
        clock: Clock,
        call: Inbox,
        *,
        least: int,
        miner: Miner | None = None,
        budget: int = 0,
        look_s: float = LOOK_S,
    ) -> None:
        """`least`: tokens of the shortest sequence that is saved. `budget`: prefixes that `miner` may have pinned.

        `look_s`: s between two looks at what `miner` has learned.
        """
        self._engine = engine
        self._scheduler = scheduler
        self._store = store
        self._clock = clock
        self._call = call
        self._least = least
        self._miner = miner
        self._budget = budget
        self._look_s = look_s
        self._next_look = 0.0
        self._learned = False
        """The miner saw a prompt since the last look."""
        self._given: set[tuple[int, ...]] = set()
        self._mined: set[tuple[int, ...]] = set()
        self._pins: dict[tuple[int, ...], tuple[bytes, ...]] = {}
        """Pinned prefix → the keys that are pinned for it."""
        self._tries: dict[tuple[int, ...], int] = {}
        """Prefixes to pin that are not there yet → how often they were computed."""
        self._filled = 0
        self._copy_s = COPY_S
        self._owed = 0.0
        """When the next copy may be made while there is work."""

    def __repr__(self) -> str:
        return f"<Keeper [{len(self._pins)} pinned, {len(self._tries)} missing]>"

    @property
    def pinned(self) -> int:
        """Prefixes that stay."""
        return len(self._pins)

    @property
    def stats(self) -> TierStats:
        return self._store.stats

    def close(self, timeout: float) -> None:
        """Save what is idle and have it written, in about `timeout` s."""
        until = self._clock() + timeout / 2
        while self._clock() < until and self.save():
            pass
        self._store.close(timeout / 2)

    # Prompts.

    def submit(self, generation: Generation, now: float) -> None:
        """Hand a generation to the scheduler, with what is kept of it; a prefix that is far away is fetched first."""
        scheduler, tokens = self._scheduler, generation.prompt
        if not (generation.cache and scheduler.limits.prefix_cache):
            scheduler.submit(generation, now)
            return
        if self._miner is not None:
            self._miner.observe(tokens, now, generation.salt)
            self._learned = True
        hit = self._store.match(tokens, generation.salt)
        beyond = self._store.beyond(tokens, generation.salt, hit)
        keys = (*hit.cold, *beyond)
        if keys:
            wait = PATIENCE * self._away_seconds(hit, len(beyond))
            if wait < self._gain(hit, len(tokens), scheduler.residency.resident(tokens, generation.salt), bool(beyond)):
                rid, salt = generation.rid, generation.salt
                # As if it were there already: its place in the order is that of the little that will be left of it.
                scheduler.submit(generation, now, self._outside(hit, tokens, far=True), hold=now + wait)
                self._store.fetch(keys, lambda _: self._call(lambda: self._fetched(rid, tokens, salt)))
                return
        scheduler.submit(generation, now, self._outside(hit, tokens))

    def _away_seconds(self, hit: Hit, beyond: int) -> float:
        """How long a fetch of a hit and of `beyond` blocks that Redis may have will take."""
        seconds = self._store.estimate(hit, shared=beyond * BLOCK * self._engine.bytes_per_token)
        return max(seconds, ASK_S) if beyond else seconds + WAKE_S

    def _gain(self, hit: Hit, prompt: int, resident: int, beyond: bool) -> float:
        """Seconds of computing that a fetch may save: not those of what is in the pool, or in RAM, anyway."""
        have = max(resident, _near(hit))
        reach = min(prompt if beyond else hit.length, prompt - 1)
        return self._scheduler.prefill_seconds(have, reach - have) if reach > have else 0.0

    def _fetched(self, rid: int, tokens: list[int], salt: str) -> None:
        self._scheduler.fetched(rid, self._outside(self._store.match(tokens, salt), tokens))

    def _outside(self, hit: Hit, tokens: Sequence[int], *, far: bool = False) -> Outside | None:
        """What of a hit can be had at once or, if `far`, after a fetch; a block that is late is computed."""
        length = min(hit.length if far else _near(hit), len(tokens) - 1)
        if length <= 0:
            return None
        usable = Hit(length, tuple(part for part in hit.parts if part.block.start < length))
        self._store.used(usable)
        blocks = tuple(Kept(part.block.start, part.block.end, part.block.key) for part in usable.parts)
        return Outside(length, blocks, self._store.estimate(usable))

    def load(self, op: Load) -> Sequence[int]:
        """Carry out a load: positions in the order of their cells; empty if it could not be done."""
        payload = self._store.get(op.key)
        if payload is None:
            return ()
        began = self._clock()
        order = self._engine.load(op.slot, op.start, op.end, payload)
        if order:
            self._store.restored(len(payload), op.end - op.start, self._clock() - began)
        return order

    # Between steps.

    def save(self, ahead: Callable[[], None] | None = None, *, spare: float = math.inf) -> bool:
        """Copy one block out, if there is one to copy and, while the engine has work, if it is time.

        `ahead`: given while the engine has work; what must not wait for the copy. `spare`: s that it may take.
        """
        began = self._clock()
        if ahead is not None and (began < self._owed or spare < self._copy_s):
            return False
        residency = self._scheduler.residency
        while (found := residency.unsaved(self._least)) is not None:
            slot, tokens, salt = found
            missing = self._store.missing(tokens, salt)
            if not missing:
                residency.saved.add(slot)
                continue
            block = missing[0]
            if ahead is not None:
                ahead()
            try:
                kept = self._store.put(block, self._engine.save(slot, block.start, block.end))
            except StepFailed:
                kept = False
            if not kept:
                residency.pass_over(slot)
            elif len(missing) == 1:
                residency.saved.add(slot)
            self._copy_s = self._clock() - began
            self._owed = began + self._copy_s / SHARE
            return True
        residency.shrink()
        return False

    # Pins.

    def pin(self, pins: Sequence[Pin]) -> None:
        """Keep these prefixes, for everybody: those that nobody has computed are computed when there is time."""
        self._given = {pin.tokens for pin in pins}
        self._tries.clear()
        self._want()

    def mine(self, now: float) -> None:
        """With nothing else to do, now and then: keep the prefixes that save most, for those without a salt."""
        if self._miner is None or now < self._next_look:
            return
        self._next_look = now + self._look_s
        self._learned = False
        self._mined = {tuple(prefix.tokens) for prefix in self._miner.choose(self._budget, now)}
        self._want()

    def look_at(self) -> float | None:
        """When to call `mine` next, even if nobody asks for anything until then; None: there is nothing new."""
        return self._next_look if self._learned else None

    def _want(self) -> None:
        wanted = self._given | self._mined
        for tokens in [tokens for tokens in self._pins if tokens not in wanted]:
            self._store.unpin(self._pins.pop(tokens))
        missing = [tokens for tokens in wanted if tokens not in self._pins and not self._hold(tokens)]
        self._tries = {tokens: self._tries.get(tokens, 0) for tokens in missing}

    def _hold(self, tokens: tuple[int, ...]) -> bool:
        """Pin what is kept of a prefix, if that is all of it; what is far away is fetched."""
        hit = self._store.match(tokens)
        if hit.length < len(tokens):
            return False
        self._pins[tokens] = keys = tuple(part.block.key for part in hit.parts)
        # The last block may go on with what somebody wrote: that is for nobody else.
        self._store.pin(keys, public=len(tokens) if tokens in self._given else 0)
        if hit.cold:
            self._store.fetch(keys, lambda _: None)
        return True

    def fill(self, now: float) -> bool:
        """With nothing else to do, after `save`: have the next missing prefix computed. False if there is none."""
        for tokens, tries in list(self._tries.items()):
            if self._hold(tokens):
                del self._tries[tokens]
                continue
            if tries >= TRIES:
                continue
            self._tries[tokens] += 1
            self._filled -= 1
            # One token is drawn that nobody hears of, because no stream has this number.
            filler = Generation(self._filled, [*tokens, tokens[-1]], 1, sampling=Sampling(0.0), priority=BATCH)
            self._scheduler.submit(filler, now)
            return True
        return False


def _near(hit: Hit) -> int:
    """Tokens of a hit that are in RAM, from its beginning on."""
    far = next((part.block.start for part in hit.parts if not part.ram), hit.length)
    return min(far, hit.length)
