"""Acceptance, section 20: what a benchmark says, against a server whose answers are known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

from acceptance.asking import on_loop
from acceptance.scene import scripted
from headrace_bench.client.golden import CASES
from headrace_bench.client.rehearsal import Played, rehearse, server
from headrace_bench.client.request import Client
from headrace_bench.client.target import Target, check
from headrace_bench.figures.stats import percentile
from headrace_bench.load.schedule import Planned

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server() as found:
        yield found


def played(name: str, url: str) -> tuple[dict[str, Any], float]:
    """What was found, in agreement with the server's own log to 2 ms, and how late (s) the machine made the script: the
    server by its log, and the sending of the request. On a busy one it may take more tries than one to agree."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        last: Played = runner.run(rehearse(BY_NAME[name], Target(url, "scripted"), tries=10))[-1]
    assert last.differences == [], (last.wanted, last.found, last.server_late, last.waited)
    return dict(last.found), last.server_late + last.found["lag"]


def test_oc_59_failures_are_not_fast_successes(url: str) -> None:
    found, late = played("OC-59", url)
    assert (found["completed"], found["failed"]) == (5, 5)
    assert found["by_outcome"] == {"http": 2, "stream_error": 2, "truncated": 1}
    assert found["e2e_p50"] == pytest.approx(1.0, abs=0.05 + late)
    assert found["counts"] == {"ttft": 5, "tpot": 5}
    assert found["output_tokens"] == 50
    assert found["attained_percent"] == 50
    assert found["requests"] == 10  # the server's log has as many: nothing was sent twice


def test_oc_60_first_token_not_first_chunk(url: str) -> None:
    found, late = played("OC-60", url)
    assert found["ttft"] == pytest.approx(0.2, abs=0.01 + late)
    assert found["gaps"] == pytest.approx((0.05, 0.05), abs=0.01 + late)
    assert found["tpot"] == pytest.approx(0.05, abs=0.005 + late)
    assert found["tokens"] == 3
    assert found["e2e"] == pytest.approx(0.3, abs=0.01 + late)  # to the last text; to the end of the stream it is
    assert found["e2e_closed"] == pytest.approx(0.32, abs=0.01 + late)


def test_oc_61_several_tokens_in_one_chunk(url: str) -> None:
    found, late = played("OC-61", url)
    assert found["tokens"] == 21
    assert found["tokens_per_chunk"] == (1, 5, 5, 5, 5)
    assert found["ttft"] == pytest.approx(0.1, abs=0.01 + late)
    assert found["tpot"] == pytest.approx(0.02, abs=0.001 + late / 20)
    assert found["gap_mean"] == pytest.approx(0.1, abs=0.005 + late)
    assert found["itl_mean"] == pytest.approx(0.02, abs=0.001 + late / 20)
    assert 1 / found["tpot"] == pytest.approx(50, rel=0.05 + late / 0.4)


def test_oc_62_empty_sets(url: str) -> None:
    failed = played("OC-62a", url)[0]
    assert (failed["completed"], failed["ttft_p50"], failed["e2e_p50"]) == (0, None, None)
    one_each = played("OC-62b", url)[0]
    assert (one_each["counts"], one_each["tpot_p50"]) == ({"ttft": 4, "tpot": 0}, None)
    one = played("OC-62c", url)[0]
    assert one["ttft_p50"] == one["ttft_p99"] == one["ttft"]
    empty = played("OC-62d", url)[0]
    assert (empty["completed"], empty["failed"], empty["counts"]["ttft"]) == (1, 0, 0)
    none = played("OC-62e", url)[0]
    assert (none["requests"], none["completed"], none["attained_percent"]) == (0, 0, None)
    assert all(found["strict_json"] for found in (failed, one_each, one, empty, none))
    assert percentile([1, 2, 3, 4], 50) == 2  # nearest rank, the one method of every report


@on_loop
async def test_a_headrace_is_known_and_its_timeline_joined() -> None:
    async with scripted([[b"a"], [b"b"]]) as scene:
        target = await check(Target(scene.url, "", key=scene.key))
        assert target.headrace
        client = Client(target, time.monotonic)
        plan = Planned(index=0, at=None, messages=(), max_tokens=4, prompt_tokens=1)
        record = await client.send(plan, [{"role": "user", "content": "hi"}], keep_text=True)
        await client.close()
    assert (record.outcome, record.text) == ("ok", "ab")
    assert record.completion_tokens == 3  # the one that ends it is counted, and has no text
    assert record.request_id
    assert record.server is not None
    assert record.sent is not None
    stages = ("receive", "route", "tokenize", "queue", "restore", "prefill", "sample", "deliver")
    assert record.server.keys() == {*stages, "ttft", "cached_tokens"}
    ttft = record.server["ttft"]
    assert ttft is not None
    assert 0 < ttft <= (record.chunks[0].at - record.sent) * 1e3 + 1.0  # its clock begins when it has read the request
