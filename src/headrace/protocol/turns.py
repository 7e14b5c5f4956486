"""Turns: messages as a chat template sees them.

Rules: a template that knows tool calls gets their arguments as objects, which most expect, or as strings of JSON,
should it fail on those; one that does not gets the calls as lines of JSON in the content. What a user wrote in a turn
can be told from what is ours: the role, the types and the keys of the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from headrace.core.request import Message
from headrace.protocol.fields import nested_deeper

MAX_ARGUMENT_DEPTH = 200
"""Levels down to which arguments given as text are read as an object."""

Turn = dict[str, Any]


class Arguments(dict[str, Any]):
    """A call's arguments: an object to templates that look inside, JSON to those that just print it."""

    def __str__(self) -> str:
        return tojson(self)


def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """The filter that templates use. Jinja's own escapes for HTML and sorts keys: a prompt wants neither."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def with_objects(message: Message) -> Turn:
    """The turn, arguments of calls as objects where they are some."""
    return _turn(message, _object)


def with_strings(message: Message) -> Turn:
    """The turn, arguments of calls as text."""
    return _turn(message, lambda arguments: arguments if isinstance(arguments, str) else tojson(arguments))


def with_content_only(message: Message) -> Turn:
    """The turn without calls; each has become a line of its content, after the text."""
    turn = _turn(message, lambda arguments: arguments)
    lines = [_line(call["function"]) for call in turn.pop("tool_calls", ())]
    turn["content"] = "\n".join([turn["content"], *lines] if turn["content"] else lines)
    return turn


def _turn(message: Message, arguments: Callable[[Any], Any]) -> Turn:
    turn = {"role": message.role, "content": message.content, **message.fields}
    if "tool_calls" in turn:
        turn["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments(call["function"]["arguments"])}}
            for call in turn["tool_calls"]
        ]
    return turn


def _line(function: Mapping[str, Any]) -> str:
    """A call as one JSON object. Arguments that are JSON already stand in it as they came."""
    arguments = function["arguments"]
    if not isinstance(arguments, str) or _decoded(arguments) is None:
        arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return f'{{"name":{json.dumps(function["name"], ensure_ascii=False)},"arguments":{arguments}}}'


def _object(arguments: Any) -> Any:
    value = _decoded(arguments) if isinstance(arguments, str) else arguments
    return Arguments(value) if isinstance(value, dict) else arguments


def _decoded(text: str) -> Any:
    """The JSON value of `text`; None if it is none or nested so deep that walking it would be a danger."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return None if nested_deeper(value, MAX_ARGUMENT_DEPTH) else value


def strings(value: Any) -> Iterator[str]:
    """Every string in a turn, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def guarded(turn: Turn, guard: Callable[[str], str]) -> Turn:
    """The turn with all that a user wrote guarded; roles, types and the keys of the format are not a user's."""
    return {key: value if key == "role" else _guarded_value(value, guard, ours=True) for key, value in turn.items()}


def _guarded_value(value: Any, guard: Callable[[str], str], *, ours: bool) -> Any:
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, list):
        return [_guarded_value(inner, guard, ours=ours) for inner in value]
    if isinstance(value, dict):
        if ours:
            return {
                key: inner if key == "type" else _guarded_value(inner, guard, ours=key != "arguments")
                for key, inner in value.items()
            }
        return Arguments({guard(key): _guarded_value(inner, guard, ours=False) for key, inner in value.items()})
    return value
