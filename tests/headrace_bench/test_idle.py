from __future__ import annotations

import asyncio
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_bench import gateways, idle
from headrace_bench.fault import Fault
from headrace_bench.idle import Plan, Streams, Subject, summary

PLAN = Plan(streams=40, probes=6)


@pytest.fixture
def subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    monkeypatch.setattr(idle, "LOOK_S", 0.05)
    monkeypatch.setattr(idle, "IDLE_S", 0.1)
    monkeypatch.setattr(idle, "PATIENCE_S", 10.0)
    monkeypatch.setattr(idle, "FILES_LEFT", 4)
    with gateways.upstream(tmp_path) as server:
        yield Subject(server.url, gateways.UPSTREAM, server.pids())


def test_silent_streams_are_held_probed_beside_and_let_go(subject: Subject) -> None:
    said: list[str] = []
    found = idle.measure(subject, None, PLAN, said.append)
    assert (found["held"], found["refused"], found["ended"]) == (40, 0, 0)
    assert found["files_left"] <= 4
    assert found["ttft_ratio"] > 0
    assert found["ttft_before_ms"] <= found["ttft_before_p95_ms"]
    assert len(found["cycles"]) == 2
    assert said[0].startswith("40 streams: ")
    assert said[1].startswith("closed: ")


def test_without_probes_there_is_no_ttft(subject: Subject) -> None:
    found = idle.measure(subject, None, Plan(streams=3, probes=0), lambda _: None)
    assert (found["held"], found["ttft_ratio"], found["ttft_open_ms"]) == (3, None, None)


def test_probes_come_in_pairs_in_drawn_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def ttft(one: Subject, plan: Plan) -> float:
        asked.append(one.model)
        return {"a": 0.002, "b": 0.001}[one.model]

    monkeypatch.setattr(idle, "ttft", ttft)
    a, b = Subject("u", "a", [1]), Subject("v", "b", [2])
    pairs = asyncio.run(idle.probes(a, b, Plan(probes=30), random.Random(1)))
    assert pairs == [(0.002, 0.001)] * 30
    order = ["".join(asked[at : at + 2]) for at in range(0, 60, 2)]
    assert set(order) == {"ab", "ba"}
    assert asyncio.run(idle.probes(a, None, Plan(probes=2), random.Random(1))) == [(0.002, None)] * 2


def cycle(rss: int, after: int, files: int = 2010, **streams: int) -> dict[str, Any]:
    seen = {"refused": 0, "failed": 0, "ended": 0, **streams}
    return {
        "rss": rss,
        "files": files,
        "cpu": 0.01,
        "streams": seen,
        "seconds": 9.5,
        "rss_after": after,
        "files_after": 12,
    }


def test_what_is_told() -> None:
    base = {"rss": 50_000_000, "files": 10}
    cycles = [cycle(80_000_000, 60_000_000, failed=1, refused=2), cycle(83_000_000, 60_000_000)]
    before, open_ = [(0.002, 0.001)] * 5, [(0.003, 0.0012)] * 5
    found = summary(Plan(streams=1000, files_each=2), base, cycles, before, open_)
    assert found["held"] == 1000
    assert found["kb_each"] == pytest.approx(30.0)
    assert found["refused"] == 3
    assert found["files_left"] == 2
    assert found["opened_s"] == 9.5
    assert found["given_back"] == pytest.approx(2 / 3)
    assert found["again_ratio"] == pytest.approx(1.1)
    # 2.5 of the server beside it, where it was 2 before.
    assert found["ttft_ratio"] == pytest.approx(1.25)
    alone = summary(Plan(streams=1000, files_each=2), base, cycles, [(0.002, None)], [(0.003, None)])
    assert alone["ttft_ratio"] == pytest.approx(1.5)
    nothing = summary(Plan(), base, [cycle(50_000_000, 50_000_000, files=10)], [], [])
    assert (nothing["kb_each"], nothing["again_ratio"], nothing["held"]) == (None, None, 0)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What a process without privileges was given, the last one first: 512 now, 1000 at most."""
    set_: list[tuple[int, int]] = [(512, 1000)]

    def setrlimit(_which: int, limit: tuple[int, int]) -> None:
        if limit[1] > set_[0][1] or limit[0] > limit[1]:
            raise ValueError("not allowed to raise maximum limit")
        set_.insert(0, limit)

    monkeypatch.setattr(resource, "getrlimit", lambda _which: set_[0])
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    return set_


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(limits: list[tuple[int, int]]) -> None:
    assert idle.raise_limit(400) == 400
    assert limits == [(512, 1000)], "nothing was to be done"
    assert idle.raise_limit(800) == 800
    assert idle.raise_limit(2000) == 1000
    assert limits[0] == (1000, 1000)


def test_as_many_streams_as_there_are_files_for(limits: list[tuple[int, int]]) -> None:
    assert idle.affordable(Plan(streams=100, files_each=2)).streams == 100
    assert idle.affordable(Plan(streams=10_000, files_each=2)).streams == (1000 - idle.SPARE) // 2
    limits.insert(0, (100, 100))
    with pytest.raises(Fault, match="raise ulimit -Hn"):
        idle.affordable(Plan(streams=1))


def test_what_a_process_may_open_and_has_open() -> None:
    assert idle.allowed(os.getpid()) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert idle.files(os.getpid()) >= 3
    assert (idle.allowed(2**30), idle.files(2**30)) == (None, 0)


def test_memory_and_files_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, open_ = iter([100, 200, 250, 250, 251, 400]), iter([5, 6, 7, 8, 8, 9])
    monkeypatch.setattr(idle, "resident", lambda _pid: next(sizes))
    monkeypatch.setattr(idle, "files", lambda _pid: next(open_))
    assert idle.settled([1], sleep=lambda _: None) == 251


def test_a_holder_that_died_is_a_fault(subject: Subject) -> None:
    streams = Streams(subject, Plan(streams=1))
    assert streams.opened(10.0)["sent"] == 1
    streams.kill()
    with pytest.raises((Fault, ValueError)):
        streams.look()
