"""OC-35 to OC-37: clients that leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from acceptance.asking import Wire, on_loop
from acceptance.scene import CONTROL_IDS, CONTROL_TEXT, Scene, scripted
from server.socket_client import until

LONG = [[b"t "]] * 2000


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """What stands inside is done in that time, by far."""
    async with asyncio.timeout(seconds):
        yield


def cancelled(scene: Scene) -> list[dict[str, Any]]:
    """The lines in the access log of those who left."""
    return [line for line in scene.access if line["outcome"] == "cancelled"]


async def check_left(scene: Scene, number: int) -> None:
    """That many requests ended as cancelled: each has a line in the log, none has anything else there."""
    await until(lambda: len(cancelled(scene)) >= number)  # a line is the last thing that is done for a request
    lines = cancelled(scene)
    assert len(lines) == number
    assert len({line["request_id"] for line in lines}) == number
    loud = [record for record in scene.log if record.levelno > logging.INFO or record.exc_info]
    assert not loud, [record.getMessage() for record in loud]
    series = await scene.metrics()
    route = "/v1/chat/completions"
    assert series.get(f'headrace_requests_total{{outcome="cancelled",route="{route}"}}', 0) == number


def fin(wire: Wire) -> None:
    wire.close()


def rst(wire: Wire) -> None:
    wire.reset()


# OC-35. RST_STREAM comes with HTTP/2. ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("leave", [fin, rst])
@on_loop
async def test_oc_35_disconnect_while_decoding(leave: Callable[[Wire], None]) -> None:
    async with scripted(LONG, max_running=1, shut=True) as scene:
        wire = await scene.connect()
        await wire.chat(stream=True, max_tokens=2000)
        for i in range(5):
            scene.gate.allow(1)
            if i == 0:
                await wire.head()
            assert (await wire.event())["choices"][0]["delta"]["content"] == "t "
        await until(lambda: scene.gate.standing)  # the sixth step has begun
        leave(wire)
        control = asyncio.ensure_future(scene.control())
        async with within(0.5):
            await until(lambda: scene.scripted.aborts == 1)  # although the gate is shut: no step had to end for it
        async with within(1):
            await until(lambda: list(scene.scripted.current[0].tokens) == CONTROL_IDS)  # it has the place
        assert scene.scripted.produced == 5
        # The control request needs its own four steps and no other.
        scene.gate.allow(4)
        assert await control == CONTROL_TEXT
        assert scene.scripted.produced == 5 + 4 < 60
        async with within(1):
            await scene.idle()
        await check_left(scene, 1)
        scene.gate.open()
        await scene.alive()


# OC-36 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

CHUNK = 64
CHUNKS = 40
ROUNDS = 50


@on_loop
async def test_oc_36_disconnect_during_prefill() -> None:
    sizes = {"prefill_chunk": CHUNK, "prefill_chunk_busy": CHUNK}
    async with scripted(LONG, max_running=1, limits=sizes) as scene:
        content = "".join(chr(ord("a") + i % 26) for i in range(CHUNKS * CHUNK - 19))
        messages = [{"role": "user", "content": content}]
        await scene.alive()
        await scene.idle()
        start = scene.stats
        for number in range(1, ROUNDS + 1):
            before = scene.scripted.prefilled
            scene.gate.shut()
            wire = await scene.connect()
            await wire.chat(stream=True, messages=messages)
            scene.gate.allow(2)
            await until(lambda: scene.scripted.prefilled == before + 2 and scene.gate.standing)  # noqa: B023
            wire.reset()
            control = asyncio.ensure_future(scene.control())
            await until(lambda: len(cancelled(scene)) == number)  # noqa: B023 - it is over, and the gate is shut
            scene.gate.open()
            async with within(1):
                assert await control == CONTROL_TEXT
            assert scene.scripted.prefilled - before <= 2 + 2
        await scene.idle()
        # Cells that keep finished prompts are free as well: they are given up on demand. Here there are not even more.
        free = scene.stats.cells_total - scene.stats.cells_running
        assert free == start.cells_total - start.cells_running == start.cells_total
        assert scene.stats.cells_cached == start.cells_cached
        assert scene.stats.slots_free == start.slots_free
        await check_left(scene, ROUNDS)

        # What was begun fifty times is not in the cache.
        answer = await scene.chat(messages=messages, max_tokens=1)
        assert answer.usage["prompt_tokens"] == CHUNKS * CHUNK
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert len(scene.scripted.prompts[-1]) == CHUNKS * CHUNK
        await scene.alive()


# OC-37 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def counted(scene: Scene) -> dict[str, Any]:
    """What must be as it was. (Concurrency counters of keys come with the gateway.)"""
    stats = scene.stats
    return {
        "live": scene.app.running,
        "streams": scene.app.metrics.open_streams,
        "running": stats.running,
        "waiting": stats.waiting,
        "held": stats.cells_running,
    }


@on_loop
async def test_oc_37_disconnect_before_the_first_byte() -> None:
    async with scripted(LONG, max_running=4) as scene:
        await scene.alive()
        await scene.idle()
        tasks, start = len(asyncio.all_tasks()), counted(scene)
        for _ in range(200):
            wire = await scene.connect()
            await wire.chat(stream=True)
            wire.reset()
        await scene.alive()
        await scene.idle()
        seen = sum(line["path"] == "/v1/chat/completions" for line in scene.access)
        assert seen > 150, "the server did not see enough of them"
        await check_left(scene, seen)
        assert counted(scene) == start
        assert abs(len(asyncio.all_tasks()) - tasks) <= 5


@on_loop
async def test_oc_37_disconnect_while_queued() -> None:
    async with scripted(LONG, max_running=1, shut=True) as scene:
        long = await scene.connect()
        await long.chat(stream=True)
        scene.gate.allow(1)
        assert (await long.head())[0] == 200
        await long.event()
        tasks, start = len(asyncio.all_tasks()), counted(scene)
        for number in range(50):
            wire = await scene.connect()
            await wire.chat(stream=True)
            if number % 2:
                await until(lambda: scene.app.running == 2)  # else at once
            wire.reset()
            await until(lambda: scene.app.running == 1)
        assert len(asyncio.all_tasks()) - tasks <= 5
        await check_left(scene, 50)
        scene.gate.allow(1)
        await long.event()
        assert counted(scene) == {**start, "held": start["held"] + 1}, "there is the long one, a token longer"
        assert len(scene.scripted.prompts) == 1, "none of the fifty was computed"
        long.reset()
        scene.gate.open()
        await scene.idle()
        await scene.alive()
        assert scene.stats.cells_running == 0
