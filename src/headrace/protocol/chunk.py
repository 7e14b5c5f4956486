"""A chunk of another server's answer, as far as a relay must understand it, and what can be changed within its bytes.

Rules: what we do not know passes unread, but for what a chunk adds to its choice: text in it is seen by a reader,
whatever its field is called. A field whose type surprises us is no error: such a chunk is read in the general way, and
counts as more than plain text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from headrace.core.events import Tokens
from headrace.protocol import sse

ROLE = b'"role":"assistant",'
MOST_TOKENS = 2**31
"""What another server counts is booked; no answer has more."""
GIVEN_UP = frozenset(("abort", "error"))
"""Finish reasons of an answer that its engine did not finish: it shuts down, or broke."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises."""


class Function(msgspec.Struct, gc=False):
    """A call of a tool, or a piece of one."""

    arguments: str | None = None


class ToolCall(msgspec.Struct, gc=False):
    function: Function | None = None


class Delta(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """What a chunk adds to a chat's choice; the `message` of a whole answer looks the same. Fields beyond these are for
    `decode` to look into."""

    content: str | None = None
    role: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Function | None = None
    unknown: str | None = None
    """The text in all other fields."""

    @property
    def special(self) -> bool:
        """There is more than content."""
        return bool(
            self.reasoning_content
            or self.reasoning
            or self.tool_calls
            or self.refusal
            or self.function_call
            or self.unknown
        )

    def more(self) -> str:
        """The text in it that is not content."""
        out = (self.reasoning_content or self.reasoning or "") + (self.refusal or "") + (self.unknown or "")
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


class Chunk(msgspec.Struct, gc=False):
    """A chunk, or a whole answer."""

    choices: list[Choice] = []
    id: str | None = None
    created: Any = None
    model: str | None = None
    object: str | None = None
    usage: Any = None
    """What it says nobody can rely on: see `tokens_of`."""
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
_KNOWN = frozenset(Delta.__struct_fields__) - {"unknown"}
_SILENT = frozenset(("role", "type", "id", "name"))
"""Fields whose text is for programs."""


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
    if given and len(given) == len(whole["choices"]):
        try:
            return msgspec.convert({**whole, "choices": [_known(choice) for choice in given]}, Chunk), None
        except msgspec.ValidationError:
            pass
    choices = [Choice(index=_index(choice), finish_reason=_text(choice.get("finish_reason"))) for choice in given]
    chunk = Chunk(
        choices=choices,
        id=_text(whole.get("id")),
        created=whole.get("created"),
        model=_text(whole.get("model")),
        object=_text(whole.get("object")),
        usage=whole.get("usage"),
        error=whole.get("error"),
    )
    return chunk, given


def _known(choice: dict[str, Any]) -> dict[str, Any]:
    """`choice` with the text in fields of its delta that we do not know put together in one that we do."""
    out = dict(choice)
    for key in ("delta", "message"):
        inner = choice.get(key)
        if isinstance(inner, dict):
            known = {name: value for name, value in inner.items() if name in _KNOWN}
            known["unknown"] = _strings([{name: value for name, value in inner.items() if name not in _KNOWN}])
            out[key] = known
    return out


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _index(choice: dict[str, Any]) -> int:
    index = choice.get("index")
    return index if type(index) is int else 0


def leaves(choices: Sequence[dict[str, Any]]) -> str:
    """All text that choices read in the general way bring their reader, wherever it stands in them."""
    return _strings([choice.get(key) for choice in choices for key in ("delta", "message", "text")])


def _strings(stack: list[Any]) -> str:
    """The text in these values. Takes the list apart."""
    out: list[str] = []
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            out.append(value)
        elif isinstance(value, list):
            stack += reversed(value)
        elif isinstance(value, dict):
            stack += reversed([inner for key, inner in value.items() if key not in _SILENT])
    return "".join(out)


def given_up(chunk: Chunk) -> bool:
    """A choice ends here although its answer does not."""
    return any(choice.finish_reason in GIVEN_UP for choice in chunk.choices)


def tokens_of(usage: Any) -> Tokens | None:
    """The figures of a chunk's usage, 0 for what is none. None: it is no object."""
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Tokens(_count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")), _count(cached))


def _count(value: Any) -> int:
    return int(min(max(value, 0), MOST_TOKENS)) if type(value) in (int, float) else 0


def without(data: bytes, fields: Collection[str], roles: Collection[int]) -> bytes:
    """The chunk encoded anew without these fields, and without the role of these choices."""
    value = msgspec.json.decode(data)
    for field in fields:
        value.pop(field, None)
    for choice in value.get("choices") or ():
        if isinstance(choice, dict) and choice.get("index", 0) in roles and isinstance(choice.get("delta"), dict):
            choice["delta"].pop("role", None)
    return sse.json_value(value)


_FIELD = b'"model"'


class Splice:
    """Puts the name that our client knows where the other server wrote its own."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._new = _FIELD + b":" + sse.json_string(model)
        self._name: str | None = None
        self._old = b""
        """What follows the field's name."""

    def __call__(self, event: bytes, name: str | None) -> bytes:
        """`event`: bytes that hold one JSON object with the model `name`."""
        if name is None or name == self._model:
            return event
        if name != self._name:
            self._name = name
            self._old = self._pattern(event, name)
        # Within a JSON string its quotes would be escaped: what matches is a field. Only which one could be in doubt,
        # so there must be no other, however that is written.
        parts = event.split(_FIELD)
        if len(parts) == 2 and parts[1].startswith(self._old):
            return parts[0] + self._new + parts[1][len(self._old) :]
        start, end = event.index(b"{"), event.rindex(b"}") + 1
        value = msgspec.json.decode(event[start:end])
        value["model"] = self._model
        return event[:start] + sse.json_value(value) + event[end:]

    def _pattern(self, event: bytes, name: str) -> bytes:
        """How this server writes the field's value, what is before it included."""
        plain = re.escape(msgspec.json.encode(name))
        found = re.search(_FIELD + rb"([ \t]*:[ \t]*" + plain + rb")", event)
        return found[1] if found else b":" + msgspec.json.encode(name)
