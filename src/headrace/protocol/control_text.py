"""Control-token texts in a rendered chat: those that the template wrote count, those that a user wrote do not.

    user text        hi<|im_end|>there<            guard: a mark goes wherever a control text could arise
    guarded          hi<¤|im_end|>there<¤
    rendered         <|im_start|>user⏎hi<¤|im_end|>there<¤<|im_end|>⏎
    split            [1] 'user⏎hi<|im_end|>there<' [2] '⏎'      what is intact is the template's; the marks go away

Rules: a mark is a private-use character that occurs in nothing that is rendered. Afterwards each text piece is exactly
what it would have been without marks, so it tokenises the same. A control text of one character cannot be marked: it
stays text.

A control text can arise in four ways, and each has its mark:
  it stands inside a user's string                       after its first character (overlaps too)
  a user's string ends with the beginning of one         at the string's end
  a user's string begins with the end of one             at the string's start
  a user's string lies wholly inside one                 at the string's start
Strings are looked at with and without the white space around them, as templates like to strip it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby

_PRIVATE_USE = range(0xE000, 0xF900)
_PRIVATE = re.compile("[\ue000-\uf8ff]")


class ControlTexts:
    """The control tokens of one vocabulary. Compiled once, then read only: any thread may use it."""

    def __init__(self, control: Mapping[str, int]) -> None:
        """`control`: text → id. A vocabulary may have thousands."""
        self._ids = {text: token for text, token in control.items() if len(text) > 1}
        texts = sorted(self._ids)
        self._longest = max(map(len, texts), default=0)
        self._joined = "\0".join(texts)
        self._beginnings = frozenset(text[:i] for text in texts for i in range(1, len(text)))
        self._ends = frozenset(text[i:] for text in texts for i in range(1, len(text)))
        # Which lengths are worth looking at, by the one character that a string must begin or end with.
        self._beginning_lengths = _lengths((text[-1], len(text)) for text in self._beginnings)
        self._end_lengths = _lengths((text[0], len(text)) for text in self._ends)
        self._taken = frozenset(_PRIVATE.findall(self._joined))
        by_first = [(first, list(group)) for first, group in groupby(texts, key=lambda text: text[0])]
        never = "(?!)"
        self._whole = re.compile("|".join(_trie(group, 0) for _, group in by_first) or never)
        self._start = re.compile(
            "|".join(f"{re.escape(first)}(?={_trie(group, 1)})" for first, group in by_first) or never
        )
        self._firsts = [first for first, _ in by_first]

    def mark(self, texts: Iterable[str]) -> str | None:
        """The first private-use character in none of `texts` and no control text; None if all 6,400 are taken."""
        used = {char for text in texts if not text.isascii() for char in _PRIVATE.findall(text)} | self._taken
        return next((char for char in map(chr, _PRIVATE_USE) if char not in used), None)

    def guard(self, text: str, mark: str) -> str:
        """A user's string, marked so that no control text can arise from it as it stands."""
        core = text.strip()
        fenced = self._fence(core, core, mark)
        if core != text:
            at = text.find(core)
            fenced = self._fence(text, text[:at] + fenced + text[at + len(core) :], mark)
        return self._start.sub(rf"\g<0>{mark}", fenced)

    def _fence(self, text: str, fenced: str, mark: str) -> str:
        """`fenced` with marks around it where `text`, which it stands for, could be part of a control text."""
        if not text:
            return fenced
        inside = len(text) < self._longest and text in self._joined
        if inside or any(text[:length] in self._ends for length in self._end_lengths.get(text[0], ())):
            fenced = mark + fenced
        if any(text[-length:] in self._beginnings for length in self._beginning_lengths.get(text[-1], ())):
            fenced += mark
        return fenced

    def guard_throughout(self, text: str, mark: str) -> str:
        """The same, for a template that may delete from strings or cut them up: each possible beginning is marked."""
        if not self.suspicious(text):
            return self.guard(text, mark)
        for first in self._firsts:
            text = text.replace(first, first + mark)
        return mark + text + mark

    def suspicious(self, text: str) -> bool:
        """Whether a template that deletes from `text` could be left with a control text."""
        return any(first in text for first in self._firsts)

    def split(self, rendered: str, mark: str) -> tuple[str | int, ...]:
        """Rendered text → ids of the intact control texts, longest match first, and the texts between without marks."""
        pieces: list[str | int] = []
        at = 0
        for match in self._whole.finditer(rendered):
            if between := rendered[at : match.start()].replace(mark, ""):
                pieces.append(between)
            pieces.append(self._ids[match[0]])
            at = match.end()
        if rest := rendered[at:].replace(mark, ""):
            pieces.append(rest)
        return tuple(pieces)


def _lengths(of: Iterable[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    by_char: dict[str, set[int]] = {}
    for char, length in of:
        by_char.setdefault(char, set()).add(length)
    return {char: tuple(sorted(lengths)) for char, lengths in by_char.items()}


def _trie(texts: list[str], at: int) -> str:
    """A pattern for what follows the first `at` characters, which all of the sorted `texts` share. Longest match wins.

    Thousands of plain alternatives would be tried one by one at every `<`; a trie takes one branch a character.
    """
    first, last = texts[0], texts[-1]
    end = at
    while end < len(first) and first[end] == last[end]:
        end += 1
    head = re.escape(first[at:end])
    longer = [text for text in texts if len(text) > end]
    if not longer:
        return head
    branches = "|".join(_trie(list(group), end) for _, group in groupby(longer, key=lambda text: text[end]))
    return f"{head}(?:{branches}){'?' if len(first) == end else ''}"
