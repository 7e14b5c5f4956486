"""Two engines of ours behind one name: one of their processes is killed under live streams, and no reader notices."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from acceptance.asking import Answer, on_loop

CONFIG = """
[server]
port = 0

[optimizations]
replay = {replay}

[engines.a]
kind = "llama"
model = "scripted:60"

[engines.b]
kind = "llama"
model = "scripted:60"

[aliases.chat]
engines = {{a = 1, b = 1}}
"""
STREAMS = 8
TOKENS = 60
WHOLE = "".join(f"{n} " for n in range(1, TOKENS + 1))


@contextmanager
def serving(folder: Path, *, replay: bool) -> Iterator[tuple[str, int]]:
    """(URL, process id) of a server."""
    (folder / "config.toml").write_text(CONFIG.format(replay=str(replay).lower()))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", "--no-measure", "--config", str(folder / "config.toml")],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**environ, "XDG_CONFIG_HOME": str(folder)},
        )
    assert process.stdout is not None
    try:
        url = next(
            (found[1] for line in process.stdout if (found := re.search(r"Chat page\s+(http://\S+?)/?$", line))), ""
        )
        assert url, (folder / "stderr").read_text()
        yield url, process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    assert "Traceback" not in (folder / "stderr").read_text()


def workers(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def counted(figures: str, name: str) -> int:
    found = re.search(rf"^headrace_{name} (\S+)$", figures, re.M)
    assert found, name
    return int(float(found[1]))


@pytest.mark.parametrize("replay", [True, False], ids=["the worker goes on", "the other engine goes on"])
@on_loop
async def test_a_killed_worker_costs_no_stream_a_token(replay: bool, tmp_path: Path) -> None:
    with serving(tmp_path, replay=replay) as (url, pid):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            loop = asyncio.get_running_loop()
            begun = [loop.create_future() for _ in range(STREAMS)]

            async def one(n: int) -> Answer:
                body, fields = b"", {"model": "chat", "prompt": f"count {n}", "max_tokens": TOKENS, "stream": True}
                async with client.stream("POST", "/v1/completions", json=fields) as response:
                    async for part in response.aiter_bytes():
                        body += part
                        if body.count(b"data: ") >= 5 and not begun[n].done():
                            begun[n].set_result(None)
                    return Answer(response.status_code, response.headers, body)

            tasks = [loop.create_task(one(n)) for n in range(STREAMS)]
            await asyncio.gather(*begun)
            assert not any(task.done() for task in tasks)
            both = workers(pid)
            assert len(both) == 2
            os.kill(both[0], signal.SIGKILL)
            # Whoever asks meanwhile is answered: by the other one.
            fields = {"model": "chat", "prompt": "and now", "max_tokens": 3}
            asked = [await client.post("/v1/completions", json=fields) for _ in range(6)]
            assert [(a.status_code, a.json()["choices"][0]["text"]) for a in asked] == [(200, "1 2 3 ")] * 6
            for answer in await asyncio.gather(*tasks):
                assert (answer.status, answer.done, answer.cat(0)) == (200, True, WHOLE)
                assert len({chunk["id"] for chunk in answer.chunks}) == 1
            figures = (await client.get("/metrics")).text
            continued, failovers = counted(figures, "continued_total"), counted(figures, "failovers_total")
            failed = sum(counted(figures, rf'attempts_total{{end="failed",engine="{name}"}}') for name in "ab")
            assert failed == continued + failovers, "each was made good, once"
            assert (continued > 0) is not replay
            assert (await client.get("/readyz")).json()["models"] == ["chat"]
