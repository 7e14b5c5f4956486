"""What the scheduler must know of KV memory: two ports, which `kv/` fills, and what shall stay in it."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Pin(msgspec.Struct, frozen=True, array_like=True):
    """A prefix that is kept warm."""

    name: str
    """The template's, for people; two pins never share one."""
    tokens: tuple[int, ...]
    """At least one; the same in every prompt that is made from the template."""


class Kept(msgspec.Struct, frozen=True, gc=False):
    """A block of KV that is kept outside the pool: positions [start, end) of a sequence."""

    start: int
    end: int
    key: bytes


class Outside(msgspec.Struct, frozen=True, gc=False):
    """A prefix that is kept outside the pool."""

    length: int
    """Tokens of it that fit the prompt."""
    blocks: tuple[Kept, ...]
    """From position 0 on, without a gap; the last one may go beyond `length`."""
    seconds: float
    """Predicted for loading all of them."""


class PrefixIndex(Protocol):
    """What `kv.radix.Radix` offers."""

    def match(self, tokens: list[int]) -> tuple[int, int | None]: ...
    def extend(self, slot: int, tokens: list[int]) -> None: ...
    def truncate(self, slot: int, length: int) -> None: ...
    def remove(self, slot: int) -> None: ...
    def redundant(self, slot: int) -> bool: ...
    def tokens(self, slot: int) -> list[int]: ...


class CellPool(Protocol):
    """What `kv.pool.Pool` offers."""

    cells: int
    used: int
    held: int

    @property
    def free(self) -> int: ...
    @property
    def idle(self) -> int: ...
    @property
    def width(self) -> int:
        """Cells that every step looks at: up to the highest one in use."""
        ...

    @property
    def slots_free(self) -> int: ...
    def take(self) -> int: ...
    def share(self, source: int, target: int, length: int) -> None: ...
    def extend(self, slot: int, cells: int) -> None: ...
    def truncate(self, slot: int, length: int) -> None: ...
    def retire(self, slot: int) -> None: ...
    def release(self, slot: int) -> None: ...
