"""Where a response is written to: the connection that asked for it, or a log that any number of connections read.

Stream ──▶ Outlet ◀─ Exchange      one client, its socket
                  ◀─ LogOutlet     a log; never waits, is never gone
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.core.timeline import Timeline
from headrace.observe.record import Record
from headrace.protocol.block import blocks_of
from headrace.server.exchange import Channel, Headers
from headrace.server.live import Live
from headrace.server.streamlog import StreamLog


class Outlet(Protocol):
    """What a stream needs of whoever takes it; an Exchange is one."""

    request_id: str
    record: Record
    timeline: Timeline
    started: bool
    """The status is out."""
    abort: Callable[[], None] | None
    channel: Channel | None

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status line. Raises ClientGone."""
        ...

    async def write(self, body: bytes, *, more: bool) -> None:
        """Send a piece of the body. Raises ClientGone."""
        ...


class LogOutlet:
    """A stream's way into its log, which may have been begun by another server."""

    def __init__(self, log: StreamLog, request_id: str, record: Record, timeline: Timeline) -> None:
        self.request_id = request_id
        self.record = record
        self.timeline = timeline
        self.started = log.begun
        self.abort: Callable[[], None] | None = None
        self.channel: Channel | None = LogChannel(log)
        self.passing_on: Callable[[], bool] | None = None
        """Does the stream break off here for somebody else to go on with it?"""
        self.live: Live | None = None
        """The generation that writes."""
        self.farewell = b""
        """What the readers here are told then."""
        self._log = log

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        self.record.status = status
        self._log.begin(tuple(headers))

    async def write(self, body: bytes, *, more: bool) -> None:
        blocks = blocks_of(body)
        if not more and blocks and self.passing_on is not None and self.passing_on():
            self.farewell = blocks.pop()
        for block in blocks:
            self._log.append(block)


class LogChannel:
    """The short way into a begun log."""

    __slots__ = ("_log",)

    def __init__(self, log: StreamLog) -> None:
        self._log = log

    def ready(self) -> bool:
        return self._log.ended is None

    def write(self, body: bytes) -> None:
        for block in blocks_of(body):
            self._log.append(block)
