"""KV outside the pool: RAM, then the SSD directory, then Redis, behind one object.

    engine thread                            writer thread                       reader thread
    put ──► RAM, and a place in the queue ─► disk.write, shared.put
    get ◄── RAM
    fetch ─────────────────────────────────────────────────────────────────────► disk.read, else shared.get
                                                                                 ─► RAM, done(found)

Rules: nothing the engine thread calls waits for a disk or a network, or raises because of one; the lock is held for
book-keeping only; what the disk refuses stays in RAM, and writing pauses for a while that doubles each time; whoever is
waiting for a fetch hears of its end, whatever happens.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from headrace.core.clock import Clock
from headrace.kv.blob import BLOCK, Block, blocks, root, salt_digest
from headrace.kv.disk import Disk
from headrace.kv.shared import Shared
from headrace.kv.tiers import BlockIndex, Hit, Memory, RestoreCost, TierStats
from headrace.kv.write_queue import WriteQueue

log = logging.getLogger(__name__)

QUEUE_BYTES = 256 * 2**20
"""KV that may wait for the disk; a block beyond is not written."""
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0

Done = Callable[[Mapping[bytes, bytes]], None]
"""Gets the KV of a fetch by key, on the reader thread. What could not be had is missing."""


class Store:
    """See the module. `start` once; `close` flushes. Everything else may be called from any thread."""

    def __init__(
        self, engine: bytes, ram_limit: int, clock: Clock, *, disk: Disk | None = None, shared: Shared | None = None
    ) -> None:
        """`engine`: its fingerprint. `ram_limit`: bytes of KV; 0 keeps none in RAM."""
        self._engine = engine
        self._clock = clock
        self._disk = disk
        self._shared = shared
        self._lock = threading.Lock()
        self._index = BlockIndex()
        self._memory = Memory(self._index, ram_limit)
        self._waiting = WriteQueue(QUEUE_BYTES)
        self._useless: list[bytes] = []
        """Files that a longer block has replaced."""
        self._touched: OrderedDict[bytes, None] = OrderedDict()
        """Used since the files' times were last set."""
        self._fetches: deque[tuple[tuple[bytes, ...], Done]] = deque()
        self._work = threading.Condition(self._lock)
        self._asked = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._busy = False
        self._opened = threading.Event()
        self._stopping = False
        self._pause = 0.0
        self._paused_until = 0.0
        self._cost = RestoreCost()
        self._counts: Counter[str] = Counter()
        self._restore_s = 0.0
        self._threads: list[threading.Thread] = []

    # Life.

    def start(self) -> None:
        """Begin to read the directory and to write. Returns at once; see `opened`."""
        for name, run in (("kv-write", self._run_writer), ("kv-read", self._run_reader)):
            thread = threading.Thread(target=run, name=f"headrace-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def opened(self, timeout: float) -> bool:
        """Wait until what the directory holds is known; False if that takes longer than `timeout` s."""
        return self._opened.wait(timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until everything put so far is written, or was given up; False if that takes longer than `timeout` s."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._waiting and not self._busy, timeout)

    def close(self, timeout: float) -> None:
        """Write what waits, for at most `timeout` s, and stop. Fetches that have not begun end with nothing."""
        if self._threads:
            self.flush(timeout)
        with self._lock:
            self._stopping = True
            self._counts["writes_dropped"] += len(self._waiting)
            self._waiting.clear()
            self._work.notify_all()
            self._asked.notify_all()
        for thread in self._threads:
            thread.join(1.0)  # a thread in a system call that hangs must not hold up the process
        if self._shared is not None:
            self._shared.close()

    # Looking things up.

    def match(self, tokens: Sequence[int], salt: str = "") -> Hit:
        """The longest beginning of `tokens` that is kept for `salt`, or is pinned for all."""
        with self._lock:
            hit = self._index.match(tokens, root(self._engine, salt_digest(salt)))
            if salt:
                public = self._index.match(tokens, root(self._engine, salt_digest("")), public_only=True)
                hit = max(hit, public, key=lambda h: h.length)
            return hit

    def missing(self, tokens: Sequence[int], salt: str = "") -> list[Block]:
        """The blocks of these tokens that no tier has: save them, and `put` them."""
        with self._lock:
            return [b for b in blocks(self._engine, salt, tokens) if not self._index.covered(b)]

    def beyond(self, tokens: Sequence[int], salt: str, hit: Hit) -> tuple[bytes, ...]:
        """Keys of further full blocks of `tokens` that Redis may have, to be fetched; () while it is of no use.

        Behind a hit that is pinned for all the salt's own chain does not go on: that one is got from where it ends.
        """
        if self._shared is None or not self._shared.willing:
            return ()
        digest, own = salt_digest(salt), hit
        if hit.parts and hit.parts[0].block.salt != digest:
            with self._lock:
                own = self._index.match(tokens, root(self._engine, digest))
        known = own.length // BLOCK * BLOCK
        beyond = tuple(b.key for b in blocks(self._engine, salt, tokens) if b.full and b.start >= known)
        return beyond if own is hit or not beyond else (*own.first(known).cold, *beyond)

    def estimate(self, hit: Hit, shared: int = 0) -> float:
        """Seconds until all of `hit`, and `shared` bytes from Redis, are in the pool, by the restores so far."""
        with self._lock:
            return self._cost.predict(hit, shared)

    def restored(self, size: int, tokens: int, seconds: float) -> None:
        """Tell of a restore: so many bytes of KV went into the pool, for so many tokens, in so long."""
        with self._lock:
            self._cost.learn("ram", size, seconds)
            self._counts.update(restores=1, restored_tokens=tokens)
            self._restore_s += seconds

    def pin(self, keys: Iterable[bytes], *, public: int = 0) -> None:
        """Give these up for nothing, whether known yet or not. A chain is pinned by all of its keys.

        `public`: so many tokens of the chain, which is of no salt, may be used by all others too.
        """
        with self._lock:
            self._index.pin(keys, public=public)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Undo one `pin`."""
        with self._lock:
            self._index.unpin(keys)

    @property
    def stats(self) -> TierStats:
        """As of now."""
        disk, shared = self._disk, self._shared
        ssd_bytes = disk.used if disk else 0  # outside of the lock: the disk asks under its own what is pinned
        with self._lock:
            return TierStats(
                ram_bytes=self._memory.used,
                ram_blocks=len(self._memory),
                ssd_bytes=ssd_bytes,
                ssd_blocks=self._index.count("ssd"),
                damaged=(disk.damaged if disk else 0) + (shared.damaged if shared else 0),
                ssd_errors=disk.errors if disk else 0,
                redis_errors=shared.errors if shared else 0,
                ssd_down=self._clock() < self._paused_until,
                redis_down=shared.down if shared else False,
                restore_s=self._restore_s,
                **self._counts,
            )

    # In and out.

    def put(self, block: Block, payload: bytes) -> bool:
        """Keep a block. False if it, or a longer one that begins with it, is kept already, or there is no room."""
        with self._lock:
            if self._stopping or (self._index.covered(block) and block.key not in self._index):
                return False
            if self._index.has(block.key, "ram"):
                return False
            shorter = self._index.shorter(block)
            if shorter is not None:
                self._replace(shorter)
            kept = self._keep(block, payload)
            if kept:
                self._counts["ram_written"] += len(payload)
            if not self._index.has(block.key, "ssd"):
                kept = self._enqueue(block, payload) or kept
            return kept

    def get(self, key: bytes) -> bytes | None:
        """The KV of a block that is in RAM; None if it is not, or not any more."""
        with self._lock:
            payload = self._at_hand(key)
            self._count("ram", payload)
            return payload

    def used(self, hit: Hit) -> None:
        """Tell that a hit is used: what it is made of stays longest."""
        keys = [part.block.key for part in hit.parts]
        with self._lock:
            self._index.touch(keys)
            for key in reversed(keys):
                if self._index.has(key, "ssd"):
                    self._touched[key] = None
                    self._touched.move_to_end(key)

    def fetch(self, keys: Iterable[bytes], done: Done) -> None:
        """Get a chain of blocks into RAM, from the disk or Redis, and stop at the first that cannot be had.

        `done(found)` is called on the reader thread, exactly once. `found` may hold more than stays in RAM.
        """
        with self._lock:
            if not self._stopping:
                self._fetches.append((tuple(keys), done))
                self._asked.notify()
                return
        done({})

    # With the lock held.

    def _at_hand(self, key: bytes) -> bytes | None:
        """From RAM, or from what is still to be written."""
        payload = self._memory.get(key)
        return self._waiting.get(key) if payload is None else payload

    def _count(self, tier: str, payload: bytes | None) -> None:
        if payload is None:
            self._counts[f"{tier}_misses"] += 1
        else:
            self._counts[f"{tier}_hits"] += 1
            self._counts[f"{tier}_read"] += len(payload)

    def _keep(self, block: Block, payload: bytes) -> bool:
        """Put it in RAM, if pinned blocks leave room."""
        left = self._memory.keep(block, payload)
        for old, gone in left or ():
            if not self._index.has(old.key, "ssd"):
                self._enqueue(old, gone)  # its turn had been missed in a pause
        return left is not None

    def _replace(self, key: bytes) -> None:
        """A longer block has come."""
        self._memory.drop(key)
        self._waiting.drop(key)
        if self._index.has(key, "ssd"):
            self._index.remove(key, "ssd")
            self._useless.append(key)

    def _enqueue(self, block: Block, payload: bytes) -> bool:
        """Have it written."""
        if (self._disk is None and self._shared is None) or block.key in self._waiting:
            return False
        if not self._waiting.put(block, payload):
            self._counts["writes_dropped"] += 1
            return False
        self._work.notify()
        return True

    # The writer thread.

    def _run_writer(self) -> None:
        self._open_disk()
        while True:
            with self._lock:
                self._busy = False
                self._idle.notify_all()
                self._work.wait_for(lambda: self._waiting or self._stopping)
                if not self._waiting:
                    break
                block, payload = self._waiting.first()
                self._busy = True
            try:
                self._write(block, payload)
            except Exception as error:  # whatever it is, the next block gets its chance
                log.error("a block of KV could not be written: %s", type(error).__name__)
            with self._lock:
                self._waiting.drop(block.key)
        self._tidy()

    def _open_disk(self) -> None:
        for block, size in self._disk.open() if self._disk else ():
            with self._lock:
                shorter = self._index.shorter(block)
                if shorter is not None:
                    self._replace(shorter)
                if self._index.covered(block) and block.key not in self._index:
                    self._useless.append(block.key)
                else:
                    self._index.add(block, size, "ssd")
        self._opened.set()

    def _write(self, block: Block, payload: bytes) -> None:
        self._tidy()
        if self._disk is not None:
            if self._clock() < self._paused_until:
                with self._lock:
                    self._counts["writes_dropped"] += 1
            else:
                self._write_to_disk(self._disk, block, payload)
        if self._shared is not None and block.full:
            written = self._shared.put(block, payload)
            with self._lock:
                self._counts["redis_written"] += written

    def _write_to_disk(self, disk: Disk, block: Block, payload: bytes) -> None:
        try:
            written, evicted = disk.write(block, payload, self._pinned)
        except OSError as error:
            self._pause = min(_LONGEST_PAUSE_S, 2 * self._pause or _PAUSE_S)
            self._paused_until = self._clock() + self._pause
            log.warning("KV is not written to disk for %.0f s: %s", self._pause, error.strerror)
            return
        self._pause = 0.0
        with self._lock:
            self._counts["ssd_written"] += written
            for key in evicted:
                self._index.remove(key, "ssd")
            if not written:
                self._counts["writes_dropped"] += 1
            elif self._index.covered(block) and block.key not in self._index:
                self._useless.append(block.key)  # a longer one came while this one was written
            else:
                self._index.add(block, len(payload), "ssd")

    def _pinned(self, key: bytes) -> bool:
        with self._lock:
            return self._index.pinned(key)

    def _tidy(self) -> None:
        """Remove files that are of no use, and set the times of those that were used."""
        if self._disk is None:
            return
        with self._lock:
            useless, self._useless = self._useless, []
            touched = [key for key in self._touched if self._index.has(key, "ssd")]
            self._touched.clear()
        if useless:
            self._disk.remove(useless)
        self._disk.touch(touched)

    # The reader thread.

    def _run_reader(self) -> None:
        self._opened.wait()
        while True:
            with self._lock:
                self._asked.wait_for(lambda: self._fetches or self._stopping)
                if not self._fetches:
                    return
                keys, done = self._fetches.popleft()
                stopping = self._stopping
            found: dict[bytes, bytes] = {}
            try:
                for key in () if stopping else keys:
                    payload = self._fetch(key)
                    if payload is None:
                        break
                    found[key] = payload
            except Exception as error:
                log.error("a block of KV could not be read: %s", type(error).__name__)
            try:
                done(found)
            except Exception:
                log.exception("what waited for a block of KV failed")

    def _fetch(self, key: bytes) -> bytes | None:
        with self._lock:
            payload = self._at_hand(key)
        if payload is not None:
            return payload
        began = self._clock()
        source, got = "ssd", self._disk.read(key) if self._disk else None
        if self._disk is not None:
            with self._lock:
                self._count("ssd", got and got[1])
                if got is None:
                    self._index.remove(key, "ssd")
        if got is None and self._shared is not None:
            began = self._clock()
            source, got = "redis", self._shared.get(key)
            with self._lock:
                self._count("redis", got and got[1])
        if got is None:
            return None
        block, payload = got
        with self._lock:
            self._cost.learn("ssd" if source == "ssd" else "redis", len(payload), self._clock() - began)
            if not self._index.has(key, "ram") and not (self._index.covered(block) and key not in self._index):
                self._keep(block, payload)
        return payload
