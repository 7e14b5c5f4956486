from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from headrace_bench.client.golden import SCRIPTS
from headrace_bench.client.request import Client
from headrace_bench.client.script import delta, ending, even, stream
from headrace_bench.client.scripted import Pacer, Scripted, Writes
from headrace_bench.client.stamps import heard
from headrace_bench.client.target import Target, check
from headrace_bench.fault import Fault
from headrace_bench.load.schedule import Planned
from headrace_bench.record import Record


def on(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test, 20))


async def ask(url: str, model: str, content: str = "hi", count: int = 1, **fields: Any) -> list[Record]:
    client = Client(Target(url, model, **fields), time.monotonic)
    plan = Planned(index=0, at=None, messages=(), max_tokens=1, prompt_tokens=1)
    try:
        return await asyncio.gather(
            *(client.send(plan, [{"role": "user", "content": content}], True) for _ in range(count))
        )
    finally:
        await client.close()


def test_a_pacer_calls_in_order_of_time_and_never_early() -> None:
    async def test() -> None:
        pacer, called = Pacer(), list[tuple[float, float]]()
        now = time.monotonic()
        for delay in (0.02, 0.004, 0.0, 0.004, 0.011):
            pacer.at(now + delay, lambda due=now + delay: called.append((due, time.monotonic())))  # type: ignore[misc]
        await asyncio.sleep(0.06)
        assert [due for due, _ in called] == sorted(now + delay for delay in (0.02, 0.004, 0.0, 0.004, 0.011))
        assert all(at >= due for due, at in called)

    on(test())


def test_a_script_by_model_by_message_and_by_name() -> None:
    async def test() -> None:
        async with Scripted({"s": stream((0.0, delta(content="by script") + ending(2)))}) as server:
            assert [record.text for record in await ask(server.url, "s")] == ["by script"]
            assert [record.text for record in await ask(server.url, "any", "s")] == ["by script"]
            assert [record.text for record in await ask(server.url, "even:1:1:2")] == ["word word "]
            assert [record.text for record in await ask(server.url, "any", "even:1:1:1")] == ["word "]
            assert [record.text for record in await ask(server.url, "even:1:1:2", "even:1:1:1")] == ["word word "]
            assert [record.text for record in await ask(server.url, "scripted")] == ["word "], "a gateway's own request"
            unknown = (await ask(server.url, "any"))[0]
            assert (unknown.outcome, unknown.status) == ("http", 404)
            assert b'"model":"s"' in server.requests[0]

    on(test())


@pytest.mark.parametrize("spin_s", [0.0, 0.002])
def test_stamps_in_the_text_are_those_of_its_writes(spin_s: float) -> None:
    async def test() -> None:
        async with Scripted({}, spin_s=spin_s) as server:
            before = time.monotonic()
            record = (await ask(server.url, "any", "stamped:20:10:3"))[0]
            told = heard(record, 0.0, 3)
            assert (told.lost, told.doubled, told.foreign) == (0, 0, 0)
            assert told.asked is not None
            assert before < told.asked < told.tokens[0].wrote - 0.0199
            for n, token in enumerate(told.tokens):
                assert token.wrote >= told.asked + 0.02 + 0.01 * n - 1e-6, "never early"
                assert token.wrote <= token.came

    on(test())


def test_the_log_of_real_times() -> None:
    async def test() -> None:
        async with Scripted({"s": stream((0.01, delta(content="a")), (0.03, ending(1)))}) as server:
            before = time.monotonic()
            record = (await ask(server.url, "s"))[0]
            log = server.writes[int(record.request_id or 0)]
            assert record.sent is not None
            assert before < log.asked <= log.at[0] <= log.at[1] <= log.at[2]
            assert log.at[1] - log.asked >= 0.01
            assert log.at[2] - log.asked >= 0.03
            # The server stamps before it writes, the client after it has read.
            assert log.at[1] <= record.chunks[0].at
            assert log.at[2] <= (record.done or 0.0)
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
            writer.write(b"GET /writes/1 HTTP/1.1\r\nConnection: close\r\n\r\n")
            body = (await reader.read()).partition(b"\r\n\r\n")[2]
            writer.close()
            assert msgspec.json.decode(body, type=Writes) == log

    on(test())


def test_a_stall_holds_all_and_then_none() -> None:
    async def test() -> None:
        async with Scripted({"s": stream((0.0, delta(content="a") + ending(1)), stalls=0.1)}) as server:
            first = await ask(server.url, "s", count=3)
            base = server.writes[1].at[0]
            assert base - server.writes[1].asked >= 0.1
            assert all(abs(server.writes[n].at[0] - base) < 0.05 for n in (2, 3))
            assert all(record.outcome == "ok" for record in first)
            await ask(server.url, "s")
            assert server.writes[4].at[0] - server.writes[4].asked < 0.1
            await ask(server.url, "s#2")  # by another name it is another stall
            assert server.writes[5].at[0] - server.writes[5].asked >= 0.1

    on(test())


def test_connections_are_kept_unless_the_client_will_not() -> None:
    async def test() -> None:
        async with Scripted({"e": even(0.0, 0.0, 1)}) as server:
            client = Client(Target(server.url, "e"), time.monotonic)
            plan = Planned(index=0, at=None, messages=(), max_tokens=1, prompt_tokens=1)
            assert [(await client.send(plan, [])).outcome for _ in range(3)] == ["ok"] * 3
            await client.close()
            assert server.connections == 1
            record = (await ask(server.url, "e", keep_alive=False))[0]
            assert record.outcome == "ok"

    on(test())


def test_a_key() -> None:
    async def test() -> None:
        async with Scripted(key="k") as server:
            with pytest.raises(Fault, match="--key"):
                await check(Target(server.url, "a"))
            assert (await check(Target(server.url, "a", key="k"))).model == "a"
            assert (await ask(server.url, "one", key="wrong"))[0].status == 401

    on(test())


def test_a_long_request_in_many_reads() -> None:
    async def test() -> None:
        async with Scripted(SCRIPTS) as server:
            assert (await ask(server.url, "one", "y" * 2_000_000))[0].outcome == "ok"

    on(test())


def start(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headrace_bench.client.scripted", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_program_ends_on_sigterm() -> None:
    with start() as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.terminate()
        assert process.wait(10) == 0


def test_the_program_ends_by_its_limit() -> None:
    with start("--limit", "0.1") as process:
        assert process.wait(10) == 0


def test_the_program_ends_with_its_parent() -> None:
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-m', 'headrace_bench.client.scripted'], "
        "stdout=subprocess.PIPE, text=True); p.stdout.readline(); print(p.pid)"
    )
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or ") Z " in stat.read_text():
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("it outlived its parent")


def test_a_port_that_is_taken() -> None:
    async def test() -> None:
        async with Scripted() as server:
            with start("--port", server.url.rsplit(":", 1)[1]) as process:
                _, words = await asyncio.to_thread(process.communicate)
            assert process.returncode == 1
            assert words.startswith("scripted: port ")
            assert words.count("\n") == 1

    on(test())
