from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from h2.settings import SettingCodes

from headrace_bench.client.answer import Head
from headrace_bench.client.http1 import End, Malformed
from headrace_bench.client.http2 import Multiplexed, Part, Reset, headers

ASK = headers("POST", "h:1", "http", "/v1/x", {"Authorization": "Bearer k"})


class Pair:
    """Both ends, without a socket."""

    def __init__(self, streams: int = 100, window: int = 65_535) -> None:
        self.client = Multiplexed()
        self.server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        values = {SettingCodes.MAX_CONCURRENT_STREAMS: streams, SettingCodes.INITIAL_WINDOW_SIZE: window}
        self.server.local_settings = h2.settings.Settings(client=False, initial_values=values)
        self.server.initiate_connection()
        self.events: list[h2.events.Event] = []
        self.up(self.client.start())

    def up(self, data: bytes | None = None) -> None:
        """To the server, byte by byte."""
        for byte in self.client.pending() if data is None else data:
            self.events += self.server.receive_data(bytes([byte]))

    def down(self) -> list[tuple[int, Part]]:
        """To the client, byte by byte."""
        return [part for byte in self.server.data_to_send() for part in self.client.feed(bytes([byte]))]

    def got(self, stream: int) -> bytes:
        return b"".join(e.data for e in self.events if isinstance(e, h2.events.DataReceived) and e.stream_id == stream)


def ready(streams: int = 100, window: int = 65_535) -> Pair:
    pair = Pair(streams, window)
    pair.down()
    pair.up()
    return pair


def test_nothing_is_known_before_the_servers_settings() -> None:
    pair = Pair(streams=2)
    assert not pair.client.ready
    pair.down()
    assert pair.client.ready
    assert pair.client.room == 2


def test_streams_side_by_side() -> None:
    pair = ready(streams=2)
    one, two = pair.client.request(ASK, b"one"), pair.client.request(ASK, b"two")
    assert pair.client.room == 0
    pair.up()
    assert (pair.got(one), pair.got(two)) == (b"one", b"two")
    first = next(e for e in pair.events if isinstance(e, h2.events.RequestReceived))
    assert {str(name): value for name, value in first.headers}.items() >= dict(ASK).items()
    pair.server.send_headers(two, [(":status", "200"), ("x-a", "1")])
    pair.server.send_data(two, b"data: x")
    pair.server.send_headers(one, [(":status", "503")], end_stream=True)
    pair.server.send_data(two, b"", end_stream=True)
    found = pair.down()
    assert [part for stream, part in found if stream == two][:2] == [Head(200, {"x-a": "1"}), b"data: x"]
    assert isinstance(found[-1][1], End)
    assert next(part for stream, part in found if stream == one) == Head(503, {})


def test_a_long_body_waits_for_the_servers_window() -> None:
    pair = ready(window=1000)
    body = bytes(range(256)) * 20
    stream = pair.client.request(ASK, body)
    assert pair.client.sending(stream)
    for _ in range(20):
        pair.up()
        for event in pair.events:
            if isinstance(event, h2.events.DataReceived) and event.flow_controlled_length:
                pair.server.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                event.flow_controlled_length = 0
        pair.down()
    assert not pair.client.sending(stream)
    assert pair.got(stream) == body


def test_a_request_without_a_body_ends_with_its_head() -> None:
    pair = ready()
    pair.client.request(ASK, b"")
    pair.up()
    assert any(isinstance(event, h2.events.StreamEnded) for event in pair.events)


def test_a_megabyte_comes_through_our_window() -> None:
    pair = ready()
    stream = pair.client.request(ASK, b"x")
    pair.up()
    pair.server.send_headers(stream, [(":status", "200")])
    size = pair.server.max_outbound_frame_size
    for _ in range((1 << 20) // size):
        pair.server.send_data(stream, b"y" * size)  # raises if the window is closed
    found = pair.client.feed(pair.server.data_to_send())
    assert sum(len(part) for _, part in found if isinstance(part, bytes)) == (1 << 20) // size * size


def test_resets() -> None:
    pair = ready()
    one, two = pair.client.request(ASK, b"x"), pair.client.request(ASK, b"x")
    pair.up()
    pair.server.reset_stream(one, 2)
    pair.server.reset_stream(two, 7)
    found = [part for _, part in pair.down() if isinstance(part, Reset)]
    assert [(part.why, part.untouched) for part in found] == [
        ("stream reset: INTERNAL_ERROR", False),
        ("stream reset: REFUSED_STREAM", True),
    ]


def test_a_goodbye_leaves_what_was_taken() -> None:
    pair = ready()
    one, two = pair.client.request(ASK, b"x"), pair.client.request(ASK, b"x")
    pair.up()
    pair.server.close_connection(last_stream_id=one)
    found = pair.down()
    assert [stream for stream, part in found if isinstance(part, Reset) and part.untouched] == [two]
    assert pair.client.leaving
    assert pair.client.room == 0


def test_who_leaves_says_so() -> None:
    pair = ready()
    stream = pair.client.request(ASK, b"x")
    pair.client.cancel(stream)
    pair.client.cancel(stream)  # twice does no harm
    pair.up()
    assert any(isinstance(event, h2.events.StreamReset) for event in pair.events)


def test_what_is_not_http2() -> None:
    client = Multiplexed()
    client.start()
    with pytest.raises(Malformed, match=r"HTTP/1\.1"):
        client.feed(b"HTTP/1.1 400 Bad Request\r\n\r\n")
