"""The head of a GGUF file: what it says of itself, and which tensors stand where. Nothing is loaded.

    ┌──────┬─────────┬───────────┬──────┬─────────────────────┬─────────────────────────────┬────────┐
    │ GGUF │ version │ n tensors │ n kv │ key, type, value …  │ name, shape, type, offset … │ data … │
    │ 4    │ u32     │ u64       │ u64  │                     │                             │ aligned│
    └──────┴─────────┴───────────┴──────┴─────────────────────┴─────────────────────────────┴────────┘

Rules: no file, however it is made, can hang this, fill the memory or raise anything but `BadGguf`: every count is
checked against what is left of the file and against a bound before it is believed; long arrays are passed over. A file
is read, not mapped: one that somebody cuts short meanwhile would end the process. All integers are little-endian.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headrace.core.errors import StartupError
from headrace.core.file_name import shown

MAGIC = b"GGUF"
MOST_KEYS = 65_536
MOST_TENSORS = 262_144
MOST_TEXTS = 4_000_000
"""Texts in an array: the largest vocabularies have 300,000 tokens and twice as many merges."""
MOST_HEAD = 1 << 30
"""Bytes before the data."""
MOST_TEXT = 16 << 20
"""Bytes of a text that is read; a longer one is passed over."""
MOST_ITEMS = 4096
"""Numbers of an array that is read: one a layer; a longer one is passed over."""
_CHUNK = 1 << 20

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9

TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
"""ggml_type → name, numbers in a block, bytes of a block."""


class BadGguf(StartupError):
    """No file that could be loaded, and why, in one line."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A value that was passed over: an array of `count` items, or a text of so many bytes."""

    count: int


Value = bool | int | float | str | tuple[bool | int | float | str, ...] | Passed


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of the table. `offset`: from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int

    @property
    def size(self) -> int | None:
        """Bytes; None for a type that is not known here."""
        known = TENSOR_TYPES.get(self.type)
        if known is None:
            return None
        count = 1
        for n in self.shape:
            count *= n
        return count // known[1] * known[2]


@dataclass(frozen=True, slots=True)
class Head:
    """All that stands before the data."""

    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    data: int
    """Where the data begins, bytes."""
    size: int
    """Of the file, bytes."""
    pairs: Mapping[str, tuple[int, int]]
    """Where each key stands with its type and value: first byte, and the first behind it. In the file's order."""

    def number(self, key: str, default: int = 0) -> int:
        """A whole number of the metadata; `default` if it is not there or something else."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def text(self, key: str) -> str:
        """A text of the metadata, "" if there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""


class _Reader:
    """Bytes in order, read in chunks; never more than the file has, or MOST_HEAD."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._buffer, self._at = file, b"", 0
        self._base = 0
        """Where the buffer stands in the file."""
        self._end = min(size, MOST_HEAD)

    @property
    def position(self) -> int:
        return self._base + self._at

    @property
    def left(self) -> int:
        return self._end - self.position

    def take(self, n: int) -> bytes:
        if n > self.left:
            raise BadGguf(f"its head ends at byte {self._end}, in the middle of something")
        if self._at + n > len(self._buffer):
            self._fill(n)
        data = self._buffer[self._at : self._at + n]
        self._at += n
        return data

    def skip(self, n: int) -> None:
        if n > self.left:
            raise BadGguf(f"its head ends at byte {self._end}, in the middle of something")
        if self._at + n <= len(self._buffer):
            self._at += n
        else:
            self._base, self._buffer, self._at = self.position + n, b"", 0
            self._file.seek(self._base)

    def skip_texts(self, n: int) -> None:
        """`n` texts, one after the other: the one loop here that runs a million times."""
        for _ in range(n):
            if self._at + 8 > len(self._buffer):
                if self.left < 8:
                    raise BadGguf(f"its head ends at byte {self._end}, in the middle of something")
                self._fill(8)
            at = self._at
            end = at + 8 + int.from_bytes(self._buffer[at : at + 8], "little")
            if end <= len(self._buffer):
                self._at = end
            else:
                self.skip(end - at)

    def number(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        return value

    def count(self, most: int, what: str) -> int:
        n = int(self.number("Q"))
        if n > most:
            raise BadGguf(f"it says that it has {n} {what}, at most {most} are read")
        return n

    def text(self, most: int, what: str) -> str:
        n = int(self.number("Q"))
        if n > most:
            raise BadGguf(f"a {what} in it is {n} bytes long, at most {most} are read")
        return self.take(n).decode("utf-8", "replace")

    def _fill(self, n: int) -> None:
        rest = self._buffer[self._at :]
        self._base += self._at
        self._at = 0
        wanted = min(max(_CHUNK, n), self._end - self._base) - len(rest)
        self._buffer = rest + self._file.read(wanted)
        if len(self._buffer) < n:
            raise BadGguf("it became shorter while it was read")


def read_head(path: Path) -> Head:
    """Raises BadGguf, which names the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for somebody to write
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no ordinary file"
                raise BadGguf(f"is {kind}, not a GGUF file")
            return _head(_Reader(file, status.st_size), status.st_size)
    except BadGguf as error:
        raise BadGguf(f"{shown(path)} {_subject(error.message)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadGguf(f"cannot read the model file {shown(path)}: {reason.lower()}") from None


def _subject(message: str) -> str:
    return message if message.startswith(("is ", "starts ")) else f"is broken: {message}"


def _head(reader: _Reader, size: int) -> Head:
    if size == 0:
        raise BadGguf("is empty, not a GGUF file")
    magic = reader.take(min(4, size))
    if magic != MAGIC:
        raise BadGguf(f"is not a GGUF file: it starts with {magic!r}, not with {MAGIC!r}")
    version = int(reader.number("I"))
    if version not in (2, 3):
        raise BadGguf(f"is a GGUF file of version {version}; versions 2 and 3 can be read")
    n_tensors, n_keys = reader.count(MOST_TENSORS, "tensors"), reader.count(MOST_KEYS, "keys")
    metadata: dict[str, Value] = {}
    pairs: dict[str, tuple[int, int]] = {}
    for _ in range(n_keys):
        start = reader.position
        key = reader.text(65_535, "key")
        if key in metadata:
            raise BadGguf(f"the key {key[:60]!r} stands in it twice")
        metadata[key] = _value(reader, int(reader.number("I")), key)
        pairs[key] = start, reader.position
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise BadGguf(f"general.alignment is {alignment!r}, which is no power of 2")
    found = [_tensor(reader) for _ in range(n_tensors)]
    data = -(-reader.position // alignment) * alignment
    tensors = tuple(Tensor(name, shape, kind, data + offset) for name, shape, kind, offset in found)
    for tensor in tensors:
        end = tensor.offset + (tensor.size or 0)
        if end > size:
            raise BadGguf(
                f"is cut short: tensor {tensor.name[:60]} ends at byte {end}, and the file has {size}; get it again"
            )
    return Head(version, metadata, tensors, data, size, pairs)


def _value(reader: _Reader, kind: int, key: str) -> Value:
    if kind == _TEXT:
        n = int(reader.number("Q"))
        if n > MOST_TEXT:
            reader.skip(n)
            return Passed(n)
        return reader.take(n).decode("utf-8", "replace")
    if kind == _ARRAY:
        item, n = int(reader.number("I")), int(reader.number("Q"))
        if item == _TEXT:
            if n > MOST_TEXTS or 8 * n > reader.left:
                raise BadGguf(f"{key[:60]} says that it has {n} texts, which cannot be")
            reader.skip_texts(n)
            return Passed(n)
        if item in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[item])
            if n > MOST_ITEMS:
                reader.skip(n * size)
                return Passed(n)
            return struct.unpack(f"<{n}{_SCALARS[item]}", reader.take(n * size))
        raise BadGguf(f"{key[:60]} is an array of the unknown type {item}")
    if kind in _SCALARS:
        return reader.number(_SCALARS[kind])
    raise BadGguf(f"{key[:60]} has the unknown type {kind}")


def _tensor(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.text(4096, "tensor's name")
    dimensions = int(reader.number("I"))
    if dimensions > 4:
        raise BadGguf(f"tensor {name[:60]} has {dimensions} dimensions")
    shape = tuple(int(reader.number("Q")) for _ in range(dimensions))
    return name, shape, int(reader.number("I")), int(reader.number("Q"))


_SPLIT = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$", re.DOTALL)


def read_parts(path: Path) -> tuple[Head, ...]:
    """The heads of all files of a model, the given one first. Raises BadGguf, also for one that is missing."""
    first = read_head(path)
    count = first.number("split.count", 1)
    if count <= 1:
        return (first,)
    name = _SPLIT.match(path.name)
    if count > 1000 or name is None or int(name[3]) != count:
        raise BadGguf(
            f"{shown(path)} is one of {count} files, and its name does not end with -00001-of-{count:05}.gguf"
        )
    if first.number("split.no") != 0:
        raise BadGguf(f"{shown(path)} is file {name[2]} of {count}: name the first one, {shown(name[1])}-00001-of-…")
    rest = []
    for part in range(2, count + 1):
        other = path.with_name(f"{name[1]}-{part:05}-of-{count:05}.gguf")
        if not other.exists():
            raise BadGguf(f"{shown(path)} is one of {count} files, and {shown(other.name)} is not beside it")
        rest.append(read_head(other))
    return (first, *rest)


def check_parts(path: Path) -> None:
    """Raises BadGguf for what could not be loaded, in better words than the library has."""
    read_parts(path)
