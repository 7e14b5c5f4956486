"""What the reader of an answer was told, as far as another engine could go on from there.

Rules: its tokens are known if all of them are. Whether they say just the text only the engine that drew them can tell.
"""

from __future__ import annotations

from headrace.core.request import Told


class Account:
    """Of choice 0."""

    __slots__ = ("_exact", "_holds", "_ids", "_text", "_whole", "length", "tokens")

    def __init__(self) -> None:
        self._text: list[str] = []
        self._ids: list[int] = []
        self._exact = True
        """`_ids` are all the tokens."""
        self._holds = False
        """They say more than the text."""
        self._whole = True
        """`_text` is all that the answer is."""
        self.tokens = 0
        self.length = 0
        """Characters of the text."""

    def add(self, text: str, ids: tuple[int, ...], tokens: int, *, holds: bool = False) -> None:
        """`holds`: what was told so far ends with tokens that say more than its text."""
        self._text.append(text)
        self.length += len(text)
        self._ids += ids
        self._exact = self._exact and len(ids) == tokens
        self.tokens += tokens
        if tokens:
            self._holds = holds

    def spoil(self) -> None:
        """There is more to the answer than its text."""
        self._whole = False

    def since(self, ids: int) -> tuple[tuple[int, ...], bool, bool, int, int]:
        """The tokens after the first `ids`; whether these are all, and the text is; how many tokens and characters."""
        return tuple(self._ids[ids:]), self._exact, self._whole, self.tokens, self.length

    @property
    def text(self) -> str:
        return "".join(self._text)

    def told(self) -> Told | None:
        """What another engine can go on from; None: it is not all that the reader has."""
        if not self._whole:
            return None
        ids = tuple(self._ids) if self._exact and self._ids else None
        return Told(self.text, ids, self.tokens, exact=ids is not None and not self._holds)
