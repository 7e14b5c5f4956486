from __future__ import annotations

import sys

import pytest

from engines import long_queue
from engines.long_queue import ANSWER, LIMITS, Cost, Queue, measure, table


def test_the_queue_stays_as_long_as_it_was_asked_for() -> None:
    queue = Queue()
    for _ in range(60):
        queue.arrive()
    queue.step()
    while queue.waiting > 20:
        queue.leave()
    assert queue.waiting == 20
    assert len(queue.streams) == 20 + len(queue.stepper.scheduler.running)
    assert queue.streams.waiting == 20, "both sides count the same"


def test_answers_end_and_make_place() -> None:
    queue = Queue()
    for _ in range(40):
        queue.arrive()
    for _ in range(3 * ANSWER):
        queue.step()
    assert len(queue.streams) < 40


def test_it_measures_both_sides() -> None:
    cost = measure(30, 2)
    assert cost.waiting == 30
    assert cost.engine > 0.0
    assert cost.server > 0.0


def test_the_last_row_is_what_the_queue_adds() -> None:
    rows = table([Cost(16, 0.0, 0.01, 0.002), Cost(10_000, 1.5, 0.03, 0.005)]).splitlines()
    assert rows[3] == "| 10,000 | 1500 ms | 3.00% | 0.50% |"
    assert rows[-1] == "| they cost | | 2.00% | 0.30% |"


def test_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["long_queue.py", "--waiting", "40", "--seconds", "1"])
    long_queue.main()
    out = capsys.readouterr().out
    assert f"| {LIMITS.max_running} |" in out
    assert "| 40 |" in out
