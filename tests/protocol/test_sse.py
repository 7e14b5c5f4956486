"""The wire's smallest parts: events, and JSON that no line splitter can break."""

from __future__ import annotations

import json
import random
import sys

import pytest

from headrace.protocol import sse

SEPARATORS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


def test_event_is_one_data_line() -> None:
    assert sse.event(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert sse.DONE == b"data: [DONE]\n\n"
    assert sse.COMMENT.startswith(b":")
    assert sse.COMMENT.endswith(b"\n\n")


@pytest.mark.parametrize(
    "text",
    ["", "plain", 'quotes " and \\', "é漢\U0001f525", SEPARATORS, f"a{SEPARATORS}é", "\x00\x1f\x7f", "</script>"],
)
def test_json_string_gives_the_text_back(text: str) -> None:
    data = sse.json_string(text)
    assert json.loads(data) == text
    assert len(data.decode().splitlines()) == 1


def test_non_ascii_stays_utf8() -> None:
    assert sse.json_string("é") == '"é"'.encode()


def test_every_character_survives_and_none_splits_a_line() -> None:
    every = "".join(map(chr, (code for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)))
    data = sse.json_string(every)
    assert json.loads(data) == every
    assert len(data.decode().splitlines()) == 1


def test_random_mixtures_of_separators_and_neighbours() -> None:
    draw = random.Random(1)
    # Characters whose UTF-8 shares bytes with the separators' are where replacing bytes could go wrong.
    alphabet = SEPARATORS + "aé\u0084\u0086\u2027\u202a\U00012028\u00c2\u0105\u20a8"
    for _ in range(2000):
        text = "".join(draw.choices(alphabet, k=draw.randrange(12)))
        data = sse.json_value({"text": text, text: [text]})
        assert json.loads(data) == {"text": text, text: [text]}
        assert len(data.decode().splitlines()) == 1


def test_numbers_that_json_lacks_become_null() -> None:
    assert sse.json_value([float("nan"), float("inf")]) == b"[null,null]"
