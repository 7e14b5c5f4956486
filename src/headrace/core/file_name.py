r"""Names of files that need not be UTF-8, where text must be.

    portable    "/m/ok.gguf" → itself      "/m/\udcff.gguf" → "\0/m/\xff.gguf"      for messages to another process
    shown       "/m/ok.gguf" → itself      "/m/\udcff.gguf" → "/m/\\xff.gguf"       for people
    plain       "ok"         → itself      "\udcff"         → "_"                   for a name that somebody must type

Python keeps a byte of a name that is no UTF-8 as half a surrogate pair, and neither JSON nor msgpack nor a terminal
takes one. No file's name holds a NUL, so it can say that what follows is bytes, each written as one character.
"""

from __future__ import annotations

import re

_HALVES = re.compile("[\ud800-\udfff]+")


def portable(name: str) -> str:
    """Text that carries the name; `original` gives it back."""
    if _HALVES.search(name) is None:
        return name
    return "\0" + name.encode("utf-8", "surrogateescape").decode("latin-1")


def original(text: str) -> str:
    """The name that `portable` was given."""
    return text[1:].encode("latin-1").decode("utf-8", "surrogateescape") if text.startswith("\0") else text


def shown(text: object) -> str:
    """What a person reads of it: bytes that are no UTF-8 as escapes, whatever else stands around the name."""
    return _HALVES.sub(lambda found: "".join(map(_escaped, found[0])), str(text))


def _escaped(half: str) -> str:
    number = ord(half) - 0xDC00
    return f"\\x{number:02x}" if 0x80 <= number <= 0xFF else "?"


def plain(text: str) -> str:
    """The same with `_` for what nobody can type."""
    return _HALVES.sub("_", text)
