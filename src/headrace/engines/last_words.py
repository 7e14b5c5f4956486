"""What a child process says on stderr: which line of it says why it ended, and what of it is for the log.

    …/llama-vocab.cpp:2201: GGML_ASSERT(a == b) failed            an assertion: the words, without the folder
    terminate called after throwing an instance of 'std::…'       an exception of C++: its class and its words
      what():  vector::_M_range_check
    Traceback (most recent call last): … ValueError: no           one of Python: its last line
    anything else                                                  the last line

Rules: pure; bytes come in as they are read, whatever they hold; what is kept is bounded. No line is passed on while
the child is not up: what kept it from that is told in one line by whoever started it.
"""

from __future__ import annotations

import re
from collections import deque

LINES = 60
"""Of the last words; a backtrace of llama.cpp has 90, an assertion stands before it."""
LENGTH = 400
"""Characters of a line that are kept."""

_ASSERTION = re.compile(r"^(?:\S*[/\\])?([\w.+-]+\.(?:c|cc|cpp|cxx|cu|h|hpp|m|mm|metal):\d+: .*)$")
_TERMINATE = re.compile(r"^terminate called (?:after throwing an instance of '(.+)'|.+)$")
_WHAT = re.compile(r"^\s*what\(\):\s*(.*)$")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: .*|)$")
_TRACEBACK = "Traceback (most recent call last):"


class LastWords:
    """Lines of a stderr that is read in pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: deque[str] = deque(maxlen=LINES)
        self._assertion = ""

    def feed(self, data: bytes) -> list[str]:
        """The lines that are whole now."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[: 4 * LENGTH]
        return [line for line in map(self._keep, whole) if line]

    def end(self) -> list[str]:
        """No more comes: the last line, if it has no end."""
        rest, self._rest = self._rest, b""
        return [line for line in (self._keep(rest),) if line]

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines)

    @property
    def cause(self) -> str:
        """The line that says why it ended; "" if it said nothing."""
        if self._assertion:
            return self._assertion
        lines = self._lines
        kinds = [found for line in lines if (found := _TERMINATE.match(line))]
        if kinds:
            words = next((found[1] for line in reversed(lines) if (found := _WHAT.match(line))), "")
            return ": ".join(part for part in (kinds[-1][1] or "an exception of C++", words) if part)
        if _TRACEBACK in lines:
            raised = [line for line in lines if line[:1].strip() and line != _TRACEBACK and _EXCEPTION.match(line)]
            if raised:
                return raised[-1]
        return lines[-1].strip() if lines else ""

    def _keep(self, raw: bytes) -> str:
        line = "".join(c if c.isprintable() else " " for c in raw[: 4 * LENGTH].decode("utf-8", "replace"))
        line = line.rstrip()[:LENGTH]
        if line:
            self._lines.append(line)
            found = _ASSERTION.match(line)
            if found:
                self._assertion = found[1]
        return line


def words_of(said: bytes) -> str:
    """The line that says why, of all that a process has said."""
    words = LastWords()
    words.feed(said)
    words.end()
    return words.cause
