from __future__ import annotations

import pytest

from headrace_bench.client.answer import Head
from headrace_bench.client.http1 import End, Malformed, Responses, head, request


def feed(responses: Responses, *reads: bytes) -> list[object]:
    """Bodies joined, ends as what they say."""
    found: list[object] = []
    for data in reads:
        for part in responses.feed(data):
            if isinstance(part, End):
                found.append(part.reusable)
            elif isinstance(part, bytes) and found and isinstance(found[-1], bytes):
                found[-1] += part
            else:
                found.append(part)
    return found


def test_a_request() -> None:
    start = head("POST", "/v1/x", "h:1", {"A": "b"})
    assert request(start, b"{}") == b"POST /v1/x HTTP/1.1\r\nHost: h:1\r\nA: b\r\nContent-Length: 2\r\n\r\n{}"


CHUNKED = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n"
SIZED = b"HTTP/1.1 404 No\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc"
WANTED = [
    Head(200, {"x-a": "1", "transfer-encoding": "chunked"}), b"hello!", True,
    Head(404, {"content-length": "3", "connection": "close"}), b"abc", False,
]  # fmt: skip


def test_responses_one_after_the_other_however_they_are_cut() -> None:
    for step in (1, 2, 7, 1000):
        responses = Responses()
        both = [data[i : i + step] for data in (CHUNKED, SIZED) for i in range(0, len(data), step)]
        assert feed(responses, *both) == WANTED


def test_until_the_connection_closes() -> None:
    responses = Responses()
    assert feed(responses, b"HTTP/1.0 200 OK\r\n\r\nab", b"c") == [Head(200, {}), b"abc"]
    end = responses.eof()
    assert end is not None
    assert not end.reusable
    assert responses.eof() is None


def test_a_message_with_a_length_is_not_ended_by_a_closed_connection() -> None:
    responses = Responses()
    responses.feed(CHUNKED[:-6])
    assert responses.eof() is None


def test_informational_responses_are_passed_over() -> None:
    responses = Responses()
    assert feed(responses, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\n\r\n") == [Head(204, {}), True]


@pytest.mark.parametrize("data", [b"SSH-2.0-OpenSSH\r\n", b"\x15\x03\x01", b"HTTP/1.1 abc\r\n\r\n"])
def test_what_is_not_http(data: bytes) -> None:
    with pytest.raises(Malformed):
        Responses().feed(data)
