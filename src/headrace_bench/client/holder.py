"""Many streams held open, and nothing else: a process of its own, with a socket and a few bytes for each.

    python -m headrace_bench.client.holder URL COUNT < commands     HOLDER_BODY is the request's body, HOLDER_KEY a key

    stdin    a line        one JSON line: how many were sent, have a head, were refused, ended
             its end       all are closed, one JSON line more, and it ends

Rules: connections are opened at a steady rate, for a burst of ten thousand measures a backlog; what the server sends is
read and thrown away; a stream is open once its request is written, for a server may keep its head until there is text.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import asdict, dataclass

BODY, KEY = "HOLDER_BODY", "HOLDER_KEY"
RATE = 1000.0
"""New connections a second."""
CONNECTING = 64
"""At once."""
_READ = 1 << 16
_TICK_S = 0.01


@dataclass(slots=True)
class Count:
    """Streams so far."""

    sent: int = 0
    heads: int = 0
    """Began to answer with 200."""
    refused: int = 0
    """Answered with something else."""
    failed: int = 0
    """Could not be connected."""
    ended: int = 0
    """Closed by the server."""
    bytes: int = 0
    said: str = ""
    """The first refusal's start."""


class Holder:
    """Opens `count` streams and reads what comes on them."""

    def __init__(self, url: str, count: int, body: bytes, *, rate: float = RATE, key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        bearer = f"Authorization: Bearer {key}\r\n" if key else ""
        self._request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n{bearer}"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self._wanted = count
        self._rate = rate
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._connecting: set[int] = set()
        self._silent: set[int] = set()
        """Sent, and nothing was heard."""
        self._began = time.monotonic()
        self._started = 0
        self.count = Count()

    def turn(self, wait_s: float) -> None:
        """Opens what is due, then reads what comes within `wait_s`."""
        due = min(self._wanted, int((time.monotonic() - self._began) * self._rate) + 1)
        while self._started < due and len(self._connecting) < CONNECTING:
            self._open()
        for fd, event in self._poll.poll(wait_s, 1024):
            if fd in self._connecting:
                self._send(fd)
            elif event & ~select.EPOLLOUT:
                self._hear(fd)

    def close(self) -> None:
        """All of them."""
        for fd in list(self._sockets):
            self._drop(fd)
        self._poll.close()

    def _open(self) -> None:
        self._started += 1
        sock = socket.socket()
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect(self._address)
        self._sockets[sock.fileno()] = sock
        self._connecting.add(sock.fileno())
        self._poll.register(sock.fileno(), select.EPOLLOUT)

    def _send(self, fd: int) -> None:
        self._connecting.discard(fd)
        sock = self._sockets[fd]
        try:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or sock.send(self._request) != len(self._request):
                raise OSError
        except OSError:
            self.count.failed += 1
            self._drop(fd)
            return
        self.count.sent += 1
        self._silent.add(fd)
        self._poll.modify(fd, select.EPOLLIN)

    def _hear(self, fd: int) -> None:
        try:
            data = self._sockets[fd].recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.count.bytes += len(data)
        if fd in self._silent and data:
            self._silent.discard(fd)
            if data.split(b" ", 2)[1:2] == [b"200"]:
                self.count.heads += 1
            else:
                self.count.refused += 1
                self.count.said = self.count.said or data.decode(errors="replace")[-200:]
        if not data:
            self.count.ended += 1
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        self._silent.discard(fd)
        self._connecting.discard(fd)
        with contextlib.suppress(OSError):
            self._poll.unregister(fd)
        self._sockets.pop(fd).close()


def main(argv: Sequence[str] | None = None) -> int:
    """The program."""
    url, count = sys.argv[1:] if argv is None else argv
    holder = Holder(url, int(count), os.environ[BODY].encode(), key=os.environ.get(KEY))
    commands = select.poll()
    commands.register(0, select.POLLIN | select.POLLHUP)
    while True:
        holder.turn(_TICK_S)
        if commands.poll(0):
            asked = os.read(0, 4096)
            if not asked:
                break
            _say(holder.count)
    holder.close()
    _say(holder.count)
    return 0


def _say(count: Count) -> None:
    print(json.dumps(asdict(count)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
