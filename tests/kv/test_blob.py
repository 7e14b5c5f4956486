from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest
import xxhash

from headrace.kv.blob import (
    BLOCK,
    HEADER_MAX,
    Block,
    Damaged,
    blocks,
    common_tokens,
    encode,
    fingerprint,
    pack,
    parse,
    parse_header,
    root,
    salt_digest,
    unpack,
)

ENGINE = fingerprint("model", 1)
NOISE = random.Random(1).randbytes(100_000)
ZEROS = bytes(100_000)


def block(n: int = 40, start: int = 256) -> Block:
    return Block(ENGINE, salt_digest("s"), b"p" * 16, start, pack(range(n)))


def blob(payload: bytes = NOISE, n: int = 40) -> bytes:
    return b"".join(encode(block(n), payload))


# --- keys


def test_packed_tokens_sort_as_the_tokens_do() -> None:
    sequences = [[1, 300], [256], [2], [1, 2, 3], [1], [70000, 1], []]
    assert [list(unpack(p)) for p in sorted(map(pack, sequences))] == sorted(sequences)


def test_a_sequence_is_cut_into_blocks_that_know_what_came_before() -> None:
    found = blocks(ENGINE, "", list(range(700)))
    assert [(b.start, b.end, b.full) for b in found] == [(0, 256, True), (256, 512, True), (512, 700, False)]
    assert found[0].parent == root(ENGINE, salt_digest(""))
    assert [b.parent for b in found[1:]] == [b.key for b in found[:-1]]
    assert [b.end for b in blocks(ENGINE, "", list(range(512)))] == [256, 512]
    assert blocks(ENGINE, "", []) == []


def test_a_key_names_all_that_the_kv_depends_on() -> None:
    tokens = list(range(600))
    last = {
        blocks(engine, salt, ids)[-1].key
        for engine, salt, ids in [
            (ENGINE, "", tokens),
            (fingerprint("model", 2), "", tokens),
            (ENGINE, "tenant", tokens),
            (ENGINE, "", [9, *tokens[1:]]),
            (ENGINE, "", [*tokens[:-1], 9]),
            (ENGINE, "", tokens[:-1]),
        ]
    }
    assert len(last) == 6
    longer = blocks(ENGINE, "", [*tokens, *tokens])
    assert [b.key for b in longer[:2]] == [b.key for b in blocks(ENGINE, "", tokens)[:2]], "full blocks are shared"


def test_a_fingerprint_tells_its_parts_apart() -> None:
    assert len({fingerprint("a", "b"), fingerprint("ab"), fingerprint("a", 1), fingerprint("a", "1")}) == 4


def test_a_salt_does_not_stand_in_a_blob() -> None:
    data = b"".join(encode(blocks(ENGINE, "sk-secret", [1, 2])[0], NOISE))
    assert b"sk-secret" not in data


# --- a round trip


@pytest.mark.parametrize("payload", [b"x", NOISE, ZEROS], ids=["one byte", "noise", "zeros"])
@pytest.mark.parametrize("n", [1, 40, BLOCK])
def test_what_is_encoded_is_parsed(payload: bytes, n: int) -> None:
    data = blob(payload, n)
    assert parse(data, block(n).key) == (block(n), payload)
    header = parse_header(data[:HEADER_MAX])
    assert (header.block, header.size, header.total) == (block(n), len(payload), len(data))


def test_only_what_shrinks_well_is_compressed() -> None:
    assert len(blob(ZEROS)) < 2000
    assert blob(NOISE).endswith(NOISE)
    assert parse_header(blob(ZEROS)).zstd
    mostly_noise = b"".join(bytes([NOISE[i], NOISE[-i], NOISE[i // 2], i % 3]) for i in range(50_000))
    assert not parse_header(blob(mostly_noise)).zstd, "a tenth is not worth the time"


# --- damage


def reseal(data: bytes) -> bytes:
    """The header's digest made to fit again: a liar, not an accident."""
    end = parse_header(blob()).payload_at - 8
    return data[:end] + xxhash.xxh3_64_intdigest(data[:end]).to_bytes(8, "big") + data[end + 8 :]


def patch(at: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda _d: b"", "0 bytes"),
        (lambda d: d[:1], "1 bytes"),
        (lambda d: d[:95], "95 bytes"),
        (lambda d: d[:200], "says 40 tokens"),
        (lambda d: d[: len(d) // 2], "the header says"),
        (lambda d: d[:-1], "the header says"),
        (lambda d: d + b"\0", "the header says"),
        (patch(0, b"GGUF"), "magic"),
        (patch(8, b"\0\2"), "version 2"),
        (patch(30, b"?"), "does not fit"),
        (patch(100, b"????"), "does not fit"),
        (patch(50_000, b"?????"), "payload does not fit"),
    ],
)
def test_damage_is_found(damage: Callable[[bytes], bytes], reason: str) -> None:
    with pytest.raises(Damaged, match=reason):
        parse(damage(blob()), block().key)


def test_any_flipped_bit_is_found() -> None:
    data = blob(NOISE[:300])
    for i in range(len(data)):
        flipped = bytearray(data)
        flipped[i] ^= 1 << (i % 8)
        with pytest.raises(Damaged):
            parse(bytes(flipped), block().key)


def test_any_truncation_is_found() -> None:
    data = blob(NOISE[:300])
    for end in range(len(data)):
        with pytest.raises(Damaged):
            parse(data[:end], block().key)


def test_random_bytes_are_no_block() -> None:
    rng = random.Random(2)
    for _ in range(300):
        with pytest.raises(Damaged):
            parse_header(rng.choice([b"", blob()[:12]]) + rng.randbytes(rng.randrange(400)))


@pytest.mark.parametrize(
    ("at", "new"),
    [
        (10, b"\0\2"),  # an unknown flag
        (64, struct.pack(">I", BLOCK + 1)),  # tokens
        (64, struct.pack(">I", 2**32 - 1)),
        (64, struct.pack(">I", 0)),
        (68, struct.pack(">Q", 2**63)),  # bytes of KV
        (68, struct.pack(">Q", 0)),
        (68, struct.pack(">Q", len(NOISE) + 1)),
        (76, struct.pack(">Q", 2**63)),  # bytes stored
        (76, struct.pack(">Q", 0)),
    ],
)
def test_lengths_that_cannot_be_are_not_believed(at: int, new: bytes) -> None:
    with pytest.raises(Damaged):
        parse_header(reseal(patch(at, new)(blob())))


def test_another_block_is_not_taken_for_this_one() -> None:
    with pytest.raises(Damaged, match="another"):
        parse(blob(), block(41).key)


def test_a_compressed_payload_of_another_length_is_damaged() -> None:
    data = blob(ZEROS)
    for size in (len(ZEROS) - 1, len(ZEROS) + 1):
        with pytest.raises(Damaged):
            parse(reseal(patch(68, struct.pack(">Q", size))(data)), block().key)


def test_common_tokens() -> None:
    rng = random.Random(4)
    for _ in range(200):
        n = rng.randrange(BLOCK)
        a, b = [rng.randrange(2**20) for _ in range(BLOCK)], [rng.randrange(2**20) for _ in range(BLOCK)]
        b[:n] = a[:n]
        same = next((i for i in range(BLOCK) if a[i] != b[i]), BLOCK)
        assert common_tokens(pack(a), pack(b)) == same
    assert common_tokens(pack([1, 2]), pack([1, 2, 3])) == 2
    assert common_tokens(pack([1]), pack([256])) == 0, "whole tokens, not bytes"
