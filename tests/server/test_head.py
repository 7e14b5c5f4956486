from __future__ import annotations

import msgspec
import pytest

from headrace.server.head import MALFORMED, MAX_HEAD, TOO_LARGE, TOO_SLOW, fault_of, without_upgrade

HOST = (b"host", b"example.org:8000")


def status(*headers: tuple[bytes, bytes], version: str = "1.1", target: bytes = b"/v1/models") -> int | None:
    fault = fault_of(version, target, headers)
    return None if fault is None else fault.status


@pytest.mark.parametrize("host", [b"example.org", b"example.org:80", b"[::1]:80", b"10.0.0.1", b"a_b", b"A-1.%7e~"])
def test_one_host_is_right(host: bytes) -> None:
    assert status((b"host", host)) is None


@pytest.mark.parametrize("host", [b"", b" ", b"a b", b"a/b", b"a,b", b"u@h", b"a\tb", b"a\xff", b"a?b", b"a#b"])
def test_what_is_no_host_is_refused(host: bytes) -> None:
    assert status((b"host", host)) == 400


def test_no_host_is_right_for_old_clients_only() -> None:
    assert status() == 400
    assert status(version="1.0") is None
    assert status(HOST, HOST) == 400
    assert status(HOST, HOST, version="1.0") == 400


@pytest.mark.parametrize("version", ["0.9", "2.0", "3.0", "1.2", ""])
def test_other_versions_are_refused(version: str) -> None:
    assert status(HOST, version=version) == 505


def test_a_target_has_no_fragment() -> None:
    assert status(HOST, target=b"/v1/models#x") == 400


@pytest.mark.parametrize(
    ("codings", "expected"),
    [
        ([b"chunked"], None), ([b" Chunked\t"], None), ([b"gzip, chunked"], 501), ([b"identity"], 501),
        ([b"xchunked"], 501), ([b"chunked", b"chunked"], 501), ([b"chunked;q=1"], 501), ([b"\x0bchunked"], 501),
        ([b""], 501),
    ],
)  # fmt: skip
def test_a_body_is_chunked_or_not_coded(codings: list[bytes], expected: int | None) -> None:
    assert status(HOST, *((b"transfer-encoding", coding) for coding in codings)) == expected


def test_old_clients_have_no_codings() -> None:
    assert status(HOST, (b"transfer-encoding", b"chunked"), version="1.0") == 400


@pytest.mark.parametrize("fault", [MALFORMED, TOO_LARGE, TOO_SLOW])
def test_a_fault_is_a_whole_answer_that_ends_the_connection(fault: object) -> None:
    raw = fault.answer()  # type: ignore[attr-defined]
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0].startswith(b"HTTP/1.1 4")
    assert b"connection: close" in lines
    assert b"content-length: %d" % len(body) in lines
    error = msgspec.json.decode(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert str(MAX_HEAD) in TOO_LARGE.message


@pytest.mark.parametrize(
    ("connection", "kept"),
    [
        (b"Upgrade", b""),
        (b"Upgrade, HTTP2-Settings", b""),
        (b"keep-alive, Upgrade", b"connection: keep-alive\r\n"),
        (b"close,upgrade,x", b"connection: close, x\r\n"),
    ],
)
def test_a_head_without_the_wish_for_another_protocol(connection: bytes, kept: bytes) -> None:
    headers = [
        HOST, (b"connection", connection), (b"upgrade", b"h2c"), (b"http2-settings", b"AAMA"),
        (b"content-length", b"5"), (b"x-empty", b""),
    ]  # fmt: skip
    assert without_upgrade(b"POST", b"/a?b", "1.1", headers) == (
        b"POST /a?b HTTP/1.1\r\nhost: example.org:8000\r\n" + kept + b"content-length: 5\r\nx-empty: \r\n\r\n"
    )
