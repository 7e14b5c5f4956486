"""What a template sees of a message, and which of it counts as a user's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.core.request import Message
from headrace.protocol.turns import (
    MAX_ARGUMENT_DEPTH,
    Arguments,
    guarded,
    strings,
    tojson,
    with_content_only,
    with_objects,
    with_strings,
)


def called(arguments: Any, content: str = "") -> Message:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": arguments}}
    return Message("assistant", content, {"tool_calls": [call]})


def arguments_in(turn: dict[str, Any]) -> Any:
    return turn["tool_calls"][0]["function"]["arguments"]


def test_a_message_without_calls_is_the_same_to_all() -> None:
    message = Message("tool", "42", {"tool_call_id": "c1", "name": "find"})
    turn = {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "find"}
    assert with_objects(message) == with_strings(message) == with_content_only(message) == turn


DEEP = "[" * 100_000
AT_LIMIT, OVER_LIMIT = ('{"a":' * depth + "1" + "}" * depth for depth in (MAX_ARGUMENT_DEPTH, MAX_ARGUMENT_DEPTH + 1))


@pytest.mark.parametrize(
    ("given", "as_object", "as_string", "in_line"),
    [
        ('{"q":1}', {"q": 1}, '{"q":1}', '{"q":1}'),
        ('{ "q": "é" }', {"q": "é"}, '{ "q": "é" }', '{ "q": "é" }'),
        ({"q": "é"}, {"q": "é"}, '{"q": "é"}', '{"q":"é"}'),
        ("[1]", "[1]", "[1]", "[1]"),
        ("no json", "no json", "no json", '"no json"'),
        ('{"q":NaN}', '{"q":NaN}', '{"q":NaN}', json.dumps('{"q":NaN}')),
        (DEEP, DEEP, DEEP, json.dumps(DEEP)),
        (AT_LIMIT, json.loads(AT_LIMIT), AT_LIMIT, AT_LIMIT),
        (OVER_LIMIT, OVER_LIMIT, OVER_LIMIT, json.dumps(OVER_LIMIT)),
    ],
)
def test_arguments(given: Any, as_object: Any, as_string: str, in_line: str) -> None:
    assert arguments_in(with_objects(called(given))) == as_object
    assert arguments_in(with_strings(called(given))) == as_string
    assert with_content_only(called(given)) == {
        "role": "assistant",
        "content": f'{{"name":"find","arguments":{in_line}}}',
    }


def test_lines_come_after_the_text_in_the_order_of_the_calls() -> None:
    calls = called("{}", "Let me look.").fields["tool_calls"] + called('{"q":2}').fields["tool_calls"]
    turn = with_content_only(Message("assistant", "Let me look.", {"tool_calls": calls}))
    assert turn["content"].split("\n") == [
        "Let me look.",
        '{"name":"find","arguments":{}}',
        '{"name":"find","arguments":{"q":2}}',
    ]


def test_a_message_is_not_changed_by_being_looked_at() -> None:
    message = called('{"q":1}', "text")
    for way in (with_objects, with_strings, with_content_only):
        way(message)
    assert message == called('{"q":1}', "text")


def test_arguments_print_as_json() -> None:
    assert str(Arguments({"q": [None, True, "é"]})) == '{"q": [null, true, "é"]}'
    assert tojson({"b": 1, "a": "<&>"}) == '{"b": 1, "a": "<&>"}'


def test_guarding_reaches_all_that_a_user_wrote_and_nothing_else() -> None:
    turn = with_objects(called({"type": {"role": ["x", 1, None]}}, "text"))
    assert guarded(turn, lambda text: f"<{text}>") == {
        "role": "assistant",
        "content": "<text>",
        "tool_calls": [
            {
                "id": "<c1>",
                "type": "function",
                "function": {"name": "<find>", "arguments": {"<type>": {"<role>": ["<x>", 1, None]}}},
            }
        ],
    }
    assert {"text", "c1", "find", "type", "role", "x"} <= set(strings(turn))


def test_guarded_arguments_still_print_as_json() -> None:
    turn = guarded(with_objects(called({"a": [{"b": None}]})), str.upper)
    assert str(arguments_in(turn)) == '{"A": [{"B": null}]}'
    assert str(arguments_in(turn)["A"][0]) == '{"B": null}'
