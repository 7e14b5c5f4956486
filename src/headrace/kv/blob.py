"""One block of KV as bytes, in a file or in Redis, and the names blocks go by.

KV leaves the pool in blocks of up to 256 tokens. A block's key is made of its parent's key and its own tokens, so it
names everything the KV depends on: the engine (fingerprint), whose it is (salt), all tokens before it, and its own.

    root(fingerprint, salt) ─► key of [0, 256) ─► key of [256, 512) ─► key of [512, 700)      a shorter tail

    ┌────────┬─────────────────────────────────────────────────────┬─────────────┬────────┬─────────────────┐
    │ magic  │ version flags fingerprint salt parent start n sizes │ n token ids │ digest │ payload         │
    │ 8      │ digest of payload                                   │ 4 n         │ 8      │ `stored` bytes  │
    └────────┴─────────────────────────────────────────────────────┴─────────────┴────────┴─────────────────┘
     ◄──────────────── covered by the header's digest ────────────────────────────►

Rules: nothing read is believed before its digest fits, lengths least of all; whatever is wrong is one `Damaged`. All
integers are big-endian, so that packed tokens sort as the tokens do.

Measured on one block of F16 KV (256 tokens, 5.9 MB): xxh3 takes 0.1 ms where CRC-32 takes 1.4; zstd level 1 takes 8.4
ms and leaves 92 %, after a byte shuffle 14 to 20 ms and 85 %, and 10 to 20 ms to undo. A block computes in some 600 ms
and comes from the disk in 5, so a seventh of the disk is not worth the shuffle. What shrinks by less than a fifth
is therefore kept as it is; whether it would is tried on a sample.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise

import xxhash
import zstandard

BLOCK = 256
"""Tokens in a full block: one copy out of the pool takes about 3 ms, one back less than 1."""

KEY = 16
"""Bytes of a key and of a fingerprint."""

MAX_PAYLOAD = 2**31
"""More is not believed: 256 tokens at 8 MB each."""

_MAGIC = b"HRKV\r\n\x1a\n"
"""The line ends show a file that went through a text-mode copy."""
_VERSION = 1
_ZSTD = 1
_FIXED = struct.Struct(f">8sHH{KEY}s{KEY}s{KEY}sIIQQQ")
_DIGEST = struct.Struct(">Q")

HEADER_MAX = _FIXED.size + 4 * BLOCK + _DIGEST.size
"""Bytes from the start that hold any header."""

_SAMPLE = 2**16
_PAYS = 0.8


class Damaged(ValueError):
    """These bytes are no block, or not the block they should be. The message says why, and nothing of the content."""


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes that compare as the ids do."""
    return struct.pack(f">{len(tokens)}I", *tokens)


def unpack(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f">{len(packed) // 4}I", packed)


def common_tokens(a: bytes, b: bytes) -> int:
    """How many packed tokens two sequences have in common from their beginning."""
    low, high = 0, min(len(a), len(b)) // 4
    while low < high:  # comparing slices is a memcmp, so halving beats a loop over tokens
        middle = (low + high + 1) // 2
        if a[: 4 * middle] == b[: 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low


def fingerprint(*parts: object) -> bytes:
    """A name for an engine's KV, of everything that shapes it: two engines with equal parts may exchange blocks."""
    return blake2b("\0".join(map(repr, parts)).encode(), digest_size=KEY, person=b"headrace-engine").digest()


def salt_digest(salt: str) -> bytes:
    """What stands for a salt in blobs: a salt may be made from somebody's key."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=KEY, person=b"headrace-salt").digest()


def root(engine: bytes, salt: bytes) -> bytes:
    """The parent of first blocks: of an engine's fingerprint and a `salt_digest`."""
    return blake2b(engine + salt, digest_size=KEY, person=b"headrace-root").digest()


def chain(parent: bytes, packed: bytes) -> bytes:
    """The key of the block with these packed tokens after `parent`."""
    return blake2b(parent + packed, digest_size=KEY, person=b"headrace-block").digest()


@dataclass(frozen=True)
class Block:
    """What a block is, without its KV: consecutive positions of one sequence. No slots: its key is kept."""

    engine: bytes
    """Fingerprint of the engine whose KV it is."""
    salt: bytes
    """`salt_digest`"""
    parent: bytes
    """Key of the block before; `root(engine, salt)` for the first."""
    start: int
    packed: bytes
    """Its token ids, `pack`ed."""

    @property
    def end(self) -> int:
        return self.start + len(self.packed) // 4

    @property
    def full(self) -> bool:
        """No further token fits: it can be found by its key alone."""
        return len(self.packed) == 4 * BLOCK

    @cached_property
    def key(self) -> bytes:
        return chain(self.parent, self.packed)


def blocks(engine: bytes, salt: str, tokens: Sequence[int]) -> list[Block]:
    """The blocks of a sequence: full ones and, if tokens are left, a shorter last one."""
    digest = salt_digest(salt)
    parent = root(engine, digest)
    found: list[Block] = []
    for start, end in pairwise([*range(0, len(tokens), BLOCK), len(tokens)]):
        block = Block(engine, digest, parent, start, pack(tokens[start:end]))
        found.append(block)
        parent = block.key
    return found


@dataclass(frozen=True, slots=True)
class Header:
    """A blob's header that is in order by its own digest."""

    block: Block
    payload_at: int
    """Where the payload begins."""
    stored: int
    """Bytes of the payload in the blob."""
    size: int
    """Bytes of the KV."""
    zstd: bool
    digest: int
    """xxh3_64 of the stored payload."""

    @property
    def total(self) -> int:
        """Bytes of the whole blob."""
        return self.payload_at + self.stored


def encode(block: Block, payload: bytes) -> tuple[bytes, bytes]:
    """(header, payload as stored): written one after the other they are the blob."""
    stored, flags = _shrink(payload)
    fixed = _FIXED.pack(
        _MAGIC,
        _VERSION,
        flags,
        block.engine,
        block.salt,
        block.parent,
        block.start,
        len(block.packed) // 4,
        len(payload),
        len(stored),
        xxhash.xxh3_64_intdigest(stored),
    )
    head = fixed + block.packed
    return head + _DIGEST.pack(xxhash.xxh3_64_intdigest(head)), stored


def _shrink(payload: bytes) -> tuple[bytes, int]:
    middle = max(0, (len(payload) - _SAMPLE) // 2)
    sample = payload[middle : middle + _SAMPLE]
    compress = zstandard.ZstdCompressor(level=1).compress
    if len(compress(sample)) > _PAYS * len(sample):
        return payload, 0
    return compress(payload), _ZSTD


def parse_header(data: bytes) -> Header:
    """Read the header at the start of `data`, of which HEADER_MAX bytes are enough. Raises Damaged."""
    if len(data) < _FIXED.size:
        raise Damaged(f"{len(data)} bytes; a header has at least {_FIXED.size}")
    magic, version, flags, engine, salt, parent, start, n, size, stored, digest = _FIXED.unpack_from(data)
    if magic != _MAGIC:
        raise Damaged("wrong magic")
    if version != _VERSION:
        raise Damaged(f"format version {version}; this server reads {_VERSION}")
    tokens_end = _FIXED.size + 4 * n
    if not 0 < n <= BLOCK or len(data) < tokens_end + _DIGEST.size:
        raise Damaged(f"the header says {n} tokens, and {len(data)} bytes are there")
    if _DIGEST.unpack_from(data, tokens_end)[0] != xxhash.xxh3_64_intdigest(data[:tokens_end]):
        raise Damaged("the header does not fit its digest")
    if flags & ~_ZSTD or not 0 < size <= MAX_PAYLOAD or not 0 < stored <= MAX_PAYLOAD or (not flags and stored != size):
        raise Damaged(f"flags {flags}, {size} bytes of KV in {stored}: that cannot be")
    block = Block(engine, salt, parent, start, data[_FIXED.size : tokens_end])
    return Header(block, tokens_end + _DIGEST.size, stored, size, bool(flags & _ZSTD), digest)


def parse(data: bytes, key: bytes) -> tuple[Block, bytes]:
    """The block `key` and its KV from a whole blob. Raises Damaged, also if it is another block."""
    header = parse_header(data)
    return header.block, unpack_payload(header, data[header.payload_at :], key)


def unpack_payload(header: Header, stored: bytes, key: bytes) -> bytes:
    """The KV, from what follows the header of the block `key`. Raises Damaged."""
    if header.block.key != key:
        raise Damaged("it is another block")
    if len(stored) != header.stored:
        raise Damaged(f"{len(stored)} bytes of payload; the header says {header.stored}")
    if xxhash.xxh3_64_intdigest(stored) != header.digest:
        raise Damaged("the payload does not fit its digest")
    if not header.zstd:
        return stored
    try:
        payload = zstandard.ZstdDecompressor().decompress(stored, max_output_size=header.size)
    except (zstandard.ZstdError, MemoryError) as error:
        raise Damaged("the payload cannot be decompressed") from error
    if len(payload) != header.size:
        raise Damaged(f"{len(payload)} bytes of KV; the header says {header.size}")
    return payload
