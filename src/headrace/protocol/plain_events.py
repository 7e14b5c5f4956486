"""The simple event stream: what a page asks for with one line, and what it gets.

    ?prompt=… or {"prompt": …}  ── chat_fields ──▶  a chat request

    data: {"event":"ttft","value":41.2}             the first text is here, ms after the request's first byte
    data: {"tokens":["Once"]}                       pieces of text, mostly a token each; all of one write in one event
    data: {"tokens":[" upon"," a"," time"]}
    data: {"event":"done","finish_reason":"stop","usage":{…}}       or {"event":"error","error":{…}}

Rules: it is a chat request with other clothes on, so every field is judged by the same rows; what would not fit into
such a stream is refused. The last event has the id `done`: an EventSource reconnects by itself after every end, and
tells then that it had it. Events of a stream that can be taken up again get their ids elsewhere, this one too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from headrace.core.errors import HeadraceError, InvalidRequest
from headrace.core.events import Delta, FinishReason, Relayed
from headrace.protocol import sse
from headrace.protocol.answer import Encoder, Usage
from headrace.protocol.envelope import envelope
from headrace.protocol.fields import MAX_WINDOW, Field, boolean, integer, mapping, text, wrong

END_ID = b"done"
"""What an EventSource says in `Last-Event-ID` after a whole answer."""
MAX_PARAMETERS = 64
NUMBERS = ("max_tokens", "temperature", "window")
PARAMETERS = ("model", "prompt", "system", *NUMBERS, "resume")
"""What a query may hold; what else is in it is ignored."""

PROMPT: Field[str | None] = Field("prompt", text, None)
SYSTEM: Field[str | None] = Field("system", text, None)
WINDOW: Field[int] = Field("window", integer(1, MAX_WINDOW), 1)
RESUME: Field[bool] = Field("resume", boolean, False)
OURS: Field[Mapping[str, Any]] = Field("headrace", mapping, {})

_BOOLEANS = {"true": True, "false": False}
_NUMBER = re.compile(r"-?\d{1,18}(\.\d{1,18})?")
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"(\w+)"')
"""Inside of text a quotation mark would be escaped."""
_OPEN, _CLOSE = b'data: {"tokens":[', b"]}\n\n"


def query_fields(query: bytes) -> dict[str, Any]:
    """The parameters of a GET, numbers as numbers. Raises InvalidRequest."""
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_PARAMETERS)
    except UnicodeError:
        raise InvalidRequest("the query is not percent-encoded UTF-8") from None
    except ValueError:
        raise InvalidRequest(f"the query holds more than {MAX_PARAMETERS} parameters") from None
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name not in PARAMETERS:
            continue
        if name in fields:
            raise InvalidRequest(f"{name} stands twice in the query", param=name)
        number = _NUMBER.fullmatch(value) if name in NUMBERS else None
        fields[name] = value if number is None else float(value) if number[1] else int(value)
        if name == "resume":
            fields[name] = _BOOLEANS.get(value, value)
    return fields


def chat_fields(fields: Mapping[str, Any], *, model: str) -> dict[str, Any]:
    """The chat request that is meant. `model`: the one that need not be named. Raises InvalidRequest."""
    prompt, system, window = PROMPT.read(fields), SYSTEM.read(fields), WINDOW.read(fields)
    given = fields.get("messages")
    if (prompt is None) == (given is None):
        raise InvalidRequest("send prompt, a string, or messages, a list; and only one of them", param="prompt")
    if system is not None and prompt is None:
        raise InvalidRequest("system goes with prompt; among messages it is the first of them", param="system")
    for name, only in (("stream", True), ("n", 1), ("logprobs", False)):
        value = fields.get(name)
        if value is not None and (type(value) is not type(only) or value != only):
            raise wrong(name, f"{'true' if only is True else 'false' if only is False else only} here", value)
    ours = dict(OURS.read(fields))
    if fields.get("window") is not None:
        if ours.get("pace") is not None:
            raise InvalidRequest("window and headrace.pace say the same thing; send one of them", param="window")
        ours["pace"] = f"window:{window}"
    if fields.get("resume") is not None:
        if ours.get("resume") is not None:
            raise InvalidRequest("resume and headrace.resume say the same thing; send one of them", param="resume")
        ours["resume"] = RESUME.read(fields)
    messages = given
    if prompt is not None:
        messages = [{"role": "user", "content": prompt}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
    rest = {name: value for name, value in fields.items() if name not in ("prompt", "system", "window", "resume")}
    named = fields.get("model")
    return {
        **rest,
        "model": model if named is None else named,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "headrace": ours,
    }


def plain_error_event(error: HeadraceError) -> bytes:
    """The event that ends such a stream that failed after its first byte."""
    return sse.event(b'{"event":"error",' + envelope(error)[1:])


class PlainEvents(Encoder):
    """The encoder of one response.

    `ttft` gives the milliseconds since the request's first byte. `report` the timeline, if it is wanted. `ids`: the
    last event says by its id that it is the last.
    """

    passes = False

    def __init__(self, *, ttft: Callable[[], float], report: Callable[[], Mapping[str, Any]] | None, ids: bool) -> None:
        self._ttft = ttft
        self._report = report
        self._last = b"id: " + END_ID + b"\n" if ids else b""
        self._reason = "stop"
        self._begun = False
        self._ended: str | None = None
        """Why it is not complete."""

    def begin(self, index: int) -> None:
        self._begun = True

    def delta(self, index: int, delta: Delta) -> bytes:
        return self._say(delta.text)

    def relayed(self, event: Relayed) -> bytes:
        if found := _FINISH.search(event.raw):
            self._reason = found[1].decode()
        return self._say(event.text if event.content is None else event.content)

    def finish(self, index: int, reason: FinishReason, timeline: Mapping[str, Any] | None) -> bytes:
        self._reason = reason
        return b""

    def stopped(self, index: int) -> bytes:
        self._ended = "stopped"
        return b""

    def timing(self, timeline: Mapping[str, Any]) -> bytes:
        return b""

    def end(self, usage: Usage | None) -> bytes:
        done: dict[str, Any] = {"event": "done", "finish_reason": self._reason}
        if usage is not None:
            done["usage"] = usage.report()
        ours: dict[str, Any] = {} if self._report is None else {"timeline": self._report()}
        if self._ended is not None:
            ours["ended"] = self._ended
        if ours:
            done["headrace"] = ours
        return self._last + sse.event(sse.json_value(done))

    def error(self, error: HeadraceError) -> bytes:
        return self._last + plain_error_event(error)

    def joined(self, chunks: Sequence[bytes]) -> bytes:
        out: list[bytes] = []
        pieces: list[bytes] = []
        for chunk in (*chunks, b""):
            if chunk.startswith(_OPEN):
                pieces.append(chunk[len(_OPEN) : -len(_CLOSE)])
                continue
            if pieces:
                out.append(_OPEN + b",".join(pieces) + _CLOSE)
                pieces = []
            out.append(chunk)
        return b"".join(out)

    def _say(self, text: str) -> bytes:
        if not text:
            return b""
        event = _OPEN + sse.json_string(text) + _CLOSE
        if self._begun:
            return event
        self._begun = True
        return sse.event(sse.json_value({"event": "ttft", "value": round(self._ttft(), 3)})) + event
