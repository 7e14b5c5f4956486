"""A Headrace in front of a Headrace: its answers pass, and what another server began it goes on with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from acceptance.asking import CHAT, COMP, on_loop
from acceptance.relay_scene import Got, relaying
from acceptance.scene import MODEL, scripted
from headrace.gateway.upstream import Upstream
from upstreams import Play, chat_events, completion_events, stream

PIECES = ["Gr\u00fcn", " \U0001f525", "\u2028", " end"]
TRUTH = "".join(PIECES)


def rest(prompt: Sequence[int]) -> list[list[bytes]]:
    """What is left of the truth after what the prompt ends with, a character a step. A token is a byte."""
    text = bytes(token for token in prompt if token < 256)
    told = next(n for n in range(len(TRUTH), -1, -1) if text.endswith(TRUTH[:n].encode()))
    return [[character.encode()] for character in TRUTH[told:]]


@on_loop
async def test_its_answers_pass() -> None:
    async with scripted(rest) as behind, relaying(lambda _: Play([], "close")) as scene:
        another = Upstream("x", behind.url, MODEL, time.monotonic)
        await another.start()
        await another.warm()
        assert another.flavour == "headrace"
        assert await another.probe()
        scene.fleet.engines["x"] = another
        scene.there = {**scene.there, "x": scene.there["a"]}
        for path in (CHAT, COMP):
            got = await scene.ask(path, stream_options={"include_usage": True}, max_tokens=50)
            got.check_whole(TRUTH)
            assert got.chunks[-1]["usage"]["completion_tokens"] > len(TRUTH)
            whole = await (scene.chat() if path == CHAT else scene.comp(max_tokens=50))
            assert whole.text == TRUTH
        await another.close()
        del scene.fleet.engines["x"]


@on_loop
async def test_it_goes_on_with_what_another_server_began() -> None:
    for path, events in ((CHAT, chat_events(PIECES, usage=False)), (COMP, completion_events(PIECES, usage=False))):
        for pieces in range(1, len(PIECES)):
            gate, told = asyncio.Event(), "".join(PIECES[:pieces])
            begun = events[: pieces + (path == CHAT)]
            first = stream(begun, end="close", gate=gate, gated=1 + len(begun))
            async with scripted(rest) as behind, relaying(lambda _: first) as scene:  # noqa: B023
                another = Upstream("x", behind.url, MODEL, time.monotonic)
                await another.start()
                scene.fleet.engines["x"] = another
                wire = await scene.connect()
                await (wire.chat if path == CHAT else wire.comp)(stream=True, max_tokens=50)
                assert (await wire.head())[0] == 200
                body = b""
                while Got(200, body or b": \n\n").text != told:
                    body += await wire.chunk()
                gate.set()  # it dies when its text is out
                while chunk := await wire.chunk():
                    body += chunk
                Got(200, body).check_whole(TRUTH)
                assert bytes(token for token in behind.scripted.asked[-1] if token < 256).endswith(told.encode())
                await another.close()
                del scene.fleet.engines["x"]
                assert scene.fleet.ends == [("a", "failed"), ("x", "ok")]
