r"""Events of a stream as a log keeps them, and where each of them stands in the answer.

    position   0 ── "Hel" ──▶ 3 ── "lo" ──▶ 5 ── finish ──▶ 6 ── [DONE] ──▶ 7

Rules: a block is one whole event, `data:` first, `\n\n` last; it has no id of its own and is no comment. An event moves
the position on by the characters of its text, at least by one: however an answer is cut into events, the same place in
its text has the same position, so a reader of one server can go on behind another one that cuts differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from headrace.protocol import sse

_FIELDS = (b"data:", b"event:")
_STOPPED = b'"ended":"stopped"'


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    text: str | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    tokens: list[str] = []
    """Of the simple event stream."""


class _Head(msgspec.Struct, gc=False):
    id: str
    created: int


class _Ours(msgspec.Struct, gc=False):
    ended: str | None = None


class _Last(msgspec.Struct, gc=False):
    event: str | None = None
    error: Any = None
    headrace: _Ours | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


def blocks_of(body: bytes) -> list[bytes]:
    """The events of one write, without comments and ids. Whoever wrote it ended each with an empty line."""
    if body.startswith(b"data: ") and body.find(b"\n") == len(body) - 2:
        return [body]  # one event of ours, by far the most frequent
    out = []
    for part in body.replace(b"\r\n", b"\n").split(b"\n\n"):
        lines = [line for line in part.split(b"\n") if line.startswith(_FIELDS)]
        if any(line.startswith(b"data:") for line in lines):
            out.append(b"\n".join(lines) + b"\n\n")
    return out


def text_of(block: bytes) -> str:
    """The text that the block adds to its first choice; "" if there is none in it."""
    if not block.startswith(b"data: {"):
        return ""
    try:
        chunk = _decode(block[6:-2])
    except msgspec.DecodeError:
        return ""
    if not chunk.choices:
        return "".join(chunk.tokens)
    choice = chunk.choices[0]
    return (choice.delta.content if choice.delta is not None else choice.text) or ""


def identity_of(block: bytes) -> tuple[str, int] | None:
    """`id` and `created` of the answer that the block is a chunk of; None if it has none."""
    try:
        head = msgspec.json.decode(block.partition(b"data: ")[2], type=_Head)
    except msgspec.DecodeError:
        return None
    return head.id, head.created


def ending_of(blocks: Sequence[bytes]) -> Literal["done", "stopped", "abandoned", "failed"] | None:
    """How an answer ended that was told in these blocks; None: it has no end yet, more is to be told."""
    last = blocks[-1] if blocks else b""
    if last == sse.DONE:
        # Inside of text the quotation marks would be escaped.
        return "stopped" if any(_STOPPED in block for block in blocks) else "done"
    try:
        end = msgspec.json.decode(last.partition(b"data: ")[2], type=_Last)
    except msgspec.DecodeError:
        return None
    if end.error is not None:
        code = end.error.get("code") if isinstance(end.error, dict) else None
        return "abandoned" if code == "abandoned" else "stopped" if code == "stopped" else "failed"
    if end.event != "done":
        return None
    return "stopped" if end.headrace is not None and end.headrace.ended == "stopped" else "done"


def weight_of(block: bytes) -> int:
    """How far the block moves the position on."""
    return len(text_of(block)) or 1


def cut(block: bytes, known: int) -> bytes:
    """The block without the first `known` characters of its text; 0 < known < its weight."""
    fields = msgspec.json.decode(block[6:-2])
    if "tokens" in fields:
        return sse.event(sse.json_value({"tokens": ["".join(fields["tokens"])[known:]]}))
    choice = fields["choices"][0]
    if "text" in choice:
        choice["text"] = choice["text"][known:]
    else:
        choice["delta"]["content"] = choice["delta"]["content"][known:]
    return sse.event(sse.json_value(fields))


def parse_id(value: str) -> tuple[str, int] | None:
    """(stream, position) of an event id, None if it is none of ours."""
    stream, dash, digits = value.rpartition("-")
    if not dash or not stream or not is_position(digits):
        return None
    return stream, int(digits)


def is_position(digits: str) -> bool:
    """Fifteen digits hold every position there can be, and keep int() from long work on hostile ones."""
    return digits.isascii() and digits.isdigit() and len(digits) <= 15
