"""HTTP/2 without a socket: many requests on one connection, by the h2 library.

    request ──► frames to send          bytes ── feed ──► [(stream, Head | bytes | End | Reset), …]

Rules: received data is acknowledged at once, and the windows are large: how fast a server may send is never up to us;
a request body that does not fit the server's window is sent in pieces, as the window opens.
"""

from __future__ import annotations

from collections.abc import Mapping

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from headrace_bench.client.answer import Head
from headrace_bench.client.http1 import End, Malformed

WINDOW = 1 << 24
"""Bytes that a server may send ahead, for a stream and for the connection."""


class Reset:
    """The stream ended before its message did. `untouched`: the server says that it did nothing for it."""

    __slots__ = ("untouched", "why")

    def __init__(self, why: str, untouched: bool) -> None:
        self.why = why
        self.untouched = untouched


Part = Head | bytes | End | Reset


class Multiplexed:
    """One connection's state."""

    def __init__(self) -> None:
        settings = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self._h2 = h2.connection.H2Connection(settings)
        self._rest: dict[int, memoryview] = {}
        """Stream → what of its request's body has not been sent."""
        self.ready = False
        """The server's settings are there: it is HTTP/2, and how many streams it takes is known."""
        self.leaving = False
        """The server takes no new streams here."""
        self._open: set[int] = set()
        self._first = b""

    def start(self) -> bytes:
        """What a connection begins with."""
        # As initial values: what is set later counts only once the server has acknowledged it.
        codes = h2.settings.SettingCodes
        ours = {codes.ENABLE_PUSH: 0, codes.INITIAL_WINDOW_SIZE: WINDOW}
        self._h2.local_settings = h2.settings.Settings(client=True, initial_values=ours)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW)
        return bytes(self._h2.data_to_send())

    @property
    def room(self) -> int:
        """Streams that can be opened now."""
        if self.leaving:
            return 0
        return min(self._h2.remote_settings.max_concurrent_streams, 1 << 20) - len(self._open)

    def request(self, headers: list[tuple[str, str]], body: bytes) -> int:
        """Opens a stream with a request, pseudo headers first; its number."""
        stream = self._h2.get_next_available_stream_id()
        self._h2.send_headers(stream, headers, end_stream=not body)
        self._open.add(stream)
        if body:
            self._rest[stream] = memoryview(body)
            self._push(stream)
        return stream

    def sending(self, stream: int) -> bool:
        """Some of its request waits for the server's window."""
        return stream in self._rest

    def cancel(self, stream: int) -> None:
        """Leave a stream before its end."""
        self._forget(stream)
        try:
            self._h2.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        except h2.exceptions.ProtocolError:
            pass  # it had ended by itself

    def pending(self) -> bytes:
        """Frames to send now."""
        return bytes(self._h2.data_to_send())

    def feed(self, data: bytes) -> list[tuple[int, Part]]:
        """What `data` completes; there may be frames to send afterwards. Raises Malformed."""
        found: list[tuple[int, Part]] = []
        if len(self._first) < 4:
            # A server begins with its settings. Another protocol's text would be waited for as a frame of megabytes.
            self._first += data[:9]
            if self._first[3:4] not in (b"", b"\x04"):
                raise Malformed(f"not HTTP/2: {self._first!r}")
        try:
            for event in self._h2.receive_data(data):
                self._take(event, found)
        except h2.exceptions.ProtocolError as error:
            raise Malformed(f"not HTTP/2: {error or type(error).__name__}: {data[:40]!r}") from None
        return found

    def _take(self, event: h2.events.Event, found: list[tuple[int, Part]]) -> None:
        match event:
            case h2.events.DataReceived():
                if event.flow_controlled_length:
                    self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                if event.data:
                    found.append((event.stream_id, bytes(event.data)))
            case h2.events.ResponseReceived():
                headers = {str(name): str(value) for name, value in event.headers}
                found.append((event.stream_id, Head(int(headers.pop(":status")), headers)))
            case h2.events.StreamEnded():
                self._forget(event.stream_id)
                found.append((event.stream_id, End(reusable=True)))
            case h2.events.StreamReset():
                self._forget(event.stream_id)
                refused = event.error_code == h2.errors.ErrorCodes.REFUSED_STREAM
                found.append((event.stream_id, Reset(f"stream reset: {_name(event.error_code)}", refused)))
            case h2.events.ConnectionTerminated():
                self._leave(event, found)
            case h2.events.RemoteSettingsChanged():
                self.ready = True
                self._push_all()
            case h2.events.WindowUpdated():
                self._push_all()

    def _leave(self, event: h2.events.ConnectionTerminated, found: list[tuple[int, Part]]) -> None:
        """The server says goodbye: streams above the last it took are untouched, the others go on."""
        self.leaving = True
        last = event.last_stream_id or 0
        for stream in sorted(stream for stream in self._open if stream > last):
            self._forget(stream)
            found.append((stream, Reset(f"connection ended: {_name(event.error_code)}", True)))

    def _push_all(self) -> None:
        for stream in list(self._rest):
            self._push(stream)

    def _push(self, stream: int) -> None:
        """As much of the body as the windows let through."""
        rest = self._rest[stream]
        frame = self._h2.max_outbound_frame_size
        while rest:
            size = min(len(rest), frame, self._h2.local_flow_control_window(stream))
            if size <= 0:
                self._rest[stream] = rest
                return
            self._h2.send_data(stream, bytes(rest[:size]), end_stream=size == len(rest))
            rest = rest[size:]
        else:
            del self._rest[stream]

    def _forget(self, stream: int) -> None:
        self._open.discard(stream)
        self._rest.pop(stream, None)


def headers(method: str, authority: str, scheme: str, path: str, more: Mapping[str, str]) -> list[tuple[str, str]]:
    """A request's headers, pseudo headers first."""
    pseudo = [(":method", method), (":scheme", scheme), (":authority", authority), (":path", path)]
    return [*pseudo, *((name.lower(), value) for name, value in more.items())]


def _name(code: int | h2.errors.ErrorCodes | None) -> str:
    return code.name if isinstance(code, h2.errors.ErrorCodes) else f"error {code}"
