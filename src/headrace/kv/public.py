"""Which kept blocks any salt may use: those of prefixes that are pinned for all.

    parent ─▶ {key: tokens of the block, from its beginning, that are public}

Rules: a block may be allowed before it is kept and after it was lost; only kept ones are found. Found they are without
a look at their siblings, of which there may be tens of thousands.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.kv.blob import Block


class PublicBlocks:
    def __init__(self) -> None:
        self._lengths: dict[bytes, int] = {}
        """Allowed ones, kept or not."""
        self._below: dict[bytes, dict[bytes, int]] = {}
        """Kept ones, by their parent."""

    def __repr__(self) -> str:
        return f"<PublicBlocks [{len(self._lengths)}]>"

    def below(self, parent: bytes) -> Mapping[bytes, int]:
        """Key → public tokens of the kept ones."""
        return self._below.get(parent, {})

    def allow(self, key: bytes, length: int, kept: Block | None) -> None:
        """So many of its tokens, at least. `kept`: the block, if it is."""
        self._lengths[key] = max(self._lengths.get(key, 0), length)
        if kept is not None:
            self.entered(kept)

    def forbid(self, key: bytes, kept: Block | None) -> None:
        self._lengths.pop(key, None)
        if kept is not None:
            self.lost(kept)

    def entered(self, block: Block) -> None:
        """It is kept now."""
        length = self._lengths.get(block.key)
        if length is not None:
            self._below.setdefault(block.parent, {})[block.key] = length

    def lost(self, block: Block) -> None:
        """It is not any more."""
        found = self._below.get(block.parent)
        if found is not None and found.pop(block.key, None) is not None and not found:
            del self._below[block.parent]
