from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from headrace.core.errors import StartupError
from headrace.core.events import Admitted, Delta, Event, Failed, Finished
from headrace.core.request import Generation, Sampling
from headrace.engines import frames
from headrace.engines.frames import Broken, Cancel, Pause, Ping, Pong, Ready, Report, Step, Submit
from headrace.engines.worker import Blueprint, build
from headrace.testing import ScriptedEngine
from rig import GREEDY

PATIENCE = 20.0
LETTERS = [[c] for c in "abcdefghijklmnopqrstuvwxyz"]


class Wire:
    """The server's end, by hand: a worker process and its socket."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.process, self.sock = process, sock
        self._decoder = frames.report_decoder()
        self._reports: list[Report] = []
        self.events: list[Event] = []

    def send(self, *commands: frames.Command) -> None:
        self.sock.sendall(b"".join(map(frames.encode, commands)))

    def report(self) -> Report | None:
        """The next one; None when the worker has closed the socket."""
        while not self._reports:
            data = self.sock.recv(1 << 16)
            if not data:
                return None
            self._reports += self._decoder.feed(data)
        report = self._reports.pop(0)
        if isinstance(report, Step):
            self.events += report.events
        return report

    def until(self, true: Callable[[Report], bool]) -> Report:
        while (report := self.report()) is not None:
            if true(report):
                return report
        raise AssertionError("the worker is gone")

    def until_event(self, true: Callable[[Event], bool]) -> None:
        self.until(lambda report: isinstance(report, Step) and any(map(true, report.events)))

    def text(self, rid: int) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Delta) and e.rid == rid)

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE)

    def stderr(self) -> bytes:
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextmanager
def spawned(first: bytes, *, buffer: int | None = None) -> Iterator[Wire]:
    """`buffer`: bytes that the worker's socket takes before it is full."""
    ours, theirs = socket.socketpair()
    if buffer is not None:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    ours.settimeout(PATIENCE)
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "headrace.engines.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
            )
        try:
            ours.sendall(first)
            yield Wire(process, ours)
        finally:
            process.kill()
            process.wait(PATIENCE)
            assert process.stderr is not None
            process.stderr.close()


def framed(blueprint: Blueprint) -> bytes:
    body = msgspec.msgpack.encode(blueprint)
    return struct.pack("<I", len(body)) + body


def blueprint(**settings: Any) -> bytes:
    settings = {"script": LETTERS, **settings}
    return framed(Blueprint("headrace.testing:scripted_worker", settings, {"prefill_chunk": 100}))


def is_end(event: Event) -> bool:
    return isinstance(event, Finished | Failed)


def test_build_calls_the_factory_it_names() -> None:
    engine = build(Blueprint("headrace.testing:scripted_worker", {"script": [["a"]], "n_ctx": 99}, {}))
    assert isinstance(engine, ScriptedEngine)
    assert engine.info.n_ctx == 99


def test_build_passes_startup_errors_on() -> None:
    with pytest.raises(StartupError, match="nowhere"):
        build(Blueprint("headrace.engines.llama:worker", {"path": "/nowhere.gguf", "name": "x"}, {}))


def test_it_serves_a_generation_and_tells_the_time() -> None:
    with spawned(blueprint()) as wire:
        ready = wire.report()
        assert isinstance(ready, Ready)
        assert ready.info.name == "scripted"
        wire.send(Ping(), Submit(Generation(1, [1, 2, 3], 3, sampling=GREEDY)))
        pong = wire.until(lambda r: isinstance(r, Pong))
        assert isinstance(pong, Pong)
        assert pong.now > 0
        wire.until_event(is_end)
        assert wire.text(1) == "abc"
        assert [type(e) for e in wire.events] == [Admitted, Delta, Delta, Delta, Finished]


def test_readers_told_beside_the_next_step_hear_the_same_and_pings_wait_their_turn() -> None:
    settings = {"script": LETTERS * 20, "step_s": 0.0005}
    with spawned(framed(Blueprint("headrace.testing:scripted_worker", settings, {"overlap": True}))) as wire:
        wire.send(*(Submit(Generation(rid, [rid, 2, 3], 400)) for rid in range(1, 4)))
        wire.until_event(lambda e: isinstance(e, Delta))
        for _ in range(20):
            wire.send(Ping())
            wire.until(lambda r: isinstance(r, Pong))
        while sum(map(is_end, wire.events)) < 3:
            assert wire.report() is not None
        assert [wire.text(rid) for rid in range(1, 4)] == ["abcdefghijklmnopqrstuvwxyz" * 15 + "abcdefghij"] * 3


def test_a_frame_a_step() -> None:
    with spawned(blueprint()) as wire:
        wire.send(*(Submit(Generation(rid, [rid, 2, 3], 4)) for rid in range(8)))
        batches: list[list[Event]] = []
        while sum(map(is_end, wire.events)) < 8:
            report = wire.report()
            if isinstance(report, Step):
                batches.append([e for e in report.events if isinstance(e, Delta)])
        assert max(map(len, batches)) == 8, "one frame carries the tokens of all streams"
        assert all(wire.text(rid) == "abcd" for rid in range(8))


@pytest.mark.parametrize(("size", "tokens"), [(1, 1000), (20_000, 60)])
def test_a_server_that_reads_slowly_gets_everything_in_order(size: int, tokens: int) -> None:
    script = [[c * size] for (c,) in LETTERS * 40][:tokens]
    with spawned(blueprint(script=script), buffer=4096) as wire:
        sampling = Sampling(logprobs=5 if size == 1 else None)
        wire.send(*(Submit(Generation(rid, [rid, 2], tokens, sampling=sampling)) for rid in range(4)))
        wire.until(lambda r: sum(map(is_end, wire.events)) == 4)
        text = "".join(token for (token,) in script)
        assert all(wire.text(rid) == text for rid in range(4))


def test_it_keeps_the_limits_it_is_given() -> None:
    with spawned(blueprint()) as wire:
        wire.send(Submit(Generation(1, [7] * 250, 1)))
        report = wire.until(lambda r: isinstance(r, Step) and any(map(is_end, r.events)))
        assert isinstance(report, Step)
        assert report.stats.steps == 3, "chunks of 100"


def test_a_model_that_cannot_be_loaded_is_told_and_ends_it() -> None:
    settings = {"path": "/nowhere.gguf", "name": "x"}
    with spawned(framed(Blueprint("headrace.engines.llama:worker", settings, {}))) as wire:
        report = wire.report()
        assert isinstance(report, Broken)
        assert "/nowhere.gguf" in report.message
        assert wire.report() is None
        assert wire.exit_code() == 2
        assert wire.stderr() == b""


def test_a_cancel_gives_up_the_running_step() -> None:
    with spawned(blueprint(prefill_s=3600.0)) as wire:
        wire.send(Submit(Generation(1, [1] * 500, 3)))
        wire.until_event(lambda e: isinstance(e, Admitted))
        wire.send(Cancel(1))
        wire.until(lambda r: isinstance(r, Step) and r.stats.running == 0 and r.stats.slots_free == 64)
        assert wire.text(1) == ""


def test_pause_and_resume() -> None:
    with spawned(blueprint(script=LETTERS * 150)) as wire:
        wire.send(Submit(Generation(1, [1, 2], 3800)), Pause(1, True), Submit(Generation(2, [2, 2], 20)))
        wire.until_event(lambda e: is_end(e) and e.rid == 2)
        told = wire.text(1)
        wire.send(Submit(Generation(3, [3, 2], 20)))
        wire.until_event(lambda e: is_end(e) and e.rid == 3)
        assert wire.text(1) == told
        assert len(told) < 3800
        wire.send(Pause(1, False))
        wire.until_event(lambda e: is_end(e) and e.rid == 1)
        assert len(wire.text(1)) == 3800


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_with_its_socket(busy: bool) -> None:
    with spawned(blueprint(prefill_s=3600.0)) as wire:
        assert isinstance(wire.report(), Ready)
        if busy:
            wire.send(Submit(Generation(1, [1] * 500, 3)))
            wire.until_event(lambda e: isinstance(e, Admitted))
        wire.sock.close()
        assert wire.exit_code() == 0
        assert wire.stderr() == b""


def test_it_ends_quietly_when_its_last_words_were_not_read() -> None:
    with spawned(blueprint()) as wire:
        assert select.select([wire.sock], [], [], PATIENCE)[0]
        wire.sock.close()
        assert wire.exit_code() == 0
        assert wire.stderr() == b""


def test_it_ends_quietly_when_nobody_reads_what_it_says() -> None:
    with spawned(blueprint(script=[["x" * 1000]] * 4000, n_ctx=8000)) as wire:
        wire.send(*(Submit(Generation(rid, [rid], 4000)) for rid in range(8)))
        wire.until_event(lambda e: isinstance(e, Delta))
        wire.sock.close()  # with unread bytes in it: the peer sees a reset
        assert wire.exit_code() == 0
        assert wire.stderr() == b""


@pytest.mark.parametrize("sent", [0, 2, 30])
def test_it_ends_when_the_server_dies_before_it_said_what_to_do(sent: int) -> None:
    with spawned(blueprint()[:sent]) as wire:
        wire.sock.close()
        assert wire.exit_code() == 0
        assert wire.stderr() == b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_the_server_s_business(number: signal.Signals) -> None:
    with spawned(blueprint()) as wire:
        assert isinstance(wire.report(), Ready)
        os.kill(wire.process.pid, number)
        wire.send(Submit(Generation(1, [1, 2], 5)))
        wire.until_event(is_end)
        assert wire.text(1) == "abcde"


def test_an_engine_that_breaks_ends_the_process() -> None:
    with spawned(blueprint(step_s="not a number")) as wire:
        wire.send(Submit(Generation(1, [1, 2], 5)))
        while wire.report() is not None:
            pass
        assert wire.exit_code() == 1
        assert b"TypeError" in wire.stderr()


def test_a_script_may_end_the_process() -> None:
    with spawned(blueprint(exit_at=3)) as wire:
        wire.send(Submit(Generation(1, [1, 2], 5)))
        while wire.report() is not None:
            pass
        assert wire.exit_code() == 9
        assert "abcde".startswith(wire.text(1))
