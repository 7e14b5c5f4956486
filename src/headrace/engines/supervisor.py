"""A StreamEngine whose engine lives in a child process, and is started again when it dies.

    STARTING ──Ready──► READY ──socket closed──► WAITING ──back-off──► STARTING
        │                                                                  │
        └──Broken, or dead before it was ever ready──► StartupError        └─ once it was ready: for ever

Rules: everything here runs on the event loop; live generations of a dead worker each get one `Failed`; the back-off
doubles from 0.5 s to 30 s and is forgotten once a worker has been up for a minute.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from headrace.core.admission import Backlog, Bounds
from headrace.core.clock import Clock, offset
from headrace.core.errors import EngineUnavailable, StartupError
from headrace.core.request import Generation
from headrace.engines import frames
from headrace.engines.base import EngineStats, ModelInfo, Sink
from headrace.engines.streams import Streams
from headrace.engines.worker import Blueprint

log = logging.getLogger(__name__)

_BACKOFF_FIRST = 0.5
_BACKOFF_MOST = 30.0
_STEADY = 60.0
_DIED = "the engine stopped while it worked on this request; it is being restarted, please try again"


def backoff(failures: int) -> float:
    """Seconds to wait before start number `failures` + 1."""
    return float(min(_BACKOFF_MOST, _BACKOFF_FIRST * 2 ** max(0, min(failures, 16) - 1)))


class _Link(asyncio.Protocol):
    """The server's end of one worker's socket."""

    def __init__(self, owner: WorkerEngine) -> None:
        self._owner = owner
        self._decoder = frames.report_decoder()

    def data_received(self, data: bytes) -> None:
        for report in self._decoder.feed(data):
            self._owner._on_report(report)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner._on_lost()


class WorkerEngine:
    """Starts `blueprint` in a child process and keeps it alive."""

    def __init__(
        self,
        blueprint: Blueprint,
        clock: Clock,
        *,
        bounds: Bounds = Bounds(),  # noqa: B008 - frozen
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._blueprint = blueprint
        self._environment = environment
        """The worker's; None: the same as ours."""
        self._clock = clock
        self._streams = Streams(Backlog(bounds), clock)
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._info: ModelInfo | None = None
        self._started: asyncio.Future[None] | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._asked = 0.0
        self._up_since = 0.0
        self._failures = 0
        self._closing = False
        self.restarts = 0
        self.ready = False
        self.clock_offset = 0.0
        self.stats = EngineStats()

    def __repr__(self) -> str:
        return f"<WorkerEngine [{'ready' if self.ready else 'down'}, pid {self.pid}, {self._streams!r}]>"

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        return self._process.pid if self._process is not None else None

    @property
    def info(self) -> ModelInfo:
        """Raises EngineUnavailable before the first start; known while the worker restarts."""
        if self._info is None:
            raise EngineUnavailable("the model is still loading; try again soon")
        return self._info

    async def start(self) -> None:
        """Load the model for the first time. Raises StartupError."""
        self._started = asyncio.get_running_loop().create_future()
        await self._launch()
        try:
            await self._started
        except StartupError:
            await self.close()
            raise

    async def close(self) -> None:
        """End the worker; live generations get `Failed`."""
        self._closing = True
        loading, self.ready = not self.ready, False
        if self._restart is not None:
            self._restart.cancel()
        self._streams.fail_all("engine_unavailable", "the server is shutting down")
        if self._started is not None and not self._started.done():
            self._started.set_exception(StartupError("stopped while the model was loading"))
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None:
            if loading:
                self._process.kill()  # it looks at its socket only when the model is there
            await asyncio.get_running_loop().run_in_executor(None, _reap, self._process)

    def submit(self, generation: Generation, sink: Sink) -> None:
        """Raises EngineUnavailable, Overloaded."""
        if not self.ready:
            raise EngineUnavailable("the engine is being restarted; try again soon")
        self._streams.open(generation, sink)
        self._send(frames.Submit(generation))

    def cancel(self, rid: int) -> None:
        if self._streams.close(rid):
            self._send(frames.Cancel(rid))

    def pause(self, rid: int) -> None:
        if rid in self._streams:
            self._send(frames.Pause(rid, True))

    def resume(self, rid: int) -> None:
        if rid in self._streams:
            self._send(frames.Pause(rid, False))

    async def _launch(self) -> None:
        loop = asyncio.get_running_loop()
        if self._process is not None:
            await loop.run_in_executor(None, _reap, self._process)
        if self._closing:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - a fork takes milliseconds and happens at start only
                [sys.executable, "-u", "-m", "headrace.engines.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=self._environment,
            )
        self._transport, _ = await loop.create_connection(lambda: _Link(self), sock=ours)
        if self._closing:
            self._transport.abort()
            return
        body = msgspec.msgpack.encode(self._blueprint)
        self._transport.write(struct.pack("<I", len(body)) + body)

    def _send(self, command: frames.Command) -> None:
        if self._transport is not None:
            self._transport.write(frames.encode(command))

    def _on_report(self, report: frames.Report) -> None:
        match report:
            case frames.Step(events, stats):
                self.stats = stats
                self._streams.learn(stats)
                self._streams.deliver(events)
            case frames.Ready(info):
                self._info = info
                self._asked = self._clock()
                self._send(frames.Ping())
            case frames.Pong(now):
                self.clock_offset = offset(self._asked, now, self._clock())
                self._up_since = self._clock()
                self.ready = True
                if self._started is not None and not self._started.done():
                    self._started.set_result(None)
            case frames.Broken(message):
                if self._started is not None and not self._started.done():
                    self._started.set_exception(StartupError(message))
                else:
                    log.error("engine: %s", message)

    def _on_lost(self) -> None:
        """The worker is gone, for whatever reason."""
        if self.ready and self._clock() - self._up_since > _STEADY:
            self._failures = 0
        self.ready = False
        self._transport = None
        self.stats = EngineStats(cells_total=self.stats.cells_total)
        if self._closing:
            return
        if self._started is not None and not self._started.done():
            self._started.set_exception(StartupError("the engine died while it loaded the model"))
            return
        if self._info is None:
            return  # the first start failed and has been reported
        self._failures += 1
        wait = backoff(self._failures)
        log.error(
            "engine: worker %s is gone, %d streams fail; next start in %.1f s", self.pid, len(self._streams), wait
        )
        self._streams.fail_all("engine_failed", _DIED)
        self._restart = asyncio.get_running_loop().call_later(wait, self._start_again)

    def _start_again(self) -> None:
        self.restarts += 1
        task = asyncio.get_running_loop().create_task(self._launch())
        task.add_done_callback(self._launched)

    def _launched(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("engine: cannot start the worker: %s", task.exception())
            self._on_lost()


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a worker whose socket is closed; make sure after 5 s."""
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
