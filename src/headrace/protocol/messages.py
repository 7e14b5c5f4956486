"""The messages of a chat request: decoded JSON → turns that a chat template can rely on.

Rules: every message has a known role and text; parts are joined; an assistant's missing content is "". Tool calls have
one shape, {"id"?, "type": "function", "function": {"name", "arguments"}}, arguments as they came: text or an object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.errors import InvalidRequest, Unsupported
from headrace.core.request import Message
from headrace.protocol.fields import shown, wrong

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""The roles a message may have → the role the chat template sees."""


def parse_messages(messages: Any) -> tuple[Message, ...]:
    """The `messages` of a chat request. Raises InvalidRequest(param="messages"), which says which one is wrong."""
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "a list of at least one message", messages)
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))


def _refuse(at: str, rule: str, value: Any) -> InvalidRequest:
    return InvalidRequest(f"{at} must be {rule}; got {shown(value)}", param="messages")


def _message(at: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise _refuse(at, "an object", message)
    given = message.get("role")
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise _refuse(f"{at}.role", f"one of {', '.join(ROLES)}", given)
    extra: dict[str, Any] = {}
    for key in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(key)
        if isinstance(value, str):
            extra[key] = value
        elif value is not None:
            raise _refuse(f"{at}.{key}", "a string", value)
    if role == "assistant" and (calls := _tool_calls(at, message)):
        extra["tool_calls"] = calls
    return Message(role=role, content=_content(f"{at}.content", role, message.get("content")), fields=extra)


def _content(at: str, role: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(f"{at}[{i}]", part) for i, part in enumerate(content))
    if content is None and role == "assistant":
        return ""
    raise _refuse(at, "a string or a list of text parts", content)


def _part(at: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise _refuse(at, "an object", part)
    if part.get("type") != "text":
        raise Unsupported(f'{at}: only parts of the type "text" are supported yet', param="messages")
    if not isinstance(part.get("text"), str):
        raise _refuse(f"{at}.text", "a string", part.get("text"))
    return str(part["text"])


def _tool_calls(at: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls an assistant made, in the one shape that chat templates know; `function_call` is the older spelling."""
    if message.get("tool_calls") is None:
        older = message.get("function_call")
        return [] if older is None else [{"type": "function", "function": _function(f"{at}.function_call", older)}]
    calls = message["tool_calls"]
    at = f"{at}.tool_calls"
    if not isinstance(calls, list):
        raise _refuse(at, "a list", calls)
    out: list[dict[str, Any]] = []
    for i, call in enumerate(calls):
        if not isinstance(call, dict):
            raise _refuse(f"{at}[{i}]", "an object", call)
        if call.get("type") not in (None, "function"):
            raise InvalidRequest(f'{at}[{i}]: only calls of the type "function" are supported', param="messages")
        shape: dict[str, Any] = {"type": "function", "function": _function(f"{at}[{i}].function", call.get("function"))}
        if isinstance(call.get("id"), str):
            shape["id"] = call["id"]
        elif call.get("id") is not None:
            raise _refuse(f"{at}[{i}].id", "a string", call["id"])
        out.append(shape)
    return out


def _function(at: str, function: Any) -> dict[str, Any]:
    if not isinstance(function, dict):
        raise _refuse(at, "an object", function)
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise _refuse(f"{at}.name", "the name of a function", name)
    if not isinstance(arguments, (str, dict, type(None))):
        raise _refuse(f"{at}.arguments", "a string of JSON or an object", arguments)
    return {"name": name, "arguments": arguments if arguments else "{}"}
