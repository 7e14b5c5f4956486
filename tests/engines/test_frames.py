from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from headrace.core.events import Admitted, Delta, Failed, Finished, Marks, TokenLogprob
from headrace.core.request import Generation, Sampling
from headrace.engines import frames
from headrace.engines.base import EngineStats, ModelInfo
from headrace.engines.frames import Broken, Cancel, Command, Pause, Ping, Pong, Ready, Report, Step, Submit, encode

COMMANDS: list[Command] = [
    Submit(Generation(1, list(range(5000)), 9, 2, ("\u2028",), Sampling(logit_bias=((5, -1.5),), seed=2**63 - 1))),
    Cancel(2**40),
    Pause(3, True),
    Pause(3, False),
    Ping(),
    Submit(Generation(4, [1], 1)),
]
REPORTS: list[Report] = [
    Ready(ModelInfo("m", 4096, 49152, "{{ é }}", eog=(1, 2), control={"<|im_end|>": 2})),
    Pong(12345.678),
    Step(
        [
            Admitted(1, 0, 7),
            Delta(1, 0, "é🔥", 2, (TokenLogprob(1, b"\xf0", -0.5, ((1, b"\xf0", -0.5),)),), Marks(1, 2, 3, 4, 5)),
            Finished(1, 0, "stop", 2),
            Failed(2, "engine_failed", "why"),
        ],
        EngineStats(running=1, steps=2**40),
    ),
    Step([], EngineStats()),
    Broken("no"),
]


def feed_commands(parts: list[bytes]) -> list[Command]:
    decoder = frames.command_decoder()
    return [message for part in parts for message in decoder.feed(part)]


def feed_reports(parts: list[bytes]) -> list[Report]:
    decoder = frames.report_decoder()
    return [message for part in parts for message in decoder.feed(part)]


Feed = Callable[[list[bytes]], list[Command] | list[Report]]
BOTH = pytest.mark.parametrize(
    ("feed", "messages"), [(feed_commands, COMMANDS), (feed_reports, REPORTS)], ids=["commands", "reports"]
)


@BOTH
def test_whole(feed: Feed, messages: list[Command] | list[Report]) -> None:
    again = feed([b"".join(map(encode, messages))])
    assert again == messages
    assert list(map(type, again)) == list(map(type, messages))
    assert feed([encode(message) for message in messages]) == messages


@BOTH
def test_byte_by_byte(feed: Feed, messages: list[Command] | list[Report]) -> None:
    data = b"".join(map(encode, messages))
    assert feed([data[i : i + 1] for i in range(len(data))]) == messages


@BOTH
def test_cut_in_two(feed: Feed, messages: list[Command] | list[Report]) -> None:
    data = b"".join(map(encode, messages[1:]))
    for i in range(0, len(data), 1 + len(data) // 500):
        assert feed([data[:i], data[i:]]) == messages[1:]


@BOTH
def test_a_tail_waits_for_the_rest(feed: Feed, messages: list[Command] | list[Report]) -> None:
    first, second = encode(messages[1]), encode(messages[2])
    for cut in range(len(second)):
        assert feed([first + second[:cut]]) == [messages[1]]
        assert feed([first + second[:cut], second[cut:]]) == [messages[1], messages[2]]


def test_a_frame_is_its_length_and_its_message() -> None:
    frame = encode(Cancel(7))
    assert frame == len(frame[4:]).to_bytes(4, "little") + frame[4:]
    assert msgspec.msgpack.decode(frame[4:]) == ["cancel", 7]


def test_nothing_gives_nothing() -> None:
    assert frames.command_decoder().feed(b"") == []


def test_each_end_takes_only_what_it_is_told() -> None:
    with pytest.raises(msgspec.ValidationError):
        frames.command_decoder().feed(encode(Pong(1.0)))
    with pytest.raises(msgspec.ValidationError):
        frames.report_decoder().feed(encode(Cancel(1)))
