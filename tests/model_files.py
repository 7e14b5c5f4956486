"""Model files of the tests: one that is there, with other metadata and fewer layers."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

U32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = 4, 6, 7, 8, 9, 10, 11, 12
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, U32: 4, 5: 4, F32: 4, BOOL: 1, U64: 8, I64: 8, F64: 8}
ALIGNMENT = 32


def with_metadata(source: Path, target: Path, said: Mapping[str, float | str], *, layers: int = 1) -> Path:
    """`source`, a GGUF of a llama-like model, cut to its first `layers` layers. `said` is added to its metadata or
    replaces what is there: numbers as 32-bit floats, text as text."""
    data = source.read_bytes()
    tensors, pairs = struct.unpack_from("<QQ", data, 8)
    at = 24
    kept: list[bytes] = []
    changed = dict(said)
    for _ in range(pairs):
        start = at
        key, at = _text(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        at = _behind(data, at + 4, kind)
        if key.endswith(".block_count"):
            kept.append(_string(key) + struct.pack("<II", U32, layers))
        elif key not in changed:
            kept.append(data[start:at])
    kept += [_string(key) + _value(value) for key, value in changed.items()]
    rows = []
    for _ in range(tensors):
        name, at = _text(data, at)
        (dims,) = struct.unpack_from("<I", data, at)
        shape = data[at : at + 4 + 8 * dims + 4]  # with the kind of number
        at += len(shape)
        rows.append((name, shape, *struct.unpack_from("<Q", data, at)))
        at += 8
    base = _aligned(at)
    ends = [*sorted(offset for *_, offset in rows), len(data) - base][1:]
    end_of = dict(zip(sorted(offset for *_, offset in rows), ends, strict=True))
    rows = [row for row in rows if not row[0].startswith("blk.") or int(row[0].split(".")[1]) < layers]
    head, body = b"", b""
    for name, shape, offset in rows:
        head += _string(name) + shape + struct.pack("<Q", len(body))
        body += data[base + offset : base + end_of[offset]]
        body += bytes(_aligned(len(body)) - len(body))
    out = data[:8] + struct.pack("<QQ", len(rows), len(kept)) + b"".join(kept) + head
    target.write_bytes(out + bytes(_aligned(len(out)) - len(out)) + body)
    return target


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _text(data: bytes, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + size].decode(), at + 8 + size


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: float | str) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    return struct.pack("<If", F32, value)


def _behind(data: bytes, at: int, kind: int) -> int:
    """Where a value ends."""
    if kind == STRING:
        return _text(data, at)[1]
    if kind != ARRAY:
        return at + _SIZES[kind]
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner in _SIZES:
        return at + int(count) * _SIZES[inner]
    for _ in range(count):
        at = _behind(data, at, inner)
    return at
