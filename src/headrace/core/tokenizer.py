"""Text to token ids and back: the port behind which a vocabulary stands."""

from __future__ import annotations

from typing import Protocol


class Tokenizer(Protocol):
    """Text ↔ ids. Thread-safe."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of `text`; no BOS added. `special`: read control-token texts as those tokens."""
        ...

    def piece(self, token: int) -> bytes:
        """The token's bytes; control tokens give their text."""
        ...
