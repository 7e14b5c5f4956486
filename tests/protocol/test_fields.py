"""Parsers by table: what passes and as what, what does not and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import InvalidRequest
from headrace.core.request import Decay
from headrace.protocol import fields
from headrace.protocol.fields import Field

ACCEPTED: list[tuple[Any, Any, Any]] = [
    (fields.number(0, 2), 0, 0.0),
    (fields.number(0, 2), 2, 2.0),
    (fields.number(0, 1), 1e-9, 1e-9),
    (fields.number(-2, 2), -2, -2.0),
    (fields.above_zero, 0.01, 0.01),
    (fields.above_zero, 1, 1.0),
    (fields.integer(1, 16), 1.0, 1),
    (fields.integer(-1, 9), -1, -1),
    (fields.integer(1, fields.MAX_INT), 2147483647, 2147483647),
    (fields.boolean, False, False),
    (fields.text, "", ""),
    (fields.mapping, {}, {}),
    (fields.stop_strings, "zz", ("zz",)),
    (fields.stop_strings, [], ()),
    (fields.stop_strings, ["a", "b", "c", "d"], ("a", "b", "c", "d")),
    (fields.share, 1, 1.0),
    (fields.share, 5e-324, 5e-324),
    (fields.one_of({"a": 1, "b": 2}), "b", 2),
    (fields.decay, {}, Decay(10, 0.95, 0.4)),
    (fields.decay, {"every": None, "factor": None, "floor": None}, Decay(10, 0.95, 0.4)),
    (fields.decay, {"every": 1, "factor": 1, "floor": 0}, Decay(1, 1.0, 0.0)),
    (fields.decay, {"every": 10_000.0, "floor": 2}, Decay(10_000, 0.95, 2.0)),
    (fields.logit_bias(10), {}, ()),
    (fields.logit_bias(10), {"5": -100, "9": 100, "0": 0.5}, ((5, -100.0), (9, 100.0), (0, 0.5))),
    (fields.logit_bias(10), {"5": 1, "05": 2}, ((5, 2.0),)),
    (fields.unsupported("x is", [], "none"), [], None),
    (fields.unsupported("x is", [], "none"), "none", None),
]


@pytest.mark.parametrize(("parse", "value", "expected"), ACCEPTED)
def test_accepted(parse: Any, value: Any, expected: Any) -> None:
    parsed = parse("it", value)
    assert parsed == expected
    assert type(parsed) is type(expected)


REFUSED: list[tuple[Any, Any, str]] = [
    (fields.number(0, 2), -0.1, "it must be a number from 0 to 2; got -0.1"),
    (fields.number(0, 2), 2.01, "it must be a number from 0 to 2; got 2.01"),
    (fields.number(0, 2), float("nan"), "it must be a number from 0 to 2; got nan"),
    (fields.number(0, 2), float("inf"), "it must be a number from 0 to 2; got inf"),
    (fields.number(0, 2), True, "it must be a number from 0 to 2; got true"),
    (fields.number(0, 2), "1", "it must be a number from 0 to 2; got a string"),
    (fields.number(0, 2), 10**400, "it must be a number from 0 to 2; got a number of 401 digits"),
    (fields.number(-2, 2), [1, 2], "it must be a number from -2 to 2; got a list of 2"),
    (fields.above_zero, 0, "it must be a number above 0; got 0"),
    (fields.above_zero, -1.5, "it must be a number above 0; got -1.5"),
    (fields.above_zero, float("inf"), "it must be a number above 0; got inf"),
    (fields.above_zero, 10**400, "it must be a number above 0; got a number of 401 digits"),
    (fields.share, 0, "it must be a number above 0 and at most 1; got 0"),
    (fields.share, -0.0, "it must be a number above 0 and at most 1; got -0.0"),
    (fields.share, 1.0001, "it must be a number above 0 and at most 1; got 1.0001"),
    (fields.share, float("nan"), "it must be a number above 0 and at most 1; got nan"),
    (fields.share, True, "it must be a number above 0 and at most 1; got true"),
    (fields.share, "0.5", "it must be a number above 0 and at most 1; got a string"),
    (fields.one_of({"a": 1, "b": 2}), "c", 'it must be "a" or "b"; got a string'),
    (fields.one_of({"a": 1, "b": 2}), "A", 'it must be "a" or "b"; got a string'),
    (fields.one_of({"a": 1, "b": 2}), 1, 'it must be "a" or "b"; got 1'),
    (fields.one_of({"a": 1, "b": 2}), ["a"], 'it must be "a" or "b"; got a list of 1'),
    (fields.decay, [], "it must be an object; got an empty list"),
    (fields.decay, True, "it must be an object; got true"),
    (fields.decay, {"evry": 3}, "it may hold every, factor and floor; got 1 other field"),
    (fields.decay, {"every": 3, "secret": None, "": 1}, "it may hold every, factor and floor; got 2 other fields"),
    (fields.integer(1, 16), 0, "it must be an integer from 1 to 16; got 0"),
    (fields.integer(1, 16), 1.5, "it must be an integer from 1 to 16; got 1.5"),
    (fields.integer(1, 16), "10", "it must be an integer from 1 to 16; got a string"),
    (fields.integer(1, 16), True, "it must be an integer from 1 to 16; got true"),
    (fields.integer(1, 16), float("nan"), "it must be an integer from 1 to 16; got nan"),
    (fields.integer(1, fields.MAX_INT), 2**31, "it must be an integer from 1 to 2147483647; got 2147483648"),
    (fields.integer(1, fields.MAX_INT), 1e18, "it must be an integer from 1 to 2147483647; got 1e+18"),
    (fields.integer(1, fields.MAX_INT), 10**30, f"it must be an integer from 1 to 2147483647; got 1{'0' * 30}"),
    (fields.boolean, 1, "it must be true or false; got 1"),
    (fields.boolean, "true", "it must be true or false; got a string"),
    (fields.text, {}, "it must be a string; got an object"),
    (fields.mapping, [], "it must be an object; got an empty list"),
    (fields.stop_strings, "", "it must be {stop}; it holds an empty string"),
    (fields.stop_strings, ["zz", ""], "it must be {stop}; it holds an empty string"),
    (fields.stop_strings, ["a", None], "it must be {stop}; it holds null"),
    (fields.stop_strings, [1], "it must be {stop}; it holds 1"),
    (fields.stop_strings, list("abcde"), "it must be {stop}; got a list of 5"),
    (fields.stop_strings, {"a": 1}, "it must be {stop}; got an object"),
    (fields.logit_bias(10), {"10": 5}, "it: every key must be a token id from 0 to 9"),
    (fields.logit_bias(10), {"-1": 5}, "it: every key must be a token id from 0 to 9"),
    (fields.logit_bias(10), {"9" * 20: 1}, "it: every key must be a token id from 0 to 9"),
    (fields.logit_bias(10), {"9" * 5000: 1}, "it: every key must be a token id from 0 to 9"),
    (fields.logit_bias(10), {"abc": 1}, "it: every key must be a token id from 0 to 9"),
    (fields.logit_bias(10), {"": 1}, "it: every key must be a token id from 0 to 9"),
    (fields.logit_bias(10), {"٣": 1}, "it: every key must be a token id from 0 to 9"),
    (fields.logit_bias(10), {"1_0": 1}, "it: every key must be a token id from 0 to 9"),
    (fields.logit_bias(10), {"5": 101}, "it: every value must be a number from -100 to 100; got 101"),
    (fields.logit_bias(10), {"5": "x"}, "it: every value must be a number from -100 to 100; got a string"),
    (fields.logit_bias(10), {"5": None}, "it: every value must be a number from -100 to 100; got null"),
    (fields.logit_bias(10), [], "it must be an object; got an empty list"),
    (fields.unsupported("x is", []), [1], "it: x is not supported yet; leave this field out"),
    (fields.unsupported("x is"), "secret", "it: x is not supported yet; leave this field out"),
]
STOP_RULE = "a string or a list of at most 4 strings, none of them empty"


@pytest.mark.parametrize(("parse", "value", "message"), REFUSED)
def test_refused_with_its_name_and_what_was_given(parse: Any, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse("it", value)
    assert refused.value.param == "it"
    assert refused.value.message == message.replace("{stop}", STOP_RULE)


def test_a_row_reads_its_key_and_takes_null_for_absent() -> None:
    row: Field[int] = Field("n", fields.integer(1, 16), 7)
    assert row.read({}) == 7
    assert row.read({"n": None}) == 7
    assert row.read({"n": 3}) == 3


def test_a_nested_row_reads_the_last_part_of_its_name_and_is_refused_with_the_whole() -> None:
    row: Field[bool] = Field("headrace.timings", fields.boolean, False)
    assert row.read({"timings": True}) is True
    with pytest.raises(InvalidRequest) as refused:
        row.read({"timings": 1})
    assert refused.value.param == "headrace.timings"


WRONG_PARTS: dict[str, list[Any]] = {
    "every": [0, -1, 10_001, 1.5, "10", True, [], float("nan"), 10**30],
    "factor": [0, -0.5, 1.01, "1", False, {}, float("nan"), float("inf"), 10**400],
    "floor": [-0.1, 2.01, "0", True, [], float("nan"), float("-inf")],
}


@pytest.mark.parametrize(("part", "value"), [(part, value) for part, values in WRONG_PARTS.items() for value in values])
def test_a_wrong_part_of_a_decay_is_named_with_its_path(part: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        fields.decay("headrace.temperature_decay", {part: value})
    assert refused.value.param == f"headrace.temperature_decay.{part}"
    assert refused.value.message.startswith(f"headrace.temperature_decay.{part} must be ")


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 6, 7, 500, 100_000])
@pytest.mark.parametrize("kind", ["list", "object", "mixed"])
def test_depth_is_counted_in_levels(depth: int, kind: str) -> None:
    value: Any = 1
    for level in range(depth):
        value = [0, value] if kind == "list" or (kind == "mixed" and level % 2) else {"a": 0, "b": value}
    assert fields.nested_deeper(value, 6) is (depth > 6)
    while isinstance(value, (list, dict)):  # taken apart level by level: deep values are hard on the collector
        value = value[1] if isinstance(value, list) else value["b"]


def test_text_is_never_repeated() -> None:
    assert "secret" not in "".join(
        fields.shown(value) for value in ("secret", ["secret"], {"secret": "secret"}, None, True)
    )


def test_another_default_holds_where_nothing_is_said() -> None:
    row = Field("a.x", fields.number(0, 2), 1.0)
    assert [row.read_or(given, 0.2) for given in ({}, {"x": None}, {"x": 0}, {"x": 1})] == [0.2, 0.2, 0.0, 1.0]
    with pytest.raises(InvalidRequest, match=r"a\.x must be"):
        row.read_or({"x": 3}, 0.2)
