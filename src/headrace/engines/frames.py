"""What server and worker say to each other over their socket.

    ┌──────────────┬─────────────────────────┐
    │ length, u32  │ msgpack of one message  │        little endian; one frame a step from the worker
    └──────────────┴─────────────────────────┘

Rules: both ends are of one release and one machine, so there is no version; a message is a tagged array; the decoder
takes bytes as they come and gives whole messages.
"""

from __future__ import annotations

import struct
from typing import Generic, TypeVar

import msgspec

from headrace.core.events import Event
from headrace.core.kv import Pin
from headrace.core.request import Generation
from headrace.engines.base import EngineStats, ModelInfo


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Server → worker."""

    generation: Generation


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Server → worker."""

    rid: int


class Pause(msgspec.Struct, frozen=True, array_like=True, tag="pause"):
    """Server → worker: hold a generation's tokens back, or go on."""

    rid: int
    paused: bool


class Pins(msgspec.Struct, frozen=True, array_like=True, tag="pins"):
    """Server → worker: keep these prefixes warm, and no others of those that were given before."""

    pins: list[Pin]


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Server → worker: what time is it with you?"""


Command = Submit | Cancel | Pause | Pins | Ping


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Worker → server: the model is loaded."""

    info: ModelInfo


class Broken(msgspec.Struct, frozen=True, array_like=True, tag="broken"):
    """Worker → server: the model cannot be loaded; the worker exits."""

    message: str
    untrue: bool = False
    """What it computed cannot be right; with other kernels it may be."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """Worker → server: seconds on the worker's clock."""

    now: float


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Worker → server: all that one step made visible."""

    events: list[Event]
    stats: EngineStats


Report = Ready | Broken | Pong | Step

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
M = TypeVar("M")


def encode(message: Command | Report) -> bytes:
    """One frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder(Generic[M]):
    """Bytes in, messages out. `kind` is the union to expect."""

    def __init__(self, kind: type[M]) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """The messages that are whole now."""
        buffer = self._buffer
        buffer += data
        messages: list[M] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            messages.append(self._decode(memoryview(buffer)[start + _LENGTH.size : end]))
            start = end
        if start:
            del buffer[:start]
        return messages


def command_decoder() -> FrameDecoder[Command]:
    """For the worker's end."""
    return FrameDecoder(Command)  # type: ignore[arg-type]


def report_decoder() -> FrameDecoder[Report]:
    """For the server's end."""
    return FrameDecoder(Report)  # type: ignore[arg-type]
