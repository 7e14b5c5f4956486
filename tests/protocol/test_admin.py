from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import InvalidRequest
from headrace.protocol.admin import SwitchAsk, parse_switch


def test_a_switch_is_of_everything_and_waits_unless_it_says_otherwise() -> None:
    assert parse_switch({"alias": "chat", "to": "b"}) == SwitchAsk("chat", "b", 1.0, True)
    given = {"alias": "chat", "to": "b", "weight": 0.25, "wait": False}
    assert parse_switch(given) == SwitchAsk("chat", "b", 0.25, False)
    assert parse_switch({"alias": "chat", "to": "b", "weight": None, "wait": None}).weight == 1.0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "alias"),
        ({"alias": "chat"}, "to"),
        ({"to": "b"}, "alias"),
        ({"alias": "", "to": "b"}, "alias"),
        ({"alias": ["chat"], "to": "b"}, "alias"),
        ({"alias": "chat", "to": 3}, "to"),
        ({"alias": "chat", "to": "b", "weight": 0}, "weight"),
        ({"alias": "chat", "to": "b", "weight": 1.1}, "weight"),
        ({"alias": "chat", "to": "b", "weight": "0.1"}, "weight"),
        ({"alias": "chat", "to": "b", "weight": True}, "weight"),
        ({"alias": "chat", "to": "b", "wait": 1}, "wait"),
        ({"alias": "chat", "to": "b", "wieght": 0.1}, None),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_switch(fields)
    assert caught.value.param == param
