"""A StreamEngine whose engine lives in a child process, and is started again when it dies.

    STARTING ──Ready──► UP ──socket closed──► WAITING ──back-off──► STARTING
        │               │ ▲                      ▲                     │
        │               │ └ streams are put back └── silent: kill -9   └─ once it was up: for ever
        │ └ a signal: one rung down, see `ladder`, and again ────────┘
        └──Broken, or dead on the last rung before it was ever up──► StartupError

Rules: everything here runs on the event loop. Live streams outlive the worker: the next one goes on from the last token
that each reader was told of, see `streams`, and in what order, see `quarantine`. The first restart is at once, then the
back-off doubles from 0.5 s to 30 s; it is forgotten once a worker has been up for a minute. Without replay, the live
streams of a dead worker each get one `Failed`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Mapping, Sequence

import msgspec

from headrace.core.admission import Backlog, Bounds
from headrace.core.clock import Clock, offset
from headrace.core.errors import EngineUnavailable, StartupError
from headrace.core.events import Event, Failed
from headrace.core.kv import Pin
from headrace.core.request import Generation
from headrace.engines import frames
from headrace.engines.base import EngineStats, Lives, ModelInfo, Sink
from headrace.engines.child import Child
from headrace.engines.footing import Footing
from headrace.engines.ladder import told
from headrace.engines.quarantine import Quarantine
from headrace.engines.streams import Streams
from headrace.engines.watchdog import Verdict, Watchdog
from headrace.engines.worker import Blueprint

log = logging.getLogger(__name__)

_BACKOFF_FIRST = 0.5
_BACKOFF_MOST = 30.0
_STEADY = 60.0
_VAIN_STARTS = 5
"""Starts in a row that come to nothing, until the streams no longer wait for the next one."""
_DIED = "the engine stopped while it worked on this request; it is being restarted, please try again"
_GUILTY = "the engine stopped twice while it worked on this request; it is not tried again"


def backoff(failures: int) -> float:
    """Seconds to wait before start number `failures` + 1."""
    if failures <= 1:
        return 0.0
    return float(min(_BACKOFF_MOST, _BACKOFF_FIRST * 2 ** (min(failures, 16) - 2)))


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
        footing: Footing | None = None,
        environment: Mapping[str, str] | None = None,
        replay: bool = True,
        step_timeout_s: float = 60.0,
    ) -> None:
        """`footing`: what to do without if the worker dies of it; by default nothing is tried."""
        self._blueprint = blueprint
        self._footing = footing or Footing()
        self._environment = environment
        """The worker's; None: the same as ours."""
        self._clock = clock
        self._replay = replay
        self._pins: tuple[Pin, ...] = ()
        """What every new worker is told to keep warm."""
        self._streams = Streams(Backlog(bounds), clock)
        self._quarantine = Quarantine()
        self._watchdog = Watchdog(step_timeout_s)
        self._watch: asyncio.TimerHandle | None = None
        self._child: Child | None = None
        self._untrue = ""
        """What the worker that is loading found wrong with its numbers."""
        self._burial: asyncio.Task[None] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._info: ModelInfo | None = None
        self._started: asyncio.Future[None] | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._asked = 0.0
        self._up_since = 0.0
        self._failures = 0
        self._vain = 0
        """Workers in a row that died before they were up."""
        self._up = False
        self._back_soon = False
        """The worker is down for the first time: who comes now is queued."""
        self._closing = False
        self.restarts = 0
        self.replayed = 0
        self.given_up = 0
        self.clock_offset = 0.0
        self.stats = EngineStats()

    def __repr__(self) -> str:
        return f"<WorkerEngine [{'ready' if self.ready else 'down'}, pid {self.pid}, {self._streams!r}]>"

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        return self._child.pid if self._child is not None else None

    @property
    def ready(self) -> bool:
        """A generation submitted now is taken: worked on, or queued because the worker is back soon."""
        return self._up or self._back_soon

    @property
    def restarting(self) -> bool:
        """The worker died, and who comes now waits for the next one."""
        return self._back_soon

    @property
    def info(self) -> ModelInfo:
        """Raises EngineUnavailable before the first start; known while the worker restarts."""
        if self._info is None:
            raise EngineUnavailable("the model is still loading; try again soon")
        return self._info

    @property
    def lives(self) -> Lives:
        footing = self._footing
        return Lives(self.restarts, self.replayed, self.given_up, footing.rung.name, footing.depth, footing.note)

    async def start(self) -> None:
        """Load the model for the first time. Raises StartupError."""
        self._started = asyncio.get_running_loop().create_future()
        await asyncio.to_thread(self._footing.begin, self._blueprint.settings)
        try:
            await self._launch()
            await self._started
        except StartupError:
            await self.close()
            raise

    async def close(self) -> None:
        """End the worker; live generations get `Failed`."""
        self._closing = True
        loading, self._up, self._back_soon = not self._up, False, False
        for timer in (self._restart, self._watch):
            if timer is not None:
                timer.cancel()
        self._quarantine.acquit()
        self._streams.fail_all("engine_unavailable", "the engine was shut down before it had finished this answer")
        if self._started is not None and not self._started.done():
            self._started.set_exception(StartupError("stopped while the model was loading"))
        if self._transport is not None:
            self._transport.abort()
        if self._child is not None:
            if loading:
                self._child.kill()  # it looks at its socket only when the model is there
            await self._child.ended()

    def submit(self, generation: Generation, sink: Sink) -> None:
        """Raises EngineUnavailable, Overloaded."""
        if not self.ready:
            raise EngineUnavailable("the engine is being restarted; try again soon")
        if not self._streams:
            self._watchdog.heard(self._clock())  # silence counts from here
        self._streams.open(generation, sink)
        if self._up and not self._quarantine:
            self._place(generation.rid)

    def predict(self, tokens: int, priority: int) -> float:
        return self._streams.predict(tokens, priority)

    def pin(self, pins: Sequence[Pin]) -> None:
        self._pins = tuple(pins)
        if self._up:
            self._send(frames.Pins(list(pins)))

    def cancel(self, rid: int) -> None:
        if self._streams.close(rid):
            self._send(frames.Cancel(rid))
            if self._quarantine:
                self._quarantine.drop(rid)
                self._put_back()

    def pause(self, rid: int) -> None:
        if self._streams.pause(rid, True):
            self._hold(rid, True)

    def resume(self, rid: int) -> None:
        if self._streams.pause(rid, False):
            self._hold(rid, False)

    async def _launch(self) -> None:
        loop = asyncio.get_running_loop()
        if self._child is not None and self._child.returncode is None:
            ending = await self._child.ended()
            log.info("engine: worker %s: %s", self.pid, told(ending))
        if self._closing:
            return
        self._untrue = ""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        with theirs:
            self._child = Child()
            await self._child.start(theirs.fileno(), self._environment)
        self._transport, _ = await loop.create_connection(lambda: _Link(self), sock=ours)
        if self._closing:
            self._transport.abort()
            return
        settings = {**self._blueprint.settings, **self._footing.rung.settings}
        body = msgspec.msgpack.encode(msgspec.structs.replace(self._blueprint, settings=settings))
        self._transport.write(struct.pack("<I", len(body)) + body)

    def _send(self, command: frames.Command) -> None:
        """A worker that is not up has no streams and is told nothing about them."""
        if self._transport is not None and (self._up or isinstance(command, frames.Ping)):
            self._transport.write(frames.encode(command))

    def _hold(self, rid: int, paused: bool) -> None:
        """Pass on a pause, but let one on trial go on until it is cleared: all others wait for that."""
        if rid != self._quarantine.on_trial:
            self._send(frames.Pause(rid, paused))

    def _place(self, rid: int) -> None:
        generation = self._streams.place(rid)
        self.replayed += bool(generation.resume)
        self._send(frames.Submit(generation))
        if self._streams.paused(rid):
            self._hold(rid, True)

    def _put_back(self) -> None:
        """Give the worker all streams that it may have now: the harmless ones, and a suspect if none is on trial."""
        if not self._up:
            return
        suspects = self._quarantine.suspects
        for rid in self._streams.unplaced():
            if rid not in suspects and (not self._quarantine or self._streams.begun(rid)):
                self._place(rid)
        suspect = self._quarantine.next()
        if suspect is not None:
            self._quarantine.charge(self._streams.begun(suspect))
            self._place(suspect)

    def _hear(self, events: list[Event]) -> None:
        """Has the suspect on trial given what it owed?"""
        cleared = self._quarantine.hear(events)
        if cleared is not None:
            if self._streams.paused(cleared):
                self._send(frames.Pause(cleared, True))
            self._put_back()

    def _on_report(self, report: frames.Report) -> None:
        self._watchdog.heard(self._clock())
        match report:
            case frames.Step(events, stats):
                self.stats = stats
                self._streams.learn(stats)
                self._streams.deliver(events)
                if self._quarantine.on_trial is not None:
                    self._hear(events)
            case frames.Ready(info):
                self._info = info
                self._asked = self._clock()
                self._send(frames.Ping())
            case frames.Pong(now):
                if not self._up:
                    self._on_up(now)
            case frames.Broken(message, untrue):
                if untrue:
                    self._untrue = message  # other kernels may do better
                elif self._started is not None and not self._started.done():
                    self._started.set_exception(StartupError(message))
                else:
                    log.error("engine: %s", message)

    def _on_up(self, now: float) -> None:
        """The worker takes streams. `now`: on its clock."""
        self.clock_offset = offset(self._asked, now, self._clock())
        self._up_since = self._clock()
        self._up, self._back_soon, self._vain = True, False, 0
        if self._child is not None:
            self._child.came_up()
        if self._started is not None and not self._started.done():
            self._footing.stand()
            if self._footing.note:
                log.warning("engine: %s", self._footing.note)
            self._started.set_result(None)
        else:
            log.warning("engine: worker %s is up, %d streams go on", self.pid, len(self._streams))
        self._look()
        self._send(frames.Pins(list(self._pins)))
        self._put_back()

    def _look(self) -> None:
        """See to it that a worker with work gives signs of life, and come back in time."""
        if self._watch is not None:
            self._watch.cancel()
        verdict, seconds = self._watchdog.look(self._clock(), busy=len(self._streams) > 0)
        self._watch = asyncio.get_running_loop().call_later(seconds, self._look)
        if verdict is Verdict.PING:
            self._send(frames.Ping())
        elif verdict is Verdict.KILL and self._child is not None:
            log.error(
                "engine: worker %s has been silent for %.1f s; it is killed", self.pid, 2 * self._watchdog.timeout
            )
            self._child.kill()

    def _on_lost(self) -> None:
        """The worker is gone, for whatever reason."""
        if self._up and self._clock() - self._up_since > _STEADY:
            self._failures = 0
        self._vain = 0 if self._up else self._vain + 1
        self._up = self._back_soon = False
        self._transport = None
        if self._watch is not None:
            self._watch.cancel()
        self.stats = EngineStats(cells_total=self.stats.cells_total)
        if self._closing:
            return
        if self._started is not None and not self._started.done():
            self._burial = asyncio.get_running_loop().create_task(self._descend(self._started))
            return
        if self._info is None:
            return  # the first start failed and has been reported
        self._failures += 1
        self._back_soon = self._replay and self._failures == 1
        wait = backoff(self._failures)
        log.error("engine: worker %s is gone with %d streams; next start in %.1f s", self.pid, len(self._streams), wait)
        self._restart = asyncio.get_running_loop().call_later(wait, self._start_again)
        self._mourn()

    async def _descend(self, started: asyncio.Future[None]) -> None:
        """The first worker died before it was up: try one rung lower, or say why not."""
        assert self._child is not None
        ending = await self._child.ended(self._untrue)
        failure = "" if self._closing else self._footing.fall(ending)
        if not self._closing and not failure:
            log.warning("engine: %s; trying again without %s", told(ending), self._footing.rung.without)
            try:
                await self._launch()
            except OSError as error:
                failure = f"cannot start the engine: {error.strerror or error}"
        if failure and not started.done():
            started.set_exception(StartupError(failure))

    def _mourn(self) -> None:
        """Which of the dead worker's streams end with it?"""
        working = self._streams.displace()
        if not self._replay or self._vain >= _VAIN_STARTS:
            self.given_up += len(self._streams)
            self._quarantine.acquit()
            self._streams.fail_all("engine_failed", _DIED)
            return
        guilty = self._quarantine.crash(working)
        if guilty is not None:
            log.error("engine: generation %d was on trial when the worker died; it is given up", guilty)
            self.given_up += 1
            self._streams.deliver([Failed(guilty, "engine_failed", _GUILTY)])

    def _start_again(self) -> None:
        self.restarts += 1
        task = asyncio.get_running_loop().create_task(self._launch())
        task.add_done_callback(self._launched)

    def _launched(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("engine: cannot start the worker: %s", task.exception())
            self._on_lost()
