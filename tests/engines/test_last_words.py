from __future__ import annotations

import pytest

from headrace.engines.last_words import LENGTH, LINES, LastWords, words_of

ASSERTION = "/tmp/x/vendor/llama.cpp/src/llama-vocab.cpp:2201: GGML_ASSERT(id_to_token.size() == n) failed\n"
BACKTRACE = "".join(f"/lib/libggml-base.so.0(+0x{i:x}) [0x7f{i:x}]\n" for i in range(90))
TERMINATE = "terminate called after throwing an instance of 'std::out_of_range'\n  what():  vector::_M_range_check\n"
TRACEBACK = (
    'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    f()\n    ^^^\n'
    "headrace.x.Odd: no such thing\n"
)
CASES = [
    ("", ""),
    ("one\n", "one"),
    ("one\nand no end", "and no end"),
    (ASSERTION, "llama-vocab.cpp:2201: GGML_ASSERT(id_to_token.size() == n) failed"),
    (ASSERTION + BACKTRACE, "llama-vocab.cpp:2201: GGML_ASSERT(id_to_token.size() == n) failed"),
    ("ggml.c:7: fatal error\n", "ggml.c:7: fatal error"),
    (TERMINATE, "std::out_of_range: vector::_M_range_check"),
    ("terminate called without an active exception\n", "an exception of C++"),
    ("before\n" + TRACEBACK, "headrace.x.Odd: no such thing"),
    (TRACEBACK + TERMINATE, "std::out_of_range: vector::_M_range_check"),
    ("colours \x1b[31mred\x00\n", "colours  [31mred"),
    ("\n\n  \n", ""),
]


@pytest.mark.parametrize(("said", "cause"), CASES)
def test_the_line_that_says_why_whole_and_byte_by_byte(said: str, cause: str) -> None:
    assert words_of(said.encode()) == cause
    words = LastWords()
    for byte in said.encode():
        words.feed(bytes([byte]))
    words.end()
    assert words.cause == cause


def test_lines_are_passed_on_once() -> None:
    words = LastWords()
    assert words.feed(b"a\n\nb") == ["a"]
    assert words.feed(b"c\nd") == ["bc"]
    assert words.end() == ["d"]
    assert words.end() == []
    assert words.lines == ("a", "bc", "d")


def test_whatever_is_said_what_is_kept_is_bounded() -> None:
    words = LastWords()
    for _ in range(50):
        words.feed(b"\xff" * 100_000)
    words.feed(b"\n" + b"x\n" * 10_000)
    assert len(words.lines) == LINES
    assert max(map(len, words.lines)) <= LENGTH
    assert len(words._rest) <= 4 * LENGTH
