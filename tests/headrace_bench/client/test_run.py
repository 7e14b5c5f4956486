from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime

import msgspec
import pytest

from headrace_bench.client.run import now, run
from headrace_bench.client.stamps import heard
from headrace_bench.client.target import Target
from headrace_bench.fault import Fault
from headrace_bench.load.schedule import Planned, Schedule
from headrace_bench.record import Record

QUICK = "even:5:2:3"
"""First token after 5 ms, three in all, one every 2 ms."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A scripted server in a process of its own."""
    command = [sys.executable, "-m", "headrace_bench.client.scripted", "--limit", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


def schedule(*at: float | None, users: int | None = None, duration: float = 1.0) -> Schedule:
    requests = tuple(
        Planned(
            index=i, at=when, messages=({"role": "user", "content": f"number {i}"},), max_tokens=3, prompt_tokens=2
        )
        for i, when in enumerate(at)
    )  # fmt: skip
    return Schedule(seed=1, kind="test", users=users, duration=duration, warmup=0.0, requests=requests)


def test_a_load_is_sent_and_comes_back_by_index(url: str) -> None:
    told: list[int] = []
    done = run(Target(url, QUICK), schedule(0.2, 0.0, 0.1), on_record=lambda record: told.append(record.index))
    assert [record.index for record in done.records] == [0, 1, 2]
    assert told == [1, 2, 0]
    assert {record.outcome for record in done.records} == {"ok"}
    assert [record.completion_tokens for record in done.records] == [3, 3, 3]
    assert {record.text for record in done.records} == {None}
    assert all(0 <= record.dispatched - (record.scheduled or 0) < 5 for record in done.records)
    assert done.health.asked_rate == done.health.sent_rate == 3.0
    assert not done.interrupted
    assert abs((datetime.fromisoformat(done.wall) - datetime.fromisoformat(now())).total_seconds()) < 60


def test_text_is_kept_where_a_verb_asks_for_it(url: str) -> None:
    done = run(Target(url, QUICK), schedule(0.0), keep_text=True, wall="then")
    assert done.records[0].text
    assert done.wall == "then"


def test_the_zero_of_the_stamps_is_a_time_that_others_know(url: str) -> None:
    before = time.monotonic()
    done = run(Target(url, "stamped:1:1:2"), schedule(0.0), keep_text=True)
    assert before <= done.began <= time.monotonic()
    told = heard(done.records[0], done.began, 2)
    assert all(0 <= token.delay < 5 for token in told.tokens)


def test_a_server_that_is_not_there_is_an_outcome() -> None:
    done = run(Target("http://127.0.0.1:9", "m"), schedule(0.0, 0.1))
    assert [record.outcome for record in done.records] == ["connect", "connect"]


def test_the_drain_keeps_the_stamps_of_what_it_ends(url: str) -> None:
    done = run(Target(url, "even:5:500:1000"), schedule(0.0, duration=0.2), drain_s=0.2)
    assert [record.outcome for record in done.records] == ["unfinished"]
    assert done.records[0].chunks


def test_a_closed_loop_that_runs_out_does_not_count(url: str) -> None:
    done = run(Target(url, QUICK), schedule(None, None, None, users=1, duration=5.0))
    assert len(done.records) == 3
    assert any("all 3 requests were used up" in line for line in done.health.invalid)


def test_a_user_with_nothing_left_to_ask_counts_while_another_is_still_answered(url: str) -> None:
    done = run(Target(url, "even:5:100:10"), schedule(None, None, None, users=2, duration=1.5))
    assert [record.outcome for record in done.records] == ["ok"] * 3
    assert max(record.closed or 0.0 for record in done.records) > 1.5
    assert any("all 3 requests were used up" in line for line in done.health.invalid)


def test_a_load_that_is_meant_to_end_does_not_run_out(url: str) -> None:
    finite = msgspec.structs.replace(schedule(None, None, users=1, duration=5.0), finite=True)
    assert not any("used up" in line for line in run(Target(url, QUICK), finite).health.invalid)


def test_what_is_raised_while_a_record_is_kept_ends_the_load(url: str) -> None:
    def full(_: Record) -> None:
        raise Fault("the disk is full")

    with pytest.raises(Fault, match="the disk is full"):
        run(Target(url, QUICK), schedule(0.0, 50.0, duration=60.0), on_record=full)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_keeps_what_was_measured(url: str) -> None:
    def interrupt(_: Record) -> None:
        threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    done = run(Target(url, QUICK), schedule(0.0, 50.0, duration=60.0), on_record=interrupt)
    assert done.interrupted
    assert [record.index for record in done.records] == [0]
    assert any("interrupted" in line for line in done.health.invalid)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
