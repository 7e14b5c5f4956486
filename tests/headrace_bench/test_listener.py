from __future__ import annotations

import os
import socket
from itertools import count

from headrace_bench.listener import cpu, cpu_behind, listener, settle
from headrace_bench.server import free_port


def test_the_process_behind_a_port_of_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listener(port) == os.getpid()
        read = cpu_behind(f"http://127.0.0.1:{port}/v1")
        assert read is not None
        before = read()
        assert before is not None
        while (after := read()) == before:  # until it has used a tick
            pass
        assert after is not None
        assert after > before
    assert listener(free_port()) is None


def test_what_cannot_be_seen_is_none() -> None:
    assert cpu_behind("http://example.com:80") is None
    assert cpu_behind(f"http://127.0.0.1:{free_port()}") is None
    assert cpu(2**22 + 1) is None


def test_it_waits_until_a_server_is_idle() -> None:
    times = count()
    used = iter([0.0, 0.2, 0.2, 0.39, 0.39, 0.40])
    slept: list[float] = []
    assert settle([None, lambda: next(used)], clock=lambda: next(times) / 10, sleep=slept.append)
    assert slept == [0.2, 0.2, 0.2]
    assert settle([None, None], sleep=slept.append)
    assert len(slept) == 3


def test_it_does_not_wait_for_ever() -> None:
    seconds, work = count(), count()
    assert not settle([lambda: float(next(work))], clock=lambda: float(next(seconds)), sleep=lambda _: None)
    assert next(seconds) < 30
