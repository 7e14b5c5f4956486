"""The engine's own process: `python -m headrace.engines.worker FD`, started by `supervisor`.

    main thread     loads the engine and computes (stepper); it must do both, see `local.LocalEngine`
    reader thread   reads commands from the socket, hands them to the stepper
    writer thread   sleeps, unless the server reads too slowly

Rules: the computing thread never waits for the server; the process ends when its socket does, so a server that dies
takes its workers along; signals belong to the server.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from headrace.core.errors import StartupError
from headrace.core.events import Event
from headrace.core.file_name import shown
from headrace.core.limits import Limits
from headrace.engines import frames
from headrace.engines.base import EngineStats, StepEngine, UntrueNumbers
from headrace.engines.calibration import calibration_file, load_calibration, save_calibration
from headrace.engines.keeper import TierSettings
from headrace.engines.poison import Poisoned
from headrace.engines.stepper import CLOSE_S, Stepper
from headrace.engines.telling import Deliver


class Blueprint(msgspec.Struct, frozen=True):
    """How a worker makes its engine: `module:function` is called with `settings` and a clock."""

    factory: str
    settings: dict[str, Any]
    limits: dict[str, Any]
    tiers: TierSettings | None = None
    """None: KV is kept in the pool only."""
    calibration: str = ""
    """Directory where what steps cost is kept; "" for none."""


def build(blueprint: Blueprint) -> StepEngine:
    """Raises StartupError."""
    module, _, name = blueprint.factory.partition(":")
    engine: StepEngine = getattr(importlib.import_module(module), name)(blueprint.settings, time.monotonic)
    return engine


def make_stepper(blueprint: Blueprint, engine: StepEngine, deliver: Deliver) -> Stepper:
    """All that runs on the engine's thread, calibrated. On that thread. Raises StartupError."""
    limits = msgspec.convert(blueprint.limits, Limits)
    settings = blueprint.settings
    threads = settings.get("threads", 0), settings.get("threads_batch", 0)
    file = None
    if blueprint.calibration and limits.pace is not None:
        file = calibration_file(Path(blueprint.calibration), engine.fingerprint, threads)
    cost = None if file is None else load_calibration(file, engine.attention)
    learned = None if file is None else partial(save_calibration, file)
    draft = getattr(engine, "draft", None)
    stepper = Stepper(engine, limits, time.monotonic, deliver, cost, None if draft is None else draft.of, learned)
    if cost is None:
        first = stepper.calibrate()
        if learned is not None and first is not None:
            learned(first)
    if blueprint.tiers is not None:
        stepper.keep(blueprint.tiers)
    return stepper


class _Writer:
    """Writes frames in order: at once while the socket takes them, through a thread of its own when it does not.

    A frame of a step is some hundred bytes into a socket pair: 0.04 ms between two steps. The thread took 0.08 ms of
    CPU a token for the same, beside the next step, and woke up in competition for the GIL.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._behind: SimpleQueue[bytes | None] = SimpleQueue()
        self._queued = 0
        self._written = 0
        """Of those queued; only the thread changes it."""
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def step(self, events: list[Event], stats: EngineStats) -> None:
        """Called by the thread that tells, see `engines.telling`."""
        self.send(frames.Step(events, stats))

    def send(self, report: frames.Report) -> None:
        """Never blocks. One caller at a time."""
        data = frames.encode(report)
        if self._queued == self._written:
            try:
                sent = self._sock.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the server is gone; the reader thread sees the same and ends the process
            data = data[sent:]
        if data:
            self._queued += 1
            self._behind.put(data)

    def finish(self) -> None:
        """Write what is queued and end."""
        self._behind.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (data := self._behind.get()) is not None:
            try:
                self._sock.sendall(data)
            except OSError:
                return
            self._written += 1


def main(fd: int) -> int:
    """Serve one connection; returns the exit code."""
    # A terminal's ^C and a service manager's stop reach the whole group; the server decides what they mean.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    blueprint = msgspec.msgpack.decode(_read_frame(sock), type=Blueprint)
    writer = _Writer(sock)
    try:
        engine = build(blueprint)
        stepper = make_stepper(blueprint, engine, writer.step)
    except StartupError as error:
        writer.send(frames.Broken(shown(error.message), isinstance(error, UntrueNumbers)))
        writer.finish()
        return 2
    writer.send(frames.Ready(engine.info))
    threading.Thread(target=_read, args=(sock, stepper, writer), name="reader", daemon=True).start()
    gc.collect()
    gc.freeze()  # the collector need not walk over what was loaded while somebody waits for a token
    try:
        stepper.run()
    except Poisoned as error:
        sys.stderr.write(f"{error}\n")
        return 3
    return 0


def _read(sock: socket.socket, stepper: Stepper, writer: _Writer) -> None:
    """Carry out commands until the server is gone, then end the process, whatever it computes."""
    decoder = frames.command_decoder()
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    # Linux wakes whoever sleeps in recv() also when the other end has read what we wrote: once a token, beside the step
    # that computes the next. poll() sleeps through that.
    while poll.poll() and (data := _receive(sock)):
        for command in decoder.feed(data):
            match command:
                case frames.Submit(generation):
                    stepper.submit(generation)
                case frames.Cancel(rid):
                    stepper.cancel(rid)
                case frames.Pause(rid, paused):
                    stepper.pause(rid, paused)
                case frames.Pins(pins):
                    stepper.pin(pins)
                case frames.Ping():
                    stepper.call(lambda: writer.send(frames.Pong(time.monotonic())))
    # A step may be running: it is given up. What is not saved yet is, but nobody waits for long.
    closing = threading.Thread(target=stepper.close, daemon=True)
    closing.start()
    closing.join(CLOSE_S + 1.0)
    os._exit(0)


def _receive(sock: socket.socket, size: int = 1 << 16) -> bytes:
    try:
        return sock.recv(size)
    except OSError:
        return b""


def _read_frame(sock: socket.socket) -> bytes:
    """The first frame, the blueprint, read to the byte."""
    head = _read_exactly(sock, 4)
    return _read_exactly(sock, int.from_bytes(head, "little"))


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = _receive(sock, size - len(data))
        if not part:
            raise SystemExit(0)
        data += part
    return data


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
