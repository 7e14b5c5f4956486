"""The real program's worker dies or hangs under live streams: they stop for a moment and end as if nothing had been.

The last bits of a logit depend on the batch and on the order of its sequence's cells in the pool, so that any two runs
of a busy engine may fall differently in a close call. Here they are the same, for a replay as for the first run: no
step is as long as 64 tokens, from where on llama.cpp's attention sums up another way; each run begins with an empty
pool, no two answers are equal and all stay cached, so that nothing fills the cells of one that ended. No call is close:
greedy choices lead by 0.08, and no random number of a draw is within 0.05 of where another token would begin.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from acceptance.asking import Answer, on_loop
from acceptance.tiny import Tiny


def requests(server: Tiny) -> list[dict[str, Any]]:
    """Eight streams: greedy and seeded, with stop strings, penalties, two choices."""
    endless = {str(token): -100 for token in server.eog}
    common = {"stream": True, "stream_options": {"include_usage": True}, "logit_bias": endless}
    greedy = {**common, "temperature": 0, "max_tokens": 36}
    seeded = {**common, "temperature": 0.5, "top_p": 0.7, "max_tokens": 24}
    return [
        {**greedy, "prompt": "1 2 3 4", "stop": ["17", "zebra"]},
        {**greedy, "prompt": "2, 4, 6,"},
        {**greedy, "prompt": "A B C D", "frequency_penalty": 0.2, "repetition_penalty": 1.02, "max_tokens": 30},
        {**seeded, "prompt": "Once upon a time", "seed": 3},
        {**seeded, "prompt": "Once upon a time", "seed": 21, "n": 2, "stop": ["\n\n\n", "tiger"]},
        {**seeded, "prompt": "Once upon a time", "seed": 12},
        {**seeded, "prompt": "Water boils at", "seed": 20},
        {**seeded, "prompt": "Water boils at", "seed": 7},
    ]


SETTINGS = {
    "engine_idle_cells": 8192,
    "engine_step_timeout_s": 3.0,
    "optimizations_speculation": False,
    "optimizations_tiers": False,
    "optimizations_mined_templates": False,
}


def gist(answer: Answer) -> list[Any]:
    """What a reader has of an answer in the end."""
    assert answer.status == 200, answer
    assert answer.done
    assert len({chunk["id"] for chunk in answer.chunks}) == 1
    finishes = [c["finish_reason"] for i in (0, 1) for c in answer.choices(i) if c.get("finish_reason")]
    return [answer.cat(0), answer.cat(1), finishes, answer.usage["completion_tokens"], answer.usage["prompt_tokens"]]


def worker(server: Tiny) -> int:
    """The process id of its engine, 0 between two of them."""
    tasks = Path(f"/proc/{server.process.pid}/task")
    children = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    assert len(children) <= 1, children
    return children[0] if children else 0


async def fresh(server: Tiny) -> int:
    """A worker that has computed nothing yet; its process id."""
    before = worker(server)
    os.kill(before, signal.SIGKILL)
    while worker(server) in (before, 0):
        assert (await server.get("/health")).status == 200
    while (await server.get("/readyz")).status != 200:
        pass
    assert await server.control()  # it leaves nothing cached
    return worker(server)


async def everybody(server: Tiny, trouble: Callable[[], None] | None = None) -> list[list[Any]]:
    """All requests at once; `trouble` comes when every stream is under way and none is over."""
    asked = requests(server)
    loop = asyncio.get_running_loop()
    begun = [loop.create_future() for _ in asked]

    async def one(fields: dict[str, Any], first: asyncio.Future[None]) -> list[Any]:
        assert server._client is not None
        body = b""
        async with server._client.stream("POST", "/v1/completions", json={"model": server.model, **fields}) as response:
            async for part in response.aiter_bytes():
                body += part
                if body.count(b"data: ") >= 4 and not first.done():
                    first.set_result(None)
            return gist(Answer(response.status_code, response.headers, body))

    tasks = [loop.create_task(one(fields, first)) for fields, first in zip(asked, begun, strict=True)]
    await asyncio.gather(*begun)
    if trouble is not None:
        assert not any(task.done() for task in tasks)
        trouble()
    return await asyncio.gather(*tasks)


@on_loop
async def _survive(server: Tiny) -> None:
    async with server.calls():
        expected = await everybody(server)
        assert all(text for text, *_ in expected)
        assert [end[0] for _, _, end, *_ in expected] == ["stop"] + ["length"] * 7
        for trouble in (signal.SIGKILL, signal.SIGSTOP):
            before = await fresh(server)
            assert await everybody(server, lambda: os.kill(before, trouble)) == expected  # noqa: B023 - called at once
            assert worker(server) != before
            await server.alive()
        assert re.findall(r"is gone with (\d+) streams", server.log) == ["0", "8"] * 2
        assert server.log.count("has been silent for 6.0 s") == 1


def test_killed_and_stopped_under_eight_streams(tiny: Callable[..., Tiny]) -> None:
    _survive(tiny(**SETTINGS))
