"""Reading chunks and changing them within their bytes. How a relay uses that: test_relay.py."""

from __future__ import annotations

import json

import pytest

from headrace.core.events import Tokens
from headrace.protocol.chunk import MOST_TOKENS, Splice, decode, leaves, tokens_of, without


def test_a_chunk_is_read_in_our_way_or_in_the_general_one() -> None:
    chunk, general = decode(b'{"id":"i","choices":[{"index":1,"delta":{"content":"a"},"finish_reason":"stop"}]}')
    assert general is None
    assert (chunk.id, chunk.choices[0].index, chunk.choices[0].finish_reason) == ("i", 1, "stop")
    given = [{"index": 1, "delta": {"content": [{"text": "a", "type": "text"}, "b"]}, "finish_reason": "stop"}]
    chunk, general = decode(json.dumps({"id": 7, "model": "m", "choices": given, "error": None}).encode())
    assert general == given
    assert (chunk.id, chunk.model, chunk.choices[0].index, chunk.choices[0].finish_reason) == (None, "m", 1, "stop")
    assert leaves(general) == "ab"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"1", b'{"choices":[' + b"[" * 9000, b'{"id":"\xff"}'])
def test_what_is_no_chunk(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not JSON|no object"):
        decode(data)


def test_choices_of_a_wrong_kind_are_none() -> None:
    assert decode(b'{"choices":7}')[0].choices == []
    assert [choice.index for choice in decode(b'{"choices":[1,{"index":"x"}]}')[0].choices] == [0]


def test_usage() -> None:
    data = b'{"usage":{"prompt_tokens":3,"completion_tokens":2,"more":[1],"prompt_tokens_details":{"cached_tokens":1}}}'
    usage = decode(data)[0].usage
    assert usage["more"] == [1]
    assert tokens_of(usage) == Tokens(3, 2, 1)
    assert tokens_of(decode(b'{"usage":{}}')[0].usage) == Tokens(0, 0, 0)
    assert tokens_of(decode(b'{"usage":[]}')[0].usage) is None
    assert tokens_of(None) is None


@pytest.mark.parametrize(
    ("figure", "tokens"),
    [
        ("-5", 0),
        ("1e300", MOST_TOKENS),
        ("1" + "0" * 40, MOST_TOKENS),
        ("2.0", 2),
        ("true", 0),
        ('"7"', 0),
        ("null", 0),
    ],
)
def test_figures_are_bounded(figure: str, tokens: int) -> None:
    usage = decode(b'{"usage":{"prompt_tokens":%b,"completion_tokens":1}}' % figure.encode())[0].usage
    assert tokens_of(usage) == Tokens(tokens, 1, 0)


def test_text_in_fields_that_nobody_knows_is_found() -> None:
    delta = {
        "content": "a",
        "thinking": "b",
        "audio": {"transcript": "c", "id": "x"},
        "name": "y",
        "expires": 7,
        "z": None,
    }
    chunk, general = decode(json.dumps({"choices": [{"index": 1, "delta": delta}]}).encode())
    assert general is None
    found = chunk.choices[0].delta
    assert found is not None
    assert (found.content, found.unknown, found.special, found.more()) == ("a", "bc", True, "bc")
    chunk, general = decode(b'{"choices":[{"delta":{"content":"a","thinking":"","audio":null}}]}')
    assert (general, chunk.plain) == (None, "a")


def test_fields_and_roles_are_taken_out() -> None:
    data = b'{"usage":1,"x":2,"choices":[{"delta":{"role":"a"}},{"index":1,"delta":{"role":"a"}},{"index":1}]}'
    assert json.loads(without(data, ["usage"], [1])) == {
        "x": 2,
        "choices": [{"delta": {"role": "a"}}, {"index": 1, "delta": {}}, {"index": 1}],
    }


def test_the_name_is_spliced_as_this_server_writes_it() -> None:
    splice = Splice("ours")
    assert splice(b'{"model" : "theirs"}', "theirs") == b'{"model":"ours"}'
    assert splice(b'{"model" : "theirs", "x":1}', "theirs") == b'{"model":"ours", "x":1}'
    # Written in another way all of a sudden, or twice: by way of the JSON.
    assert splice(b'data: {"model":"theirs"}\n\n', "theirs") == b'data: {"model":"ours"}\n\n'
    assert splice(b'{"model":"other"}', "other") == b'{"model":"ours"}'
    assert splice(b'{"m":{"model":"other"},"model":"other"}', "other") == b'{"m":{"model":"other"},"model":"ours"}'
    assert splice(b'{"m":{"model":"other"},"model" : "other"}', "other") == b'{"m":{"model":"other"},"model":"ours"}'
    assert splice(b'{"m":"model","model":"other"}', "other") == b'{"m":"model","model":"ours"}'
    assert splice(b'{"model":"ours"}', "ours") == b'{"model":"ours"}'
    assert splice(b"{}", None) == b"{}"
