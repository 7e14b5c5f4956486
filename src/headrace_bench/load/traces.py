"""Files of what others recorded, read into one shape: when a request came, how long it was, what it shared.

    Azure, published   TIMESTAMP,ContextTokens,GeneratedTokens       a date and a time of day
    Azure, reduced     arrival_s,context_tokens,generated_tokens     seconds
    Mooncake           {"timestamp", "input_length", "output_length", "hash_ids"}   ms; an id is a block of 512 tokens
    ServeGen's rates   window_start_s,rate_rps,…
    lengths            two columns, prompt and answer, by any of the names that those files use
    prompts            {"turns": ["first message", …]}

Rules: times count from the first request and are in order; what cannot be read is a Misuse with file and line.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace_bench.fault import Misuse

T = TypeVar("T")
BLOCK = 512
"""Tokens of a Mooncake block."""
_MOMENT = re.compile(r"(.+?:\d\d)(\.\d+)?(?:Z|[+-]\d\d:\d\d)?")
"""Date and time, a fraction of any length, a zone that does not matter among moments of one file."""
_TIMES = ("arrival_s", "TIMESTAMP")
_PROMPT = ("context_tokens", "ContextTokens", "num_prefill_tokens", "input_tokens", "input_length", "prompt_tokens")
_ANSWER = ("generated_tokens", "GeneratedTokens", "num_decode_tokens", "output_tokens", "output_length")


@dataclass(frozen=True, slots=True)
class Row:
    """One recorded request."""

    at: float
    """Seconds from the first."""
    prompt: int
    """Tokens."""
    answer: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks of 512 tokens: an id stands for its block and all before it."""


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


class _Prompt(msgspec.Struct):
    turns: list[str]


def requests(path: str) -> tuple[Row, ...]:
    """A trace: Mooncake's where lines are JSON, else Azure's."""
    text = _read(path)
    if text.lstrip().startswith("{"):
        lines = _lines(path, text, _Mooncake)
        rows = [Row(r.timestamp / 1000, r.input_length, r.output_length, tuple(r.hash_ids)) for r in lines]
    else:
        table = _table(path, text)
        at, prompt, answer = (_column(path, table, names) for names in (_TIMES, _PROMPT, _ANSWER))
        rows = [
            Row(*row)
            for row in zip(
                _values(path, table, at, _moment),
                _values(path, table, prompt, int),
                _values(path, table, answer, int),
                strict=True,
            )
        ]
    if not rows:
        raise Misuse(f"{path}: there is no request in it")
    for number, (before, row) in enumerate(itertools.pairwise(rows), 2):
        if row.at < before.at:
            raise Misuse(f"{path}: request {number} came before the one before it; a trace is in order of time")
    first = rows[0].at
    return tuple(Row(row.at - first, row.prompt, row.answer, row.blocks) for row in rows)


def rates(path: str) -> tuple[tuple[float, float], ...]:
    """(second at which a window begins, requests per second in it), in order."""
    table = _table(path, _read(path))
    begin = _values(path, table, _column(path, table, ("window_start_s",)), float)
    rate = _values(path, table, _column(path, table, ("rate_rps",)), float)
    found = tuple(zip(begin, rate, strict=True))
    if len(found) < 2 or any(late[0] <= early[0] for early, late in itertools.pairwise(found)):
        raise Misuse(f"{path}: it needs two windows or more, each beginning after the one before it")
    if min(rate) < 0 or max(rate) <= 0:
        raise Misuse(f"{path}: rates are 0 or more, and one of them has to be")
    return found


def lengths(path: str) -> tuple[tuple[int, int], ...]:
    """(prompt, answer), tokens."""
    table = _table(path, _read(path))
    prompt = _values(path, table, _column(path, table, _PROMPT), int)
    answer = _values(path, table, _column(path, table, _ANSWER), int)
    found = tuple(zip(prompt, answer, strict=True))
    if not found or min(prompt) < 1 or min(answer) < 0:
        raise Misuse(f"{path}: it needs a line or more, of prompts of 1 token and more")
    return found


def prompts(path: str) -> tuple[tuple[str, ...], ...]:
    """The messages of each conversation's user."""
    found = tuple(tuple(line.turns) for line in _lines(path, _read(path), _Prompt))
    if not found or not all(found):
        raise Misuse(f'{path}: each line has to be {{"turns": ["…"]}} with a message or more')
    return found


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise Misuse(f"{path}: {why}") from None


def _lines(path: str, text: str, kind: type[T]) -> Sequence[T]:
    decoder = msgspec.json.Decoder(kind)
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise Misuse(f"{path}, line {number}: {error}") from None
    return found


def _table(path: str, text: str) -> Sequence[dict[str, str]]:
    reader = csv.DictReader(io.StringIO(text))
    if not reader.fieldnames:
        raise Misuse(f"{path}: it is empty")
    reader.fieldnames = [name.strip() for name in reader.fieldnames]
    rows: list[dict[str, str]] = list(reader)
    if not rows:
        raise Misuse(f"{path}: there is nothing below its column names")
    return rows


def _column(path: str, table: Sequence[dict[str, str]], names: Sequence[str]) -> str:
    for name in names:
        if name in table[0]:
            return name
    raise Misuse(f"{path}: no column is called {' or '.join(names)}; there are {', '.join(map(str, table[0]))}")


def _values(path: str, table: Sequence[dict[str, Any]], name: str, kind: Callable[[str], T]) -> list[T]:
    def all_of_them() -> Iterator[T]:
        for number, row in enumerate(table, 2):
            try:
                yield kind(row[name])
            except (TypeError, ValueError):
                raise Misuse(f"{path}, line {number}: {name} is {row[name]!r}") from None

    return list(all_of_them())


def _moment(text: str) -> float:
    """Seconds from any fixed moment: a number, or a date and a time with up to seven digits of a second."""
    try:
        return float(text)
    except ValueError:
        found = _MOMENT.fullmatch(text.strip())
        if found is None:
            raise
        moment = datetime.fromisoformat(found[1]) - datetime(1970, 1, 1)
        return moment.total_seconds() + float(f"0{found[2] or ''}")
