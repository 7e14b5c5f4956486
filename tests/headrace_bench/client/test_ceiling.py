from __future__ import annotations

from types import SimpleNamespace

import pytest

from headrace_bench.client import ceiling
from headrace_bench.client.ceiling import best, requests
from headrace_bench.client.rehearsal import server
from headrace_bench.client.target import Target


def test_a_ladder_is_evenly_spaced() -> None:
    schedule = requests(200, 0.1, "m")
    assert [planned.at for planned in schedule.requests] == pytest.approx([n / 200 for n in range(20)])
    assert schedule.duration == pytest.approx(0.1)
    assert schedule.requests[0].extra == {"model": "m"}


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
