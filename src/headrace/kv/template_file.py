"""The text of a file of templates: one is added or removed, everything else stays to the letter.

Rules: the text is edited, not written anew, so comments, order and spelling of the other entries are kept. Whatever was
done is checked by reading the result: it must say what the old text said, give or take the one template. A file that is
written in a way we cannot edit (`templates = { … }`) is left alone with one line that says so.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.core.errors import StartupError
from headrace.kv.templates import parse

_HEADER = re.compile(r"\s*\[")


def decoded(text: str) -> dict[str, Any]:
    """The document. Raises StartupError."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise StartupError(f"not valid TOML: {error}") from None


def with_template(text: str, name: str, fields: Mapping[str, str]) -> str:
    """The text with one more template at its end. Raises StartupError if it is none, or if one has that name."""
    parse({"templates": {name: dict(fields)}})
    old = decoded(text)
    tables = old.get("templates", {})
    if isinstance(tables, dict) and name in tables:
        raise StartupError(f"templates.{name}: is there already: remove it first")
    entry = "".join([f"[templates.{name}]\n", *(f"{key} = {_string(value)}\n" for key, value in fields.items())])
    gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    new = text + gap + entry
    if isinstance(tables, dict) and _reads_as(new, {**old, "templates": {**tables, name: dict(fields)}}):
        return new
    raise StartupError("the file is not written as tables [templates.NAME]: add the template by hand")


def without_template(text: str, name: str) -> str:
    """The text without that template; comments before and after it stay. Raises StartupError if there is none."""
    old = decoded(text)
    tables = old.get("templates", {})
    if not isinstance(tables, dict) or name not in tables:
        known = ", ".join(tables) if isinstance(tables, dict) else ""
        raise StartupError(f"templates.{name}: there is no such template; there are: {known or 'none'}")
    wanted = {key: value for key, value in tables.items() if key != name}
    for new in _without_some_table(text, name):
        if _reads_as(new, {**old, "templates": wanted}):
            return new
    raise StartupError(f"templates.{name}: is not written as one table [templates.{name}]: remove it by hand")


def _without_some_table(text: str, name: str) -> Iterator[str]:
    """The text without the lines from a header with `name` up to another: the right one is known by what is left."""
    lines = text.splitlines(keepends=True)
    headers = [at for at, line in enumerate(lines) if _HEADER.match(line)]
    for number, start in enumerate(headers):
        if name not in lines[start]:
            continue
        for end in [*headers[number + 1 :], len(lines)]:
            # Comments above the next header are the next table's, unless what looks like one is the end of a long text.
            stop = end
            while stop > start + 1 and (not lines[stop - 1].strip() or lines[stop - 1].lstrip().startswith("#")):
                stop -= 1
            while stop < end and not _is_toml("".join(lines[start:stop])):
                stop += 1
            head, tail = "".join(lines[:start]), "".join(lines[stop:])
            yield head.rstrip("\n") + "\n" if head.strip() and not tail.strip() else head + tail.lstrip("\n")


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _reads_as(text: str, wanted: Mapping[str, Any]) -> bool:
    return _is_toml(text) and {"templates": {}, **tomllib.loads(text)} == wanted


def _string(text: str) -> str:
    """A basic string; of several lines if the text has them."""
    if "\n" in text:
        return f'"""\n{_IN_LINES.sub(_escape, text)}"""'
    return f'"{_IN_LINE.sub(_escape, text)}"'


_IN_LINE = re.compile(r'[\x00-\x08\x0a-\x1f\x7f\\"]')
_IN_LINES = re.compile(r'[\x00-\x08\x0b-\x1f\x7f\\]|"(?="|\Z)')


def _escape(match: re.Match[str]) -> str:
    char = match[0]
    return "\\" + char if char in '\\"' else f"\\u{ord(char):04x}"
