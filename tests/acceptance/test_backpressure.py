"""OC-38, OC-39 and OC-41: readers that stop, long prompts beside running streams, streams that only wait."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from acceptance.asking import Asking, Wire, on_loop
from acceptance.process import Process
from acceptance.scene import Scene, scripted
from headrace.core.events import Delta, Event
from headrace.core.limits import Limits
from headrace.core.plan import Chunk, StepResult
from headrace.core.request import Generation, Sampling
from headrace.engines.base import EngineStats
from headrace.engines.stepper import Stepper
from headrace.server.stream import StreamLimits
from headrace.testing import ManualClock, ScriptedEngine

GREEDY = Sampling(temperature=0.0)

# OC-38. One stream beside another in the same connection comes with HTTP/2. ───────────────────────────────────────────

PIECE = b"x" * 2048
MANY = 50 * 2**20 // len(PIECE)
BRIEF = 600


def stalling(tokens: int = MANY, **options: Any) -> contextlib.AbstractAsyncContextManager[Scene]:
    """A server that says 50 MB to everybody, as fast as it can."""
    return scripted([[PIECE]] * tokens, n_ctx=2 * MANY, cells=4 * MANY, record=False, **options)


async def stalled(scene: Scene) -> Wire:
    """A connection whose client has read the headers and reads no more."""
    wire = await scene.connect()
    wire.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    await wire.chat(stream=True, max_tokens=MANY)
    assert (await wire.head())[0] == 200
    return wire


async def read_on(scene: Scene) -> None:
    """A second stream, read to its end."""
    answer = await scene.chat(stream=True, max_tokens=BRIEF)
    assert answer.status == 200
    assert answer.done
    assert len(answer.text) == BRIEF * len(PIECE)


async def steps_of(scene: Scene) -> tuple[int, int]:
    """Steps and tokens that a second stream took."""
    steps, produced = scene.scripted.steps, scene.scripted.produced
    await read_on(scene)
    return scene.scripted.steps - steps, scene.scripted.produced - produced


@on_loop
async def test_oc_38_a_reader_that_stops() -> None:
    async with stalling() as scene:
        await read_on(scene)
        await scene.idle()
        alone = await steps_of(scene)
        tasks, before = len(asyncio.all_tasks()), Process().memory

        wire = await stalled(scene)
        first = scene.scripted.produced
        # Once sockets and mailbox are full, the first stream draws nothing and the second one is as quick as alone,
        # counted in the engine's steps.
        runs: list[tuple[int, int]] = []
        while len(runs) < 20 and runs[-1:] != [alone]:
            runs.append(await steps_of(scene))
        assert runs[-1][0] <= 1.2 * alone[0]
        assert runs[-1] == alone
        assert (scene.scripted.produced - first - len(runs) * BRIEF) * len(PIECE) < 16 * 2**20
        assert Process().memory - before < 16 * 2**20
        assert scene.app.running == 1, "it is paused, not ended"

        wire.reset()
        async with asyncio.timeout(2):
            await scene.idle()
        assert len(asyncio.all_tasks()) <= tasks
        assert scene.stats.cells_running == 0
        assert [line["stream"] for line in scene.access if line["outcome"] == "cancelled"] == [True]
        await scene.alive()


@on_loop
async def test_oc_38_a_reader_that_never_comes_back() -> None:
    """After `server.write_timeout_s` it is dropped."""
    async with stalling(stream_limits=StreamLimits(write_timeout_s=0.5)) as scene:
        await stalled(scene)
        await scene.idle()  # without the client's doing
        assert scene.stats.cells_running == 0
        await scene.alive()


@on_loop
async def test_oc_38_a_reader_that_goes_on() -> None:
    """What was held back comes whole."""
    tokens = 6000  # more than sockets hold
    async with stalling(tokens) as scene:
        wire = await stalled(scene)
        for _ in range(5):
            await read_on(scene)
        text = 0
        while (event := await wire.event()) != "[DONE]":
            text += len(event["choices"][0]["delta"].get("content", ""))
        assert text == tokens * len(PIECE)
        await scene.idle()


# OC-39: the real stepper in virtual time ──────────────────────────────────────────────────────────────────────────────

CHUNK = Limits().prefill_chunk_busy
A, B = 1, 2


class PricedEngine(ScriptedEngine):
    """A step takes 10 ms, and 100 ms more for each `CHUNK` prompt tokens in it: a large chunk is not a cheap one."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__([[b"x"]] * 1000, clock=clock, n_ctx=8192)
        self.clock = clock

    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        prompt = sum(len(c.tokens) for c in chunks if c.draw is None or c.draw.position == c.draw.prompt)
        self.clock.advance(0.01 + 0.1 * prompt / CHUNK)
        return super().step(chunks)


class Bench:
    """A stepper that is stepped here, and what it delivered when."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.engine = PricedEngine(self.clock)
        self.told: list[tuple[float, Event]] = []
        self.stepper = Stepper(self.engine, Limits(max_running=2), self.clock, self._deliver)

    def _deliver(self, events: list[Event], stats: EngineStats) -> None:
        self.told += [(self.clock(), event) for event in events]

    def submit(self, rid: int, prompt: list[int], max_tokens: int) -> None:
        self.stepper.scheduler.submit(Generation(rid, prompt, max_tokens, sampling=GREEDY), self.clock())

    def step(self) -> None:
        plan = self.stepper.scheduler.plan(self.clock())
        assert plan is not None
        self.stepper.step(plan)

    def texts(self, rid: int) -> list[float]:
        """When each text of a generation came."""
        return [at for at, event in self.told if isinstance(event, Delta) and event.rid == rid]


LONG = [i % 200 for i in range(30 * CHUNK)]


def test_oc_39_a_long_prompt_does_not_stop_a_running_stream() -> None:
    alone = Bench()
    alone.submit(B, LONG, 1)
    while not alone.texts(B):
        alone.step()

    bench = Bench()
    bench.submit(A, [1, 2, 3], 200)
    while len(bench.texts(A)) < 20:
        bench.step()
    admitted, started = bench.clock(), bench.engine.steps
    bench.submit(B, LONG, 50)
    while not bench.texts(B):
        bench.step()
    steps = bench.engine.batches[started:]

    # Each step holds A's one token and one chunk of B: A gets a token between any two chunks, and B progresses in
    # every step, which is more often than every second one.
    assert len(steps) == 30
    assert all(tokens == [1, CHUNK] for tokens in steps)
    during = [at for at in bench.texts(A) if at >= admitted]
    assert len(during) == 31, "the twentieth token and one for each of B's chunks"
    assert max(b - a for a, b in pairwise(during)) <= 0.25
    assert bench.texts(B)[0] - admitted <= 2 * alone.texts(B)[0]

    # Afterwards both are read, in every step.
    for _ in range(20):
        bench.step()
    assert bench.engine.batches[-20:] == [[1, 1]] * 20


# OC-41: a server of its own with 2,000 streams ────────────────────────────────────────────────────────────────────────

STREAMS = 2000
SOFT = 1024
PROGRAM = Path(__file__).with_name("idle_server.py")


class IdleServer(Asking):
    """`idle_server.py` as a process of its own."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        self.port = int(child.stdout.readline())
        super().__init__(f"http://127.0.0.1:{self.port}", "idle", None)
        self.process = Process(child.pid)
        self._child = child

    async def hold(self) -> Wire:
        """A stream that only waits, its head read."""
        wire = await Wire.open(self.port, self.model, None)
        await wire.chat(stream=True, messages=[{"role": "user", "content": "?"}])
        status, _ = await wire.head()
        assert status == 200
        return wire

    async def alive(self) -> None:
        answer = await self.chat()
        assert answer.status == 200
        assert answer.text == "ok"

    def end(self) -> str:
        """End it; what it had to say."""
        self._child.terminate()
        _, said = self._child.communicate(timeout=20)
        assert self._child.returncode == 0, said
        return said


@contextlib.contextmanager
def idle_server(ulimit: str) -> Iterator[IdleServer]:
    """With limits on open files, as the shell sets them."""
    command = ["sh", "-c", f'{ulimit} && exec "$0" "$1"', sys.executable, str(PROGRAM)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield IdleServer(child)
        finally:
            child.kill()


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """The client needs a file for each stream as well."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@pytest.mark.skipif(HARD != resource.RLIM_INFINITY and HARD < STREAMS + 500, reason=f"the hard limit here is {HARD}")
@on_loop
async def test_oc_41_thousands_of_streams_that_only_wait() -> None:
    with many_files(), idle_server(f"ulimit -Sn {SOFT}") as server:
        await _thousands(server)
        assert "ulimit" not in server.end()


async def _thousands(server: IdleServer) -> None:
    process = server.process
    assert process.file_limit > SOFT, "the soft limit is raised to the hard one"
    files = process.files
    async with server.calls():
        await server.alive()
        memory = process.memory
        streams: list[Wire] = []
        for _ in range(STREAMS // 100):
            streams += await asyncio.gather(*(server.hold() for _ in range(100)))
        assert process.files >= files + STREAMS
        await server.alive()

        # From heartbeat to heartbeat of the stream that came last: within that time each of the others has its own.
        last = streams[-1]
        assert await last.block() == b": hb"
        clock, cpu = time.monotonic(), process.cpu_s
        assert await last.block() == b": hb"
        assert (process.cpu_s - cpu) / (time.monotonic() - clock) < 0.3
        assert (process.memory - memory) / STREAMS < 64 * 1024

        for stream in streams:
            stream.close()
        async with asyncio.timeout(20):
            while process.files > files + 5:
                await server.alive()


def test_oc_41_a_limit_that_cannot_be_raised_is_told_once() -> None:
    with idle_server(f"ulimit -n {SOFT}") as server:
        assert server.process.file_limit == SOFT
        said = server.end()
    assert said.count(str(SOFT)) == 1, said
