from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_bench import gateways
from headrace_bench.client import holder
from headrace_bench.client.holder import Holder
from headrace_bench.server import Server

BODY = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "stamped:86400000:0:1"}]}).encode()


@pytest.fixture
def upstream(tmp_path: Path) -> Server:
    return gateways.upstream(tmp_path)


def until(one: Holder, heads: int) -> None:
    for _ in range(2000):
        one.turn(0.01)
        count = one.count
        if count.heads + count.refused + count.failed + count.ended >= heads:
            return
    raise AssertionError(one.count)


def test_streams_are_opened_and_held(upstream: Server) -> None:
    with upstream:
        one = Holder(upstream.url, 70, BODY)
        until(one, 70)
        assert (one.count.sent, one.count.heads, one.count.refused, one.count.ended) == (70, 70, 0, 0)
        (pid,) = upstream.pids()
        held = len(os.listdir(f"/proc/{pid}/fd"))
        assert held >= 70
        one.close()


def test_a_refusal_is_counted_with_its_words(upstream: Server) -> None:
    with upstream:
        one = Holder(upstream.url, 3, b'{"model": "nobody"}')
        until(one, 3)
        assert (one.count.heads, one.count.refused) == (0, 3)
        assert "there is no script" in one.count.said
        one.close()


def test_nobody_is_there() -> None:
    one = Holder("http://127.0.0.1:9", 2, BODY)
    until(one, 2)
    assert (one.count.sent, one.count.failed) == (0, 2)
    one.close()


def test_what_the_server_ends_is_seen(upstream: Server) -> None:
    with upstream:
        one = Holder(upstream.url, 2, BODY)
        until(one, 2)
    until(one, 4)
    assert one.count.ended == 2
    one.close()


def test_the_program_answers_a_line_and_ends_with_its_input(upstream: Server) -> None:
    with upstream:
        program = [sys.executable, "-m", "headrace_bench.client.holder", upstream.url, "2"]
        env = {**os.environ, holder.BODY: BODY.decode()}
        with subprocess.Popen(program, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            count = {"heads": 0}
            while count["heads"] < 2:
                process.stdin.write("\n")
                process.stdin.flush()
                count = json.loads(process.stdout.readline())
            out, _ = process.communicate(timeout=10)
        assert json.loads(out.splitlines()[-1]) == {**count, "sent": 2, "refused": 0}
        assert process.returncode == 0
