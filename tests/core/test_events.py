from __future__ import annotations

import msgspec
import pytest

from headrace.core.events import Admitted, Delta, Event, Failed, Finished, Marks, TokenLogprob

LOGPROBS = (TokenLogprob(5, b"\xf0\x9f", -0.25, ((5, b"\xf0\x9f", -0.25), (6, b"", -9999.0))),)
EVENTS: list[Event] = [
    Admitted(1, 0, 30),
    Delta(2, 1, "é🔥\u2028", 3),
    Delta(2, 1, "", 1, LOGPROBS, Marks(0.1, 0.2, 0.3, 0.4, 1e9 + 0.123456)),
    Finished(3, 0, "stop", 4),
    Finished(3, 0, "length", 4),
    Failed(4, "engine_failed", "why"),
]


@pytest.mark.parametrize("event", EVENTS, ids=repr)
def test_an_event_crosses_processes_unchanged(event: Event) -> None:
    decoder = msgspec.msgpack.Decoder(Event)
    again = decoder.decode(msgspec.msgpack.encode(event))
    assert type(again) is type(event)
    assert again == event


def test_an_event_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        setattr(EVENTS[0], "rid", 9)  # noqa: B010 - the type checker knows already
