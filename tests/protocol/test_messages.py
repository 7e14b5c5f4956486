"""Messages: which turns come out, and which are refused with their place named."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import InvalidRequest
from headrace.core.request import Message
from headrace.protocol.messages import parse_messages


def messages(*given: Any) -> tuple[Message, ...]:
    return parse_messages(list(given))


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ("system", "system"),
        ("developer", "system"),
        ("user", "user"),
        ("assistant", "assistant"),
        ("tool", "tool"),
        ("function", "tool"),
    ],
)
def test_roles(given: str, seen: str) -> None:
    assert messages({"role": given, "content": "x"}) == (Message(seen, "x"),)


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ("", ""),
        (" ", " "),
        ("\n", "\n"),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}], "ab"),
    ],
)
def test_content(content: Any, seen: str) -> None:
    assert messages({"role": "user", "content": content}) == (Message("user", seen),)


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_an_assistant_without_content_is_the_same_however_it_is_written() -> None:
    turn = {"role": "assistant", "tool_calls": [CALL]}
    spellings: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}, {"content": []}]
    seen = [messages({**turn, **content}) for content in spellings]
    assert seen == [(Message("assistant", "", {"tool_calls": [CALL]}),)] * 4
    assert messages({"role": "assistant", "content": None}) == (Message("assistant", ""),)


def test_further_fields() -> None:
    assert messages({"role": "tool", "content": "42", "tool_call_id": "c1", "name": None, "extra": 1}) == (
        Message("tool", "42", {"tool_call_id": "c1"}),
    )
    assert messages({"role": "user", "content": "x", "name": "Ada"}) == (Message("user", "x", {"name": "Ada"}),)


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        (CALL, CALL),
        (
            {"function": {"name": "f", "arguments": {"a": 1}}},
            {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
        ),
        ({"function": {"name": "f"}}, {"type": "function", "function": {"name": "f", "arguments": "{}"}}),
        (
            {"id": None, "type": None, "function": {"name": "f", "arguments": ""}},
            {"type": "function", "function": {"name": "f", "arguments": "{}"}},
        ),
    ],
)
def test_tool_calls_get_one_shape(call: Any, seen: Any) -> None:
    assert messages({"role": "assistant", "tool_calls": [call]})[0].fields == {"tool_calls": [seen]}


def test_the_older_spelling_of_a_call() -> None:
    older = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    newer = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert messages(older) == messages(newer)
    assert messages({**older, "function_call": None, "tool_calls": None}) == messages({"role": "assistant"})


@pytest.mark.parametrize(
    ("message", "at"),
    [
        ("hi", "messages[1] "),
        (None, "messages[1] "),
        ({}, "messages[1].role "),
        ({"role": "wizard", "content": "x"}, "messages[1].role "),
        ({"role": ["user"], "content": "x"}, "messages[1].role "),
        ({"role": "user"}, "messages[1].content "),
        ({"role": "user", "content": None}, "messages[1].content "),
        ({"role": "system"}, "messages[1].content "),
        ({"role": "tool"}, "messages[1].content "),
        ({"role": "user", "content": 1}, "messages[1].content "),
        ({"role": "user", "content": {}}, "messages[1].content "),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0] "),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text "),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages[1].content[0].text "),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content[0]: "),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0]: "),
        ({"role": "user", "content": "x", "name": 1}, "messages[1].name "),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "messages[1].tool_call_id "),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls "),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[1].tool_calls[0] "),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0].function "),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0].function.name "),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": 1}]}, "messages[1].tool_calls[0].id "),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "messages[1].tool_calls[0]: "),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
            "messages[1].tool_calls[0].function.arguments ",
        ),
        ({"role": "assistant", "function_call": "f"}, "messages[1].function_call "),
    ],
)
def test_a_refused_message_is_named_by_its_place(message: Any, at: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        messages({"role": "user", "content": "hi"}, message)
    error = refused.value
    assert error.param == "messages"
    assert error.message.startswith(at)
    assert "wizard" not in error.message


@pytest.mark.parametrize("value", [None, [], {}, "hi", 1])
def test_messages_must_be_a_list_with_something_in_it(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages must be a list of at least one message; got") as refused:
        parse_messages(value)
    assert refused.value.param == "messages"
