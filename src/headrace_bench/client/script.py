"""What a scripted server says and when: bytes and their times, made before anything is asked.

    Script = pieces (seconds after the request's last byte, bytes for the socket) … and whether it closes then

Rules: times are absolute, from the request's last byte: a late piece delays no other; a piece is one write.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import msgspec

Piece = tuple[float, bytes]
DONE = b"data: [DONE]\n\n"
WROTE, ASKED = b"@" * 17, b"?" * 17
"""What stands in a stamped script's pieces for two times: of the write, and of the request's last byte."""
LONGEST_MS = 86_400_000
"""Of a time in a script's name: a day is for streams that are to stay silent."""


@dataclass(frozen=True, slots=True)
class Script:
    """`pieces` in order of time."""

    pieces: tuple[Piece, ...]
    closes: bool = False
    """The connection is closed behind the last piece."""
    stalls: float | None = None
    """Seconds for which the server answers nobody, from the first request on; then all who waited at once: times of
    pieces count from there."""
    logged: bool = True
    """When each piece was written can be asked for."""
    stamped: bool = False
    """`WROTE` and `ASKED` are replaced when a piece is written."""


def event(value: Any) -> bytes:
    """One event with `value` as JSON."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def delta(usage: int | None = None, finish: str | None = None, /, **fields: Any) -> bytes:
    """One chunk of a chat. `usage`: the answer's tokens so far, where they are counted as it goes."""
    chunk: dict[str, Any] = {
        "id": "chatcmpl-s",
        "object": "chat.completion.chunk",
        "model": "scripted",
        "choices": [{"index": 0, "delta": fields, "finish_reason": finish}],
    }
    if usage is not None:
        chunk["usage"] = _usage(usage)
    return event(chunk)


def role() -> bytes:
    """The chunk that most servers begin with: no token."""
    return delta(role="assistant", content="")


def ending(tokens: int) -> bytes:
    """The usage, and [DONE]."""
    return event({"id": "chatcmpl-s", "choices": [], "usage": _usage(tokens)}) + DONE


def stream(*pieces: Piece, closes: bool = False, whole: bool = True, stalls: float | None = None) -> Script:
    """A 200 with an event stream, chunked; its head is piece 0, at once, and each of `pieces` is one chunk of HTTP's.

    `whole`: with HTTP's last, empty chunk, in the write of the last piece. A piece without bytes writes nothing.
    """
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    framed = [(0.0, head), *((at, b"%x\r\n%b\r\n" % (len(data), data) if data else b"") for at, data in pieces)]
    if whole:
        last, data = framed[-1]
        framed[-1] = (last, data + b"0\r\n\r\n")
    return Script(tuple(framed), closes, stalls)


def answer(status: int, body: Any, at: float = 0.0) -> Script:
    """A response with a JSON body."""
    data = msgspec.json.encode(body)
    head = b"HTTP/1.1 %d Scripted\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(data))
    return Script(((at, head + data),))


def whole(text: str) -> Script:
    """A chat's answer that is no stream, of one token."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    body = {"id": "chatcmpl-s", "object": "chat.completion", "created": 0, "model": "scripted", "choices": [choice]}
    return answer(200, {**body, "usage": _usage(1)})


def refused(status: int, words: str, at: float = 0.0) -> Script:
    """An OpenAI-style error."""
    return answer(status, {"error": {"message": words, "type": "scripted", "code": None}}, at)


@functools.lru_cache(maxsize=64)
def even(first: float, gap: float, tokens: int, stall: float | None = None) -> Script:
    """`tokens` tokens, a chunk each: the first after `first` seconds, one every `gap`. For load, so not logged.

    `stall`: seconds of the gap in the middle, instead of `gap`.
    """
    more = 0.0 if stall is None else stall - gap
    times = [first + gap * number + (more if number >= (tokens + 1) // 2 else 0.0) for number in range(tokens)]
    text = [(at, delta(content="word ")) for at in times]
    at = text[-1][0] if text else first
    last = (at, (text.pop()[1] if text else b"") + delta(None, "stop") + ending(tokens))
    return _merged(stream(*text, last))


@functools.lru_cache(maxsize=64)
def stamped(first: float, gap: float, tokens: int) -> Script:
    """As `even`, and each token's text says its number and when it was written: `00017:0000036123.123456 `, the first
    also when the request was read: `00000:0000036123.123456:0000036122.923456 `.

    Whatever relays it, whoever reads it knows how long it took and whether one is missing. Seconds of the machine's
    monotonic clock, in the width of `WROTE`, so that a frame's length holds.
    """
    text = [
        (first + gap * n, delta(content=f"{n:05}:{WROTE.decode()}{f':{ASKED.decode()}' if n == 0 else ''} "))
        for n in range(tokens)
    ]
    at = text[-1][0] if text else first
    last = (at, (text.pop()[1] if text else b"") + delta(None, "stop") + ending(tokens))
    return replace(_merged(stream(*text, last)), stamped=True)


def inscribed(data: bytes, now: float, asked: float) -> bytes:
    """A stamped script's piece as it is written at `now`."""
    return data.replace(WROTE, b"%017.6f" % now).replace(ASKED, b"%017.6f" % asked)


_KINDS = {"even": even, "stamped": stamped}


def named(name: str) -> Script | None:
    """`even:20:10:16`: the first token after 20 ms, then every 10 ms, 16 in all; a fourth number is the stall in ms.
    `stamped:20:10:16`: the same with times for texts.

    None: the name is of another form.
    """
    kind, *numbers = name.split(":")
    try:
        first, gap, tokens, *stall = (float(number) for number in numbers)
    except ValueError:
        return None
    if not (0 <= first <= LONGEST_MS and 0 <= gap <= LONGEST_MS and 0 <= tokens <= 100_000):
        return None
    if kind not in _KINDS or len(stall) > (kind == "even"):
        return None
    return _KINDS[kind](first / 1e3, gap / 1e3, int(tokens), *(ms / 1e3 for ms in stall))


def _merged(script: Script) -> Script:
    """Pieces of the same time in one write."""
    times: dict[float, bytes] = {}
    for at, data in script.pieces:
        times[at] = times.get(at, b"") + data
    return Script(tuple(times.items()), script.closes, script.stalls, logged=False)


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
