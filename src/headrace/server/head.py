"""What a request's head must be, beyond what the parser asks, for all who read it to read the same.

The parser refuses what is malformed: two lengths, a length beside a coding, bare line ends, folded lines, control
bytes. What stands here is well-formed and still understood in more than one way: which host is meant, which codings
wrap the body. A proxy that takes another view than ours would let one client's bytes become another one's request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

MAX_HEAD = 64 * 1024
"""Bytes of request line and headers. Also what a chunked body may have beside its data, to begin with."""
MAX_HEADERS = 128

_HOST = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_~:[]%")
_UPGRADE = frozenset((b"upgrade", b"http2-settings"))


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a connection is closed, and the bytes that say so. No text of the client's is in it."""

    status: int
    phrase: str
    code: str
    message: str

    def answer(self) -> bytes:
        """A whole HTTP/1.1 response."""
        error = {"message": self.message, "type": "invalid_request_error", "param": None, "code": self.code}
        body = msgspec.json.encode({"error": error})
        return (
            f"HTTP/1.1 {self.status} {self.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode() + body


def _bad(message: str) -> Fault:
    return Fault(400, "Bad Request", "malformed_request", message)


MALFORMED = _bad("this is not a well-formed HTTP/1.1 request")
TOO_LARGE = Fault(
    431,
    "Request Header Fields Too Large",
    "headers_too_large",
    f"the request's headers are over {MAX_HEAD} bytes; send less",
)
TOO_MANY = Fault(
    431,
    "Request Header Fields Too Large",
    "headers_too_large",
    f"the request has more than {MAX_HEADERS} headers; send fewer",
)
TOO_SLOW = Fault(408, "Request Timeout", "request_timeout", "the request did not arrive in time")
_VERSION = Fault(505, "HTTP Version Not Supported", "http_version", "this server speaks HTTP/1.1 and HTTP/1.0")
_CODING = Fault(501, "Not Implemented", "transfer_encoding", "a body may be sent chunked, and in no other coding")
_OLD_CODING = _bad("HTTP/1.0 has no Transfer-Encoding")
_HOSTS = _bad("an HTTP/1.1 request has one Host header, with a host")
_FRAGMENT = _bad("a request's target has no fragment")


def fault_of(version: str, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Fault | None:
    """What is wrong with a head that the parser took; None: nothing. Names are in lower case."""
    if version not in ("1.1", "1.0"):
        return _VERSION
    if b"#" in target:
        return _FRAGMENT
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) != 1 and (hosts or version == "1.1"):
        return _HOSTS
    if hosts and not (hosts[0] and _HOST.issuperset(hosts[0])):
        return _HOSTS
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings:
        if version == "1.0":
            return _OLD_CODING
        if len(codings) > 1 or codings[0].strip(b" \t").lower() != b"chunked":
            return _CODING
    return None


def without_upgrade(method: bytes, target: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A head that was parsed, as bytes again, without the wish to go on in another protocol."""
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    for name, value in headers:
        if name == b"connection":
            options = (option.strip() for option in value.split(b","))
            value = b", ".join(option for option in options if option.lower() not in _UPGRADE)
        if name not in _UPGRADE and (value or name != b"connection"):
            lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join((*lines, b"", b""))
