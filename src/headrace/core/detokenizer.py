"""Token bytes to text that may be shown.

Two things are held back: the bytes of a character that is not whole yet, and text that may turn out to be the
beginning of a stop string. At the end held text is shown, a half character is dropped; bytes that can never become a
character give U+FFFD, one for each broken character. Of several stop strings the one that is complete first counts, the
longest if they end together: what is shown does not depend on how the bytes are cut into tokens.
"""

from __future__ import annotations

import codecs

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Feed it the bytes of each token of one choice."""

    __slots__ = ("_decoder", "_held", "_stop", "stopped")

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._decoder = _new_decoder(errors="replace")
        self._stop = stop
        self._held = ""
        self.stopped = False
        """A stop string was met; nothing more is shown."""

    @property
    def held(self) -> str:
        """Text that may turn out to be the beginning of a stop string."""
        return self._held

    @property
    def holds(self) -> bool:
        """The tokens so far say more than was shown: such text, or half a character."""
        return bool(self._held or self._decoder.getstate()[0])

    def feed(self, piece: bytes) -> str:
        """The text that became certain. After a stop string: ""."""
        text = self._decoder.decode(piece)
        if not self._stop:
            return text
        if self.stopped:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)[1]]
        keep = self._may_begin(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:n]):
                    longest = n
                    break
        return longest
