"""Bytes of an event stream → events → what each says about an answer.

    bytes ── Splitter ──► Event(name, data) ── read ──► Said(reasoning, text, tool, finish, usage, error, done, …)

Rules: an event is there when its blank line is, wherever the bytes were cut; comments, `id` and `retry` are no events;
a role, an empty text and a usage are no text; whatever a server may have put into its JSON, reading it does not fail:
what is not understood is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

WORDS = 200
"""Characters of a server's own words that are kept."""


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event of the stream."""

    data: bytes
    """Its data lines, joined by line feeds."""
    name: bytes = b""


class Usage(msgspec.Struct, frozen=True, gc=False):
    """A server's own counts; None where it does not say."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None


class Said(msgspec.Struct, frozen=True, gc=False):
    """What one event says."""

    reasoning: str = ""
    text: str = ""
    tool: str = ""
    """Names and arguments of tool calls."""
    finish: str | None = None
    usage: Usage | None = None
    error: str | None = None
    """One line."""
    done: bool = False
    timeline: Mapping[str, Any] | None = None
    """A Headrace's, as it stands there."""
    malformed: bool = False
    """The data is no JSON object."""


DONE = Said(done=True)


class Splitter:
    """Cuts a stream into its events."""

    def __init__(self) -> None:
        self._line: list[bytes] = []
        """Pieces of the line that has no end yet: joined once, however many reads a long one takes."""
        self._data: list[bytes] = []
        self._name = b""
        self._after_cr = False
        """A line feed that comes now belongs to the carriage return before it."""
        self._begun = False

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes."""
        if self._after_cr and data:
            self._after_cr = False
            data = data.removeprefix(b"\n")
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *rest = data.split(b"\n")
        if not rest:
            self._line.append(first)
            return []
        self._line.append(first)
        rest.insert(0, b"".join(self._line))
        self._line = [rest.pop()]
        found: list[Event] = []
        for line in rest:
            if line:
                self._take(line)
            else:
                if self._data:
                    found.append(Event(self._data[0] if len(self._data) == 1 else b"\n".join(self._data), self._name))
                    self._data = []
                self._name = b""
        return found

    def end(self) -> list[Event]:
        """At the end of the stream. An event without its blank line never came, with one exception: [DONE], which some
        servers close right behind."""
        line = b"".join(self._line)
        if line:
            self._take(line)
        self._line = []
        done = self._data == [b"[DONE]"]
        self._data = []
        return [Event(b"[DONE]")] if done else []

    def _take(self, line: bytes) -> None:
        if not self._begun:
            self._begun = True
            line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark at the stream's start is no text
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line.startswith(b"event:"):
            self._name = line[6:].removeprefix(b" ")
        elif line == b"data":
            self._data.append(b"")


def read(event: Event) -> Said:
    """What `event` says."""
    data = event.data
    if data.strip() == b"[DONE]":
        return DONE
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if event.name == b"error":
            return Said(error=one_line(data.decode(errors="replace")))
        return Said(malformed=True)
    if not isinstance(value, dict):
        return Said(error=one_line(str(value))) if event.name == b"error" else Said(malformed=True)
    error = _error(value, event.name)
    if error is not None:
        return Said(error=error)
    reasoning = text = tool = ""
    finish = None
    choices = value.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            finish = reason
        delta = choice.get("delta")
        if isinstance(delta, dict):
            text += _text(delta.get("content"))
            reasoning += _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
            if delta.get("tool_calls"):
                tool += _tool(delta["tool_calls"])
        else:
            text += _text(choice.get("text"))
    ours = value.get("headrace")
    timeline = ours.get("timeline") if isinstance(ours, dict) else None
    return Said(
        reasoning=reasoning,
        text=text,
        tool=tool,
        finish=finish,
        usage=_usage(value.get("usage")),
        timeline=timeline if isinstance(timeline, dict) else None,
    )


def refusal(body: bytes) -> str:
    """The server's words in the body of an answer that is no stream, one line."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return one_line(body.decode(errors="replace"))
    if isinstance(value, dict):
        error = _error(value, b"")
        if error is None:
            error = next((str(value[key]) for key in ("message", "detail") if value.get(key)), None)
        if error is not None:
            return one_line(error)
    return one_line(body.decode(errors="replace"))


def server_timing(header: str) -> dict[str, float | None]:
    """The durations of a `Server-Timing` header: stage → ms."""
    stages: dict[str, float | None] = {}
    for part in header.split(","):
        name, *fields = (field.strip() for field in part.split(";"))
        for field in fields:
            key, _, value = field.partition("=")
            if key.lower() == "dur" and name:
                try:
                    stages[name] = float(value.strip('"'))
                except ValueError:
                    stages[name] = None
    return stages


def one_line(words: str) -> str:
    """`words` on one line of at most WORDS characters."""
    return " ".join(words.split())[:WORDS]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _tool(calls: Any) -> str:
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return "".join(
        _text(function.get("name")) + _text(function.get("arguments"))
        for function in functions
        if isinstance(function, dict)
    )


def _error(value: dict[str, Any], name: bytes) -> str | None:
    """The words of an error object; None if it is none."""
    error = value.get("error")
    if not error and name != b"error" and value.get("object") != "error":
        return None
    if isinstance(error, dict):
        error = error.get("message") or error.get("type") or error
    return one_line(str(error or value.get("message") or value))


def _usage(value: Any) -> Usage | None:
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(_count(value.get("prompt_tokens")), _count(value.get("completion_tokens")), _count(cached))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
