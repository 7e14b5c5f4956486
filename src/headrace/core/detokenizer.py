"""Token bytes to text that may be shown.

Two things are held back: the bytes of a character that is not whole yet, and text that may turn out to be the
beginning of a stop string. At the end held text is shown, a half character is dropped; bytes that can never become a
character give one U+FFFD a run.
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

    def feed(self, piece: bytes) -> str:
        """The text that became certain. After a stop string: ""."""
        text = self._decoder.decode(piece)
        if not self._stop:
            return text
        if self.stopped:
            return ""
        text = self._held + text
        at = min((i for i in (text.find(stop) for stop in self._stop) if i >= 0), default=-1)
        if at >= 0:
            self.stopped = True
            self._held = ""
            return text[:at]
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
