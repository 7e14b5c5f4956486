"""Which blocks are kept outside the pool, which to use, and which to give up. Decides; `store` acts.

      root(fingerprint, salt)
        ├─ [0, 256) ram ssd                          a block knows its parent; the children of a parent are sorted by
        │    ├─ [256, 512) ram ssd                   their tokens, so that the one with the longest common beginning is
        │    │    └─ [512, 700) ram       a tail     a neighbour of where the sought tokens would stand
        │    └─ [256, 512)     ssd        another conversation
        └─ [0, 90) ram

Rules: no block is the beginning of a sibling unless it is pinned (the longer one replaces it); a block in no tier is
not in the index; whoever uses a chain touches all of it, so that a parent never goes before its children; pinned blocks
are not given up.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from headrace.kv.blob import BLOCK, Block, chain, common_tokens, pack
from headrace.kv.public import PublicBlocks

Tier = Literal["ram", "ssd"]
Source = Literal["ram", "ssd", "redis"]


class TierStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the tiers hold and did since start. Bytes of `ssd` are those on the disk, of `ram` those of the KV."""

    ram_bytes: int = 0
    ram_blocks: int = 0
    ssd_bytes: int = 0
    """All blocks in the directory, other servers' and other models' too."""
    ssd_blocks: int = 0
    """Those of this engine."""
    ram_hits: int = 0
    """Blocks handed out from it."""
    ssd_hits: int = 0
    redis_hits: int = 0
    ram_misses: int = 0
    """Blocks asked of it that it did not have."""
    ssd_misses: int = 0
    redis_misses: int = 0
    ram_read: int = 0
    """Bytes handed out."""
    ssd_read: int = 0
    redis_read: int = 0
    ram_written: int = 0
    ssd_written: int = 0
    redis_written: int = 0
    damaged: int = 0
    """Files and Redis entries that were not what they should be; each counts once and is removed."""
    ssd_errors: int = 0
    """Reads and writes that the disk failed."""
    writes_dropped: int = 0
    """Blocks that did not go to the disk because writing paused or fell behind."""
    redis_errors: int = 0
    ssd_down: bool = False
    redis_down: bool = False
    restores: int = 0
    """Restores that were reported to `Store.restored`."""
    restore_s: float = 0.0
    """Their time on the engine thread."""
    restored_tokens: int = 0

    @property
    def down(self) -> tuple[str, ...]:
        """The tiers that are left alone after an error."""
        states = ("redis", self.redis_down), ("ssd", self.ssd_down)
        return tuple(name for name, down in states if down)


@dataclass(slots=True)
class Entry:
    """A known block."""

    block: Block
    size: int
    """Bytes of its KV."""
    tiers: set[Tier]


@dataclass(frozen=True, slots=True)
class Part:
    """A block to load, of a hit: positions [block.start, block.end)."""

    block: Block
    size: int
    """Bytes of its KV."""
    ram: bool
    """It can be had at once; otherwise it has to be fetched."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest known beginning of some tokens."""

    length: int
    """Tokens of it; the last part may go beyond: load, then trim to it."""
    parts: tuple[Part, ...]

    @property
    def cold(self) -> tuple[bytes, ...]:
        """Keys to fetch first."""
        return tuple(part.block.key for part in self.parts if not part.ram)

    def bytes(self, *, ram: bool) -> int:
        """Bytes of KV in the parts that are (not) in RAM."""
        return sum(part.size for part in self.parts if part.ram is ram)

    def first(self, length: int) -> Hit:
        """As much of it as is needed for `length` tokens."""
        if length >= self.length:
            return self
        return Hit(length, tuple(part for part in self.parts if part.block.start < length))


NOTHING = Hit(0, ())


class BlockIndex:
    """Blocks by key and by what comes before them, with their tiers, in order of last use."""

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._children: dict[bytes, list[tuple[bytes, bytes]]] = {}
        """Parent → its children as (packed tokens, key), sorted."""
        self._order: dict[Tier, OrderedDict[bytes, None]] = {"ram": OrderedDict(), "ssd": OrderedDict()}
        """Keys from the longest unused to the last used."""
        self._pins: Counter[bytes] = Counter()
        self._public = PublicBlocks()
        """Those of them that any salt may use."""

    def __repr__(self) -> str:
        return f"<BlockIndex [{self.count('ram')} in RAM, {self.count('ssd')} on disk]>"

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def count(self, tier: Tier) -> int:
        """Blocks in the tier."""
        return len(self._order[tier])

    def has(self, key: bytes, tier: Tier) -> bool:
        return key in self._order[tier]

    def covered(self, block: Block) -> bool:
        """Is the block known, or a longer one that begins with it?"""
        if block.key in self._entries:
            return True
        siblings = self._children.get(block.parent, [])
        i = bisect_left(siblings, (block.packed, b""))
        return i < len(siblings) and siblings[i][0].startswith(block.packed)

    def shorter(self, block: Block) -> bytes | None:
        """Key of a known block that is a beginning of this one, and not pinned: with this one here, nobody needs it."""
        siblings = self._children.get(block.parent, [])
        i = bisect_left(siblings, (block.packed, b""))
        # It can only be the left neighbour: what stood between would begin with it, and it would have been replaced.
        if i and block.packed.startswith(siblings[i - 1][0]) and siblings[i - 1][1] not in self._pins:
            return siblings[i - 1][1]
        return None

    def add(self, block: Block, size: int, tier: Tier) -> None:
        """The block is in the tier now, as the last used one. The `shorter` one is to be removed before."""
        entry = self._entries.get(block.key)
        if entry is None:
            entry = self._entries[block.key] = Entry(block, size, set())
            insort(self._children.setdefault(block.parent, []), (block.packed, block.key))
            self._public.entered(block)
        entry.tiers.add(tier)
        self._order[tier][block.key] = None
        self._order[tier].move_to_end(block.key)

    def remove(self, key: bytes, tier: Tier) -> None:
        """The tier has lost the block; in its last tier it is forgotten."""
        entry = self._entries.get(key)
        if entry is None or tier not in entry.tiers:
            return
        del self._order[tier][key]
        entry.tiers.discard(tier)
        if entry.tiers:
            return
        del self._entries[key]
        self._public.lost(entry.block)
        siblings = self._children[entry.block.parent]
        siblings.remove((entry.block.packed, key))
        if not siblings:
            del self._children[entry.block.parent]

    def match(self, tokens: Sequence[int], root: bytes, *, public_only: bool = False) -> Hit:
        """The longest known beginning of `tokens` below `root`."""
        parts: list[Part] = []
        parent, start = root, 0
        while start < len(tokens):
            packed = pack(tokens[start : start + BLOCK])
            key, common = self._closest_public(parent, packed) if public_only else self._closest(parent, packed)
            entry = self._entries.get(key)
            if entry is None:
                break
            parts.append(Part(entry.block, entry.size, "ram" in entry.tiers))
            start += common
            if common < BLOCK:
                break
            parent = key
        return Hit(start, tuple(parts)) if start else NOTHING

    def _closest(self, parent: bytes, packed: bytes) -> tuple[bytes, int]:
        """(key, common tokens) of the child that shares the longest beginning with `packed`; (b"", 0) if none does."""
        if len(packed) == 4 * BLOCK and (key := chain(parent, packed)) in self._entries:
            return key, BLOCK
        siblings = self._children.get(parent, [])
        i = bisect_left(siblings, (packed, b""))
        near = [(common_tokens(tokens, packed), key) for tokens, key in siblings[max(0, i - 1) : i + 1]]
        common, key = max(near, default=(0, b""))
        return (key, common) if common else (b"", 0)

    def _closest_public(self, parent: bytes, packed: bytes) -> tuple[bytes, int]:
        """The same among what any salt may use: behind the end of a pinned prefix a block holds somebody's own text."""
        # Not only neighbours: one that has less in common may be public for more.
        public = [(self._entries[key].block, length) for key, length in self._public.below(parent).items()]
        common, key = max(((min(common_tokens(b.packed, packed), n), b.key) for b, n in public), default=(0, b""))
        return (key, common) if common else (b"", 0)

    def touch(self, keys: Iterable[bytes]) -> None:
        """A chain, first block first, was used."""
        for key in reversed(tuple(keys)):
            for order in self._order.values():
                if key in order:
                    order.move_to_end(key)

    def oldest(self, tier: Tier) -> Iterator[Entry]:
        """What the tier may give up, in that order. The index must not change between two of them."""
        return (self._entries[key] for key in self._order[tier] if key not in self._pins)

    def pin(self, keys: Iterable[bytes], *, public: int = 0) -> None:
        """Keep a chain, known or not, until as many `unpin`. `public`: tokens of it that are for any salt."""
        keys = tuple(keys)
        self._pins.update(keys)
        for start, key in zip(range(0, public, BLOCK), keys, strict=False):
            self._public.allow(key, min(BLOCK, public - start), self._kept(key))

    def unpin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._pins[key] -= 1
            if self._pins[key] <= 0:
                del self._pins[key]
                self._public.forbid(key, self._kept(key))

    def _kept(self, key: bytes) -> Block | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.block

    def pinned(self, key: bytes) -> bool:
        return key in self._pins


class Memory:
    """The RAM tier: KV by key, within `limit` bytes, its blocks entered in `index`."""

    def __init__(self, index: BlockIndex, limit: int) -> None:
        self._index = index
        self._limit = limit
        self._kept: dict[bytes, bytes] = {}
        self.used = 0
        """Bytes."""

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes) -> bytes | None:
        return self._kept.get(key)

    def keep(self, block: Block, payload: bytes) -> list[tuple[Block, bytes]] | None:
        """Take a block in. What lay unused longest leaves for it, and is returned; None: pinned ones leave no room."""
        leaving: list[Block] = []
        need = self.used + len(payload) - self._limit
        if len(payload) > self._limit:
            return None
        for entry in self._index.oldest("ram"):
            if need <= 0:
                break
            leaving.append(entry.block)
            need -= entry.size
        if need > 0:
            return None
        left = [(old, self._kept[old.key]) for old in leaving]
        for old in leaving:
            self.drop(old.key)
        self._kept[block.key] = payload
        self.used += len(payload)
        self._index.add(block, len(payload), "ram")
        return left

    def drop(self, key: bytes) -> None:
        """Forget a block, if it is there."""
        payload = self._kept.pop(key, None)
        if payload is not None:
            self.used -= len(payload)
            self._index.remove(key, "ram")


@dataclass(frozen=True, slots=True)
class File:
    """An entry of the SSD tier's directory."""

    name: str
    size: int
    used: int
    """Time of last use, ns."""
    regular: bool
    """Not a directory or a link."""


class FileBook:
    """What lies in the directory, and how much it is."""

    def __init__(self) -> None:
        self._files: dict[str, File] = {}
        self.total = 0
        """Bytes."""

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def enter(self, file: File) -> None:
        self.drop(file.name)
        self._files[file.name] = file
        self.total += file.size

    def drop(self, name: str) -> None:
        file = self._files.pop(name, None)
        if file is not None:
            self.total -= file.size

    def touch(self, name: str, now: int) -> None:
        if file := self._files.get(name):
            self._files[name] = File(name, file.size, now, file.regular)

    def oldest(self) -> list[File]:
        """The longest unused first."""
        return sorted(self._files.values(), key=lambda file: file.used)


def victims(files: Iterable[File], excess: int, spare: int, keep: Callable[[File], bool]) -> list[File] | None:
    """Which files go so that `excess` bytes get free; None if all that may go are not enough.

    Up to `spare` bytes more, so that a full directory is not looked through for every file that comes.
    """
    chosen: list[File] = []
    for file in files:
        if file.size > excess + spare and excess <= 0:
            break
        if file.regular and not keep(file):
            chosen.append(file)
            excess -= file.size
    return chosen if excess <= 0 else None


class RestoreCost:
    """Learns how long restoring takes, in seconds per byte of KV, from every restore that is done.

    Starts from what was measured with the demo model: into the pool 6e-11 s/B (16 GB/s; 1.5 ms per 1,000 tokens of 23
    MB) and, doubled for a machine that is busy, 1.2e-10; from the disk 1e-9 (a block of 5.9 MB in 5 ms); from Redis
    over a network 1e-8.
    """

    def __init__(self, weight: float = 0.2) -> None:
        self._weight = weight
        """Of the newest measurement."""
        self.per_byte: dict[Source, float] = {"ram": 1.2e-10, "ssd": 1e-9, "redis": 1e-8}

    def learn(self, source: Source, size: int, seconds: float) -> None:
        """`size` bytes took so long: into the pool for "ram", into RAM for the others."""
        if size > 0:
            self.per_byte[source] += self._weight * (seconds / size - self.per_byte[source])

    def predict(self, hit: Hit, shared: int = 0) -> float:
        """Seconds until all of `hit`, and `shared` bytes more from Redis, are in the pool."""
        ram, ssd = hit.bytes(ram=True), hit.bytes(ram=False)
        away = ssd * self.per_byte["ssd"] + shared * self.per_byte["redis"]
        return away + (ram + ssd + shared) * self.per_byte["ram"]


def worth(restore_s: float, prefill_s: float) -> bool:
    """Restore rather than compute?"""
    return restore_s < prefill_s
