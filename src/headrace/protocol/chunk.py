"""A chunk of another server's answer, as far as a relay must understand it, and what can be changed within its bytes.

Rules: what we do not know passes unread. A field whose type surprises us is no error: such a chunk is read in the
general way, and counts as more than plain text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from headrace.core.events import Tokens
from headrace.protocol import sse

ROLE = b'"role":"assistant",'
GIVEN_UP = frozenset(("abort", "error"))
"""Finish reasons of an answer that its engine did not finish: it shuts down, or broke."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises."""


class Function(msgspec.Struct, gc=False):
    """A call of a tool, or a piece of one."""

    arguments: str | None = None


class ToolCall(msgspec.Struct, gc=False):
    function: Function | None = None


class Delta(msgspec.Struct, gc=False):
    """What a chunk adds to a chat's choice; the `message` of a whole answer looks the same."""

    content: str | None = None
    role: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Function | None = None

    @property
    def special(self) -> bool:
        """There is more than content."""
        return bool(self.reasoning_content or self.reasoning or self.tool_calls or self.refusal or self.function_call)

    def more(self) -> str:
        """The text in it that is not content."""
        out = (self.reasoning_content or self.reasoning or "") + (self.refusal or "")
        for call in self.tool_calls or ():
            out += (call.function and call.function.arguments) or ""
        return out + ((self.function_call and self.function_call.arguments) or "")


class Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: Delta | None = None
    message: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Any = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class Chunk(msgspec.Struct, gc=False):
    """A chunk, or a whole answer."""

    choices: list[Choice] = []
    id: str | None = None
    created: Any = None
    model: str | None = None
    object: str | None = None
    usage: Usage | None = None
    error: Any = None

    @property
    def plain(self) -> str | None:
        """The text that it adds to choice 0, if it is nothing but that."""
        choices = self.choices
        if len(choices) != 1 or self.usage is not None or self.error is not None or self.object == "error":
            return None
        choice = choices[0]
        if choice.index or choice.finish_reason or choice.logprobs:
            return None
        delta = choice.delta
        if delta is None:
            return choice.text
        if delta.role is not None or choice.text or delta.special:
            return None
        return delta.content


read = msgspec.json.Decoder(Chunk).decode
"""The chunk, if its fields are of the types above. Raises what stands in UNREADABLE."""


def decode(data: bytes) -> tuple[Chunk, Any]:
    """The chunk; and its `choices` as decoded in the general way, None if it was read in ours. Raises ValueError."""
    try:
        try:
            return read(data), None
        except msgspec.ValidationError:
            whole = msgspec.json.decode(data)
    except UNREADABLE:
        raise ValueError("not JSON") from None
    if not isinstance(whole, dict):
        raise ValueError("no object")
    given = whole.get("choices")
    given = [choice for choice in given if isinstance(choice, dict)] if isinstance(given, list) else []
    choices = [Choice(index=_index(choice), finish_reason=_text(choice.get("finish_reason"))) for choice in given]
    chunk = Chunk(
        choices=choices,
        id=_text(whole.get("id")),
        created=whole.get("created"),
        model=_text(whole.get("model")),
        object=_text(whole.get("object")),
        error=whole.get("error"),
    )
    return chunk, given


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _index(choice: dict[str, Any]) -> int:
    index = choice.get("index")
    return index if type(index) is int else 0


def leaves(choices: Sequence[dict[str, Any]]) -> str:
    """All text that choices read in the general way bring their reader, wherever it stands in them."""
    out: list[str] = []
    stack: list[Any] = [choice.get(key) for choice in choices for key in ("delta", "message", "text")]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            out.append(value)
        elif isinstance(value, list):
            stack += reversed(value)
        elif isinstance(value, dict):
            stack += reversed([inner for key, inner in value.items() if key not in ("role", "type", "id", "name")])
    return "".join(out)


def given_up(chunk: Chunk) -> bool:
    """A choice ends here although its answer does not."""
    return any(choice.finish_reason in GIVEN_UP for choice in chunk.choices)


def tokens_of(usage: Usage) -> Tokens:
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details is not None else 0
    return Tokens(usage.prompt_tokens or 0, usage.completion_tokens or 0, cached)


def usage_of(data: bytes) -> Any:
    """The chunk's `usage` with everything in it."""
    return msgspec.json.decode(data).get("usage")


def without(data: bytes, fields: Collection[str], roles: Collection[int]) -> bytes:
    """The chunk encoded anew without these fields, and without the role of these choices."""
    value = msgspec.json.decode(data)
    for field in fields:
        value.pop(field, None)
    for choice in value.get("choices") or ():
        if choice.get("index", 0) in roles and isinstance(choice.get("delta"), dict):
            choice["delta"].pop("role", None)
    return sse.json_value(value)


class Splice:
    """Puts the name that our client knows where the other server wrote its own."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._new = b'"model":' + sse.json_string(model)
        self._name: str | None = None
        self._old = b""

    def __call__(self, event: bytes, name: str | None) -> bytes:
        """`event`: bytes that hold one JSON object with the model `name`."""
        if name is None or name == self._model:
            return event
        if name != self._name:
            self._name = name
            self._old = self._pattern(event, name)
        # Within a JSON string its quotes would be escaped: what matches is a field. Only which one could be in doubt.
        if event.count(self._old) == 1:
            return event.replace(self._old, self._new)
        start, end = event.index(b"{"), event.rindex(b"}") + 1
        value = msgspec.json.decode(event[start:end])
        value["model"] = self._model
        return event[:start] + sse.json_value(value) + event[end:]

    def _pattern(self, event: bytes, name: str) -> bytes:
        """How this server writes the field."""
        plain = re.escape(msgspec.json.encode(name))
        found = re.search(rb'"model"[ \t]*:[ \t]*' + plain, event)
        return found[0] if found else b'"model":' + msgspec.json.encode(name)
