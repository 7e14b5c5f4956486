"""OC-35 to OC-37 through the relay: a client that leaves, and the upstream that must hear of it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from acceptance.asking import CHAT, COMP, Wire, dumps, on_loop
from acceptance.relay_scene import ALIAS, Got, relaying
from headrace.server.stream import StreamLimits
from server.socket_client import until
from upstreams import Play, Request, chat_events, stream, whole


def fin(wire: Wire) -> None:
    wire.close()


def rst(wire: Wire) -> None:
    wire.reset()


leaving = pytest.mark.parametrize("leave", [fin, rst])


async def five_texts(wire: Wire) -> None:
    assert (await wire.head())[0] == 200
    got = 0
    while got < 5:
        event = await wire.event()
        got += bool(event["choices"][0]["delta"].get("content"))


@leaving
@on_loop
async def test_oc_35_relay_disconnect_while_it_streams(leave: Callable[[Wire], None]) -> None:
    events = chat_events(["t "] * 2000)

    async with relaying(lambda _: stream(events[:6], end="stall")) as scene:
        there = scene.there["a"]
        before = there.cut
        wire = await scene.connect()
        await wire.chat(stream=True)
        await five_texts(wire)
        leave(wire)
        async with asyncio.timeout(0.5):
            await until(lambda: there.cut == before + 1)
        await scene.idle()
        assert scene.fleet.ends == [("a", "cancelled")]
        assert scene.app.metrics.open_streams == 0


@leaving
@on_loop
async def test_oc_36_relay_disconnect_before_the_first_text(leave: Callable[[Wire], None]) -> None:
    """Nothing is written in that time, so no write can fail: neither before the upstream's head nor after it."""
    for play in (Play([], "stall"), stream([], end="stall"), stream(chat_events([])[:1], end="stall")):
        async with relaying(lambda _: play) as scene:  # noqa: B023
            there = scene.there["a"]
            for number in range(1, 11):
                wire = await scene.connect()
                await wire.chat(stream=True)
                await until(lambda: len(there.asked(CHAT)) == number)  # noqa: B023
                leave(wire)
                async with asyncio.timeout(1):
                    await until(lambda: there.cut == number)  # noqa: B023
            await scene.idle()
            assert scene.fleet.ends == [("a", "cancelled")] * 10


@leaving
@on_loop
async def test_oc_36_relay_disconnect_from_a_whole_answer(leave: Callable[[Wire], None]) -> None:
    async with relaying(lambda _: Play([], "stall")) as scene:
        wire = await scene.connect()
        await wire.chat()
        await until(lambda: len(scene.there["a"].asked(CHAT)) == 1)
        leave(wire)
        async with asyncio.timeout(1):
            await until(lambda: scene.there["a"].cut == 1)
        await scene.idle()


@on_loop
async def test_oc_37_relay_disconnect_before_anything() -> None:
    """Wherever in its way the request is: before its upstream has a connection, while one is made, after it."""
    async with relaying(lambda _: stream(chat_events(["x"] * 3))) as scene:
        tasks = len(asyncio.all_tasks())
        for number in range(100):
            wire = await scene.connect()
            await wire.chat(stream=True)
            for _ in range(number % 12):
                await asyncio.sleep(0)
            wire.reset()
        await scene.idle()
        (await scene.ask()).check_whole("xxx")
        await scene.idle()
        there = scene.there["a"]
        await until(lambda: len(asyncio.all_tasks()) - there.open - tasks <= 5)


@leaving
@on_loop
async def test_oc_35_relay_disconnect_while_it_is_continued(leave: Callable[[Wire], None]) -> None:
    """The client leaves while the second engine is asked how it reads the prompt."""
    gate = asyncio.Event()
    events = chat_events(["a", "b", "c", "d"])
    first = stream(events[:3], end="close", gate=gate, gated=4)

    rendered = asyncio.Event()

    def second(_: Request) -> Play:
        return Play(whole({"tokens": [1], "max_model_len": 99}).pieces, gate=rendered)

    async with relaying(lambda _: first, second) as scene:
        wire = await scene.connect()
        await wire.chat(stream=True)
        await wire.head()
        while not (await wire.event())["choices"][0]["delta"].get("content"):
            pass
        gate.set()
        await until(lambda: bool(scene.there["b"].asked("/tokenize")))
        leave(wire)
        await until(lambda: not scene.app.running)  # it does not wait for the other server
        rendered.set()
        await scene.idle()
        assert scene.there["b"].asked(COMP) == []
        assert [end for _, end in scene.fleet.ends] == ["failed", "cancelled"]


# A reader that is slow, a stream that is silent ───────────────────────────────────────────────────────────────────────


@on_loop
async def test_a_slow_reader_holds_the_upstream_and_loses_nothing() -> None:
    pieces = [f"{i:06d}" + "x" * 4000 for i in range(4000)]  # 16 MB: more than all sockets on the way hold
    play = stream(chat_events(pieces))
    async with relaying(lambda _: play, limits=StreamLimits(max_pending_events=16)) as scene:
        wire = await scene.connect()
        await wire.chat(stream=True)
        await wire.head()
        server = scene.fleet.engines["a"].server
        await until(lambda: any(answer.paused for answer in server.ledger.answers.values()))
        (answer,) = server.ledger.answers.values()
        heard = answer.heard
        for _ in range(2000):
            await asyncio.sleep(0)
        assert answer.heard == heard, "nothing is read for a reader that takes nothing"
        body = bytearray()
        while chunk := await wire.chunk():
            body += chunk
        Got(200, bytes(body)).check_whole("".join(pieces))


@on_loop
async def test_a_silent_stream_has_heartbeats() -> None:
    limits = StreamLimits(header_hold_s=0.0, heartbeat_s=0.0)
    gate = asyncio.Event()
    events = chat_events(["a", "b"])
    async with relaying(lambda _: stream(events, gate=gate, gated=2), limits=limits) as scene:
        wire = await scene.connect()
        await wire.chat(stream=True)
        assert (await wire.head())[0] == 200
        assert (await wire.block()).startswith(b":")
        gate.set()
        assert [event["choices"][0]["delta"].get("content") for event in (await wire.rest())[:-1]] == [
            "",
            "a",
            "b",
            None,
        ]


@on_loop
async def test_shutting_down_lets_relayed_streams_finish() -> None:
    gate = asyncio.Event()
    events = chat_events(["a", "b"])
    async with relaying(lambda _: stream(events, gate=gate, gated=3)) as scene:
        wire = await scene.connect()
        await wire.chat(stream=True)
        await wire.head()
        scene.app.drain()
        gate.set()
        assert (await wire.rest())[-1] == "[DONE]"
        await scene.app.quiet()


@on_loop
async def test_the_connection_of_a_complete_answer_is_used_again() -> None:
    async with relaying(lambda _: stream(chat_events(["a"]))) as scene:
        for _ in range(20):
            (await scene.ask()).check_whole("a")
        assert scene.there["a"].connections == 1


@on_loop
async def test_many_at_once() -> None:
    async with relaying(lambda _: stream(chat_events(["x"] * 30))) as scene:
        wires = [await scene.connect() for _ in range(50)]
        for wire in wires:
            await wire.request("POST", CHAT, dumps({"model": ALIAS, "stream": True, "messages": []}))
        for wire in wires:
            await wire.head()
            body = b""
            while chunk := await wire.chunk():
                body += chunk
            Got(200, body).check_whole("x" * 30)
        assert scene.there["a"].connections <= 50
