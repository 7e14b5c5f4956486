"""Just enough of an HTTP/2 client (RFC 9113, prior knowledge) to ask for one stream and see each DATA frame."""

from __future__ import annotations

import asyncio
from typing import Self

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, ACK, END_HEADERS = 1, 1, 4
STREAM = 1

# Places in HPACK's static table (RFC 7541, appendix A).
_AUTHORITY, _POST, _PATH, _HTTP, _ACCEPT_ENCODING, _CONTENT_TYPE = 1, 3, 4, 6, 16, 31


def _literal(name: int, value: bytes) -> bytes:
    """A field with a name of the table and a short value, not remembered, not compressed."""
    assert len(value) < 127
    return (bytes((name,)) if name < 15 else bytes((15, name - 15))) + bytes((len(value),)) + value


class Http2:
    """One connection with one stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Self:
        made = cls(*await asyncio.open_connection("127.0.0.1", port))
        made._writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        made._send(SETTINGS, 0, b"", 0)
        return made

    def post(self, path: str, body: bytes) -> None:
        fields = (
            bytes((0x80 | _POST, 0x80 | _HTTP))
            + _literal(_PATH, path.encode())
            + _literal(_AUTHORITY, b"x")
            + _literal(_CONTENT_TYPE, b"application/json")
            + _literal(_ACCEPT_ENCODING, b"gzip, br")
        )
        self._send(HEADERS, END_HEADERS, fields, STREAM)
        self._send(DATA, END_STREAM, body, STREAM)

    async def data(self) -> bytes:
        """The next piece of the answer's body; b"" at its end."""
        while True:
            head = await self._reader.readexactly(9)
            kind, flags = head[3], head[4]
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            if kind in (SETTINGS, PING) and not flags & ACK:
                self._send(kind, ACK, b"" if kind == SETTINGS else payload, 0)
            assert kind not in (RST_STREAM, GOAWAY), payload
            if kind == DATA and (payload or flags & END_STREAM):
                return payload

    def reset(self) -> None:
        """Cancel the stream; the connection stays."""
        self._send(RST_STREAM, 0, (8).to_bytes(4, "big"), STREAM)

    def close(self) -> None:
        self._writer.close()

    def _send(self, kind: int, flags: int, payload: bytes, stream: int) -> None:
        head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
        self._writer.write(head + payload)
