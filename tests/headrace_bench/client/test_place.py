from __future__ import annotations

import pytest

from headrace_bench.client.place import Place, parse
from headrace_bench.fault import Misuse


@pytest.mark.parametrize(
    ("url", "place", "shown"),
    [
        ("http://127.0.0.1:8000", Place("127.0.0.1", 8000, False), "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", Place("127.0.0.1", 8000, False), "http://127.0.0.1:8000"),
        ("https://a.example", Place("a.example", 443, True), "https://a.example"),
        ("https://a.example:80/openai/v1", Place("a.example", 80, True, "/openai"), "https://a.example:80/openai"),
        ("http://[::1]:8000", Place("::1", 8000, False), "http://[::1]:8000"),
    ],
)
def test_a_place(url: str, place: Place, shown: str) -> None:
    assert parse(url) == place
    assert str(place) == shown


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8000", "localhost", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://a b", "http://é",
     "http://u:p@a", "http://a?x=1", "http://a#x", "http://[::1", "http://a\r\nX: 1", "http://a..b:80",
     "http://.a", f"http://{'a' * 64}.b"],
)  # fmt: skip
def test_what_is_none(url: str) -> None:
    with pytest.raises(Misuse, match="URL"):
        parse(url)
