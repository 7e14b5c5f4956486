from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench_relay import relay
from headrace_bench import gateways, switching
from headrace_bench.client.run import Run, run
from headrace_bench.client.target import Target
from headrace_bench.record import Chunk, Health, Record
from headrace_bench.switching import Change, Changer, Plan, Told, config, schedule, summary, told

QUICK = Plan(rate=40.0, tokens=5, first_s=0.01, gap_s=0.01, switches=3, every_s=0.3)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switching, "SETTLE_S", 0.2)
    monkeypatch.setattr(switching, "AFTER_S", 0.1)


def test_the_load_is_even() -> None:
    plan = schedule(QUICK)
    assert len(plan.requests) == int(QUICK.duration * 40)
    assert [planned.at for planned in plan.requests[:3]] == pytest.approx([0.0, 0.025, 0.05])
    assert plan.requests[0].messages[0]["content"] == "stamped:10:10:5"
    assert plan.users is None
    assert Plan(stamped=False).message == "Count."


def test_a_server_s_file() -> None:
    text = config([("a", "http://127.0.0.1:1"), ("b", "http://127.0.0.1:2")], True)
    assert text.count('kind = "openai"') == 2
    assert text.count("load = false") == 1
    assert 'url = "http://127.0.0.1:2/v1"' in text
    assert text.endswith("[aliases.m]\nengines = { a = 1 }\n")
    assert 'kind = "llama"\nmodel = "scripted:30"' in config([("a", "scripted:30"), ("b", "x")], False)


def test_switches_under_load(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(gateways.upstream(tmp_path, name)).url for name in ("a", "b")]
        server = stack.enter_context(relay(tmp_path, *sources))
        changer = Changer(QUICK, ["a", "b"], lambda to: switching.switch(server.url, "key", "m", to))
        changer.start()
        ran = run(Target(server.url, "m", keep_alive=False), schedule(QUICK), keep_text=True)
        changer.stop()
    found = summary(told(QUICK, ran), changer.changes)
    assert [change.to for change in changer.changes] == ["b", "a", "b"]
    assert (found["switches"], found["switches_failed"]) == (3, 0)
    assert (found["requests"], found["failed"], found["wrong"]) == (len(ran.records), 0, 0)
    assert found["gap_around_max_ms"] is not None
    assert found["ttft_around_max_ms"] > 0


class Refusing(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(409)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "another one runs"}}')

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def refusing() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_switch_that_is_refused_says_why(refusing: str) -> None:
    change = switching.switch(refusing, None, "m", "b")
    assert change.error is not None
    assert change.error.startswith("HTTP 409: ")
    assert "another one runs" in change.error
    gone = switching.switch("http://127.0.0.1:9", "key", "m", "b")
    assert gone.error is not None
    assert gone.answered >= gone.asked


def test_a_changer_that_is_stopped_asks_no_more() -> None:
    changer = Changer(Plan(switches=5, every_s=60.0), ["a", "b"], lambda to: Change(to, 0.0, 1.0, None))
    changer.start()
    changer.stop()
    assert len(changer.changes) <= 1
    assert not changer.is_alive()


HEALTH = Health(
    lag_p50=None, lag_p99=None, lag_max=None, loop_lag_p99=0.0, loop_lag_max=0.0, cpu=0.0, gc_pauses=0, gc_longest=0.0,
    load_average=0.0, steal=None, asked_rate=None, sent_rate=None,
)  # fmt: skip


def ran(*records: Record) -> Run:
    return Run(schedule(QUICK), records, HEALTH, Target("http://127.0.0.1:1", "m"), "", began=100.0)


def record(texts: Sequence[tuple[float, str]], outcome: Any = "ok") -> Record:
    return Record(
        index=0, scheduled=1.0, dispatched=1.0, outcome=outcome, sent=1.0, error=None if outcome == "ok" else "cut",
        chunks=tuple(Chunk(at, "text", len(text)) for at, text in texts), text="".join(text for _, text in texts),
    )  # fmt: skip


def test_answers_of_engines_of_its_own_are_compared_with_what_they_say_alone() -> None:
    plan = Plan(stamped=False)
    right = record([(1.1, "1 "), (1.2, "2 "), (1.3, "3 ")])
    lost = record([(1.1, "1 "), (1.6, "3 ")])
    cut = record([(1.1, "1 ")], "truncated")
    answers = told(plan, ran(right, lost, cut), ["1 2 3 ", "one two three "])
    assert [(answer.ok, answer.wrong) for answer in answers] == [(True, 0), (True, 1), (False, 0)]
    assert [gap for answer in answers for gap in answer.gaps] == [
        pytest.approx(gap) for gap in ((101.2, 0.0), (101.3, 0.0), (101.6, 0.4))
    ]
    assert answers[0].first == pytest.approx((101.0, 0.1))
    assert answers[2].error == "truncated: cut"


def test_around_a_switch_and_outside() -> None:
    answers = [
        Told(True, 0, ((10.05, 0.030), (10.5, 0.002)), (10.0, 0.004)),
        Told(True, 2, ((11.0, 0.001),), (9.0, 0.001)),
        Told(False, 0, (), None, "http: 503"),
    ]
    changes = [Change("b", 9.9, 10.0, None), Change("a", 20.0, 20.1, "HTTP 500: no")]
    found = summary(answers, changes)
    assert (found["requests"], found["failed"], found["wrong"]) == (3, 1, 2)
    assert (found["switches"], found["switches_failed"]) == (1, 1)
    assert found["gap_around_max_ms"] == pytest.approx(30)
    assert found["gap_outside_max_ms"] == pytest.approx(2)
    assert found["ttft_around_max_ms"] == pytest.approx(4)
    assert found["ttft_outside_max_ms"] == pytest.approx(1)
    assert found["switch_ms"] == pytest.approx(100)
    assert found["errors"] == ["http: 503"]
    assert summary([], [])["gap_around_max_ms"] is None
