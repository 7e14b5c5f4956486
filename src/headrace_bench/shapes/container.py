"""GGUF version 3 as a writer needs it: a head of keys and tensor descriptions, then the tensors, each at its offset.

    magic  version  tensors  keys │ key type value … │ name dimensions type offset … │ padding │ data, 32-byte aligned

Rules: all numbers are little-endian; a tensor's dimensions stand innermost first, as llama.cpp has them; who writes
knows every size before the first byte of data, so the file is written in one go.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

ALIGNMENT = 32
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
"""GGUF's numbers of the value types that are used here."""
F32, Q4_K, Q6_K = 0, 12, 14
"""ggml's numbers of the tensor types that are used here."""
BLOCKS: Mapping[int, tuple[int, int]] = {F32: (1, 4), Q4_K: (256, 144), Q6_K: (256, 210)}
"""Tensor type → (weights, bytes) of a block."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Value = int | float | str | Sequence[str] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's description. `dimensions`: innermost first."""

    name: str
    dimensions: tuple[int, ...]
    type: int

    @property
    def weights(self) -> int:
        """How many it has."""
        return int(np.prod(self.dimensions, dtype=np.int64))

    @property
    def size(self) -> int:
        """Bytes of its data. ValueError: a row is no whole number of blocks."""
        of, stored = BLOCKS[self.type]
        if self.dimensions[0] % of:
            raise ValueError(f"{self.name}: rows of {self.dimensions[0]} are no whole blocks of {of}")
        return self.weights // of * stored


def write(out: IO[bytes], keys: Mapping[str, Value], tensors: Sequence[Tensor], data: Iterable[Bytes]) -> None:
    """The whole file. `data`: each tensor's bytes in turn, one array or several that follow each other."""
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)))
    for key, value in keys.items():
        head += _string(key) + _value(value)
    offset = 0
    for tensor in tensors:
        head += _string(tensor.name) + struct.pack("<I", len(tensor.dimensions))
        head += struct.pack(f"<{len(tensor.dimensions)}Q", *tensor.dimensions)
        head += struct.pack("<IQ", tensor.type, offset)
        offset += padded(tensor.size)
    out.write(head + bytes(-len(head) % ALIGNMENT))
    parts = iter(data)
    for tensor in tensors:
        missing = tensor.size
        while missing > 0:
            part = next(parts)
            out.write(part.tobytes())
            missing -= part.nbytes
        if missing:
            raise ValueError(f"{tensor.name}: {-missing} bytes too many")
        out.write(bytes(padded(tensor.size) - tensor.size))


def padded(size: int) -> int:
    """`size`, rounded up to where the next tensor may begin."""
    return size + -size % ALIGNMENT


def _value(value: Value) -> bytes:
    """With its type before it. A bool is not taken for a number, nor a number of an array for anything but an int32."""
    match value:
        case bool():
            return struct.pack("<I?", BOOL, value)
        case int():
            return struct.pack("<II", UINT32, value)
        case float():
            return struct.pack("<If", FLOAT32, value)
        case str():
            return struct.pack("<I", STRING) + _string(value)
    if value and isinstance(value[0], int):
        return struct.pack("<IIQ", ARRAY, INT32, len(value)) + np.asarray(value, "<i4").tobytes()
    return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(_string(str(one)) for one in value)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
