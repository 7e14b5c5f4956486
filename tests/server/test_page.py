from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from headrace.server.page import PAGE, load_page


def test_a_page_that_is_missing_is_none(tmp_path: Path) -> None:
    assert load_page(tmp_path / "index.html") is None


def test_the_policy_allows_what_is_in_the_page_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "index.html"
    path.write_bytes(b"<style>p{}</style><script type=module>\nf()</script><script>g()</script >")
    page = load_page(path)
    assert page is not None
    headers = dict(page.headers)
    policy = headers[b"content-security-policy"].decode()
    for text in (b"p{}", b"\nf()", b"g()"):
        assert base64.b64encode(hashlib.sha256(text).digest()).decode() in policy
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy
    assert headers[b"cache-control"] == b"no-cache"


def test_a_page_without_scripts_may_run_none(tmp_path: Path) -> None:
    path = tmp_path / "index.html"
    path.write_bytes(b"<p>hello")
    page = load_page(path)
    assert page is not None
    assert b"script-src 'none'; style-src 'none'" in dict(page.headers)[b"content-security-policy"]


def test_our_page_keeps_to_what_its_policy_can_allow() -> None:
    """Hashes cover script and style elements; inline handlers and style attributes would be blocked."""
    text = PAGE.read_text()
    assert not re.search(r"<[^>]+\s(on[a-z]+|style)\s*=", re.sub(r"(?s)<(script|style)\b.*?</\1>", "", text))
