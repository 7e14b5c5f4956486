from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from bench_relay import relay, started_by
from headrace_bench import gateways
from headrace_bench.client.target import Target
from headrace_bench.gateways import Load, block, schedule
from headrace_bench.peers.relaying import DIRECT
from headrace_bench.server import Server

LOAD = Load(streams=4, rate=100.0, tokens=20, first_s=0.02, seconds=0.3)


def test_streams_begin_one_by_one_and_are_as_many_as_asked() -> None:
    plan = schedule(LOAD, 1)
    first = [planned for planned in plan.requests if planned.phase == "warmup"][:4]
    assert sorted(planned.max_tokens for planned in first) == [5, 10, 15, 20]
    assert [planned.think for planned in first] == pytest.approx([0.0, 0.25, 0.5, 0.75])
    assert plan.users == 4
    assert plan.warmup == pytest.approx(1.52)
    measured = [planned for planned in plan.requests if planned.phase == "measure"]
    assert {planned.max_tokens for planned in measured} == {20}
    assert measured[0].messages[0]["content"] == "stamped:20:10:20"
    assert len(measured) >= LOAD.streams * (1 + LOAD.seconds / LOAD.period)
    assert schedule(LOAD, 1) == plan != schedule(LOAD, 2)


def test_one_stream_is_short() -> None:
    alone = Load(1, 30.0, 150, 0.2, 5.0)
    assert (alone.name, LOAD.name) == ("one stream", "4 streams")
    assert {planned.max_tokens for planned in schedule(alone, 1).requests} == {12}
    assert alone.period == pytest.approx(0.2 + 11 / 30)


def test_a_block_on_a_relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "RAMP_S", 0.1)
    monkeypatch.setattr(gateways, "SETTLED_S", 0.05)
    with gateways.upstream(tmp_path) as source, relay(tmp_path, source.url) as server:
        direct = block(LOAD, Target(source.url, gateways.UPSTREAM), 1, None)
        through = block(LOAD, Target(server.url, gateways.ALIAS), 1, server)
    for found in (direct, through):
        assert (found["failed"], found["lost"], found["doubled"], found["foreign"]) == (0, 0, 0, 0)
        assert found["chunks"] > 12 * LOAD.streams
        assert found["ttft"]["n"] > 0
        assert found["ttft"]["p50"] <= found["ttft"]["p95"] <= found["ttft"]["max"]
        assert found["delay"]["p50"] > 0
    assert "cpu_us" not in direct
    assert through["cpu_us"] >= 0
    assert through["rss_mb"] > 1


def stub(load: Load, target: Target, seed: int, server: Server | None) -> dict[str, Any]:
    return {"invalid": [], "chunks": 1, "load": load.name, "seed": seed, "url": target.url, "via": server is not None}


def test_rounds_take_turns_and_one_that_does_not_start_is_said(tmp_path: Path) -> None:
    def broken(_url: str) -> Server:
        return Server("x", [sys.executable, "-c", "raise SystemExit(1)"], url="http://127.0.0.1:9", ready="/",
                      log=tmp_path / "x.log")  # fmt: skip

    order: list[str] = []

    def once(load: Load, target: Target, seed: int, server: Server | None) -> dict[str, Any]:
        order.append(DIRECT if server is None else server.name)
        return stub(load, target, seed, server)

    two = [LOAD, Load(1, 100.0, 20, 0.02, 0.3)]
    starts = {"headrace": started_by(tmp_path), "litellm": broken}
    found = gateways.measure(tmp_path, starts, two, 2, once=once)
    assert [list(round_) for round_ in found] == [["4 streams", "one stream"]] * 2
    assert found[0]["4 streams"]["litellm"]["failed"].startswith("NotReady")
    assert [order[i] for i in (0, 2)] == [DIRECT, "headrace"], "the next load begins with the next"
    assert order.count(DIRECT) == order.count("headrace") == 4
    seeds = {found[turn][load.name][DIRECT]["seed"] for turn in (0, 1) for load in two}
    assert len(seeds) == 4
    assert found[0]["4 streams"]["headrace"]["seed"] == found[0]["4 streams"][DIRECT]["seed"]


def test_a_block_that_does_not_count_is_asked_once_more(tmp_path: Path) -> None:
    asked: list[int] = []

    def once(load: Load, target: Target, seed: int, server: Server | None) -> dict[str, Any]:
        asked.append(seed)
        return {**stub(load, target, seed, server), "invalid": ["late"]}

    (found,) = gateways.measure(tmp_path, {"headrace": started_by(tmp_path)}, [LOAD], 1, once=once)
    assert asked == [1, 1, 1, 1]
    assert found["4 streams"][DIRECT]["invalid"] == ["late"]


def test_who_runs_where() -> None:
    there = sorted(os.sched_getaffinity(0))
    ours, theirs = gateways.cores(True)
    if len(there) > 1:
        assert (ours, theirs) == (there[:-1], there[-1:])
    assert gateways.cores(False) == ([], [])
    with gateways.placed(there[:1]):
        assert os.sched_getaffinity(0) == {there[0]}
        with gateways.placed([]):
            assert os.sched_getaffinity(0) == {there[0]}
    assert sorted(os.sched_getaffinity(0)) == there


def test_how_gateways_are_started(tmp_path: Path) -> None:
    ours = gateways.headrace(tmp_path, "--set", "a.b=1", name="second")("http://127.0.0.1:7")
    assert ours.command[2:5] == ["headrace", "serve", "--config"]
    assert ours.command[-2:] == ["--set", "a.b=1"]
    text = (tmp_path / "second.toml").read_text()
    assert 'url = "http://127.0.0.1:7/v1"' in text
    assert "[aliases.m]\nengines = { up = 1 }" in text
    other = gateways.proxy(tmp_path, Path("/p/litellm"))("http://127.0.0.1:7")
    assert "/p/litellm" in other.command
    assert "http://127.0.0.1:7/v1" in (tmp_path / "litellm.yaml").read_text()
