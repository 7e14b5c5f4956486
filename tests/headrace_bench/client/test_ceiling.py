from __future__ import annotations

from types import SimpleNamespace

import pytest

from headrace_bench.client import ceiling
from headrace_bench.client.ceiling import best, requests, streaming
from headrace_bench.client.rehearsal import server
from headrace_bench.client.run import Run
from headrace_bench.client.target import Target
from headrace_bench.record import Outcome, Record
from made_runs import A, health


def test_a_ladder_is_evenly_spaced() -> None:
    schedule = requests(200, 0.1, "m")
    assert [planned.at for planned in schedule.requests] == pytest.approx([n / 200 for n in range(20)])
    assert schedule.duration == pytest.approx(0.1)
    assert schedule.requests[0].extra == {"model": "m"}


def test_streams_run_through_the_whole_window() -> None:
    schedule = streaming(4, 1.0)
    assert {planned.phase for planned in schedule.requests} == {"warmup"}
    assert [planned.at for planned in schedule.requests] == pytest.approx([0.0, 0.125, 0.25, 0.375])
    end = schedule.warmup + schedule.duration
    for planned in schedule.requests:
        _, first, gap, tokens = planned.extra["model"].split(":")
        assert (planned.at or 0.0) + (int(first) + int(gap) * (int(tokens) - 1)) / 1e3 >= end


def done(*outcomes: Outcome, invalid: tuple[str, ...] = ()) -> Run:
    records = tuple(Record(index=i, scheduled=0.0, dispatched=0.0, outcome=one) for i, one in enumerate(outcomes))
    return Run(requests(1, 1.0, "m"), records, health(*invalid), A, "")


def test_a_step_passes_by_the_gate_of_a_run() -> None:
    assert ceiling._passed(done("ok", "ok"))
    assert not ceiling._passed(done("ok", "timeout"))
    assert not ceiling._passed(done())
    assert not ceiling._passed(done("ok", invalid=("the client used 80% of a core",)))


def test_the_highest_step_that_passed() -> None:
    assert best([(50, True), (100, False), (200, True), (500, False)]) == 200
    assert best([(50, False)]) is None
    assert best([]) is None


def test_an_interrupted_step_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "run", lambda *_, **__: SimpleNamespace(interrupted=True))
    with pytest.raises(KeyboardInterrupt):
        ceiling.measure(Target("http://127.0.0.1:9", "m"), 0.1, lambda _: None)


def test_it_measures_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a step passes is the machine's doing; that all is answered is ours."""
    monkeypatch.setattr(ceiling, "RATES", (50, 100))
    monkeypatch.setattr(ceiling, "STREAMS", (4,))
    said: list[str] = []
    with server() as url:
        summary = ceiling.measure(Target(url, "m"), 0.1, said.append)
    assert [line.split()[:2] for line in said if "lag" in line] == [
        ["50", "requests/s"],
        ["100", "requests/s"],
        ["4", "streams"],
    ]
    assert all(line.endswith("ok") or "past the gate" in line for line in said if "CPU" in line)
    assert "requests/s and" in summary
    assert "chunks/s" in summary
