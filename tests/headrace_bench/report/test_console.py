from __future__ import annotations

import io
import random
import statistics
import threading
import time

import msgspec
import numpy as np
import pytest
from rich.console import Console, RenderableType

from bench_runs import answered, failed, health, records, schedule
from headrace_bench.figures.paired import Comparison
from headrace_bench.figures.slo import PROFILES
from headrace_bench.figures.summary import summarise
from headrace_bench.report.console import Progress, Running, compared, final
from headrace_bench.report.rows import Compared


def text(shown: RenderableType, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(shown)
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def test_running_percentiles_are_within_their_bucket() -> None:
    draw = random.Random(1)
    values = sorted(draw.lognormvariate(-2, 1) for _ in range(5000))
    running = Running()
    assert running.percentile(50) is None
    for start in range(0, 5000, 50):
        running.add(np.array(values[start : start + 50]))
    for p in (50, 95, 99):
        assert running.percentile(p) == pytest.approx(values[int(p * 50) - 1], rel=0.02)


def test_durations_beyond_the_buckets_are_in_the_last_ones() -> None:
    running = Running()
    running.add(np.array([0.0, -1.0]))
    assert running.percentile(99) == pytest.approx(1e-6, rel=0.02)
    running.add(np.array([1e9] * 5))
    assert running.percentile(99) == pytest.approx(3600, rel=0.03)


def test_a_line_of_an_open_loop() -> None:
    now = [100.0]
    progress = Progress(schedule(100, rate=10), Console(file=io.StringIO()), clock=lambda: now[0])
    for i in range(20):
        progress(answered(i, i / 10, ttft=0.2))
    progress(failed(20, 2.0))
    now[0] += 2.45
    line = progress.line()
    assert line.startswith("2.5 of 10 s · 25 due, 20 done, 1 failed, 4 in flight · 8.57/s")
    ttft, gap = line.split(" · ")[-2:]
    assert float(ttft.removeprefix("TTFT p50 ").split(",")[0]) == pytest.approx(200, rel=0.02)
    assert float(gap.removeprefix("gap p99 ").removesuffix(" ms")) == pytest.approx(10, rel=0.02)


def test_a_line_before_anything_and_of_a_closed_loop() -> None:
    plan = msgspec.structs.replace(schedule(5), users=3)
    progress = Progress(plan, Console(file=io.StringIO()), clock=lambda: 0.0)
    assert progress.line() == "0.0 of 0.5 s · 3 users, 0 done, 0 failed · 0/s · TTFT p50 –, p95 – · gap p99 – ms"


def test_warm_up_is_counted_and_not_measured() -> None:
    progress = Progress(schedule(5), Console(file=io.StringIO()), clock=lambda: 0.0)
    progress(msgspec.structs.replace(answered(0, 0.0), phase="warmup"))
    assert "1 done" in progress.line()
    assert "TTFT p50 –" in progress.line()


class Waited(io.StringIO):
    """Tells when something was painted."""

    def __init__(self) -> None:
        super().__init__()
        self.painted = threading.Event()

    def write(self, text: str) -> int:
        if "due" in text:
            self.painted.set()
        return super().write(text)


@pytest.mark.parametrize("terminal", [True, False])
def test_it_is_painted_while_the_load_runs(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Waited()
    console = Console(file=out, force_terminal=terminal, width=160)
    with Progress(schedule(5), console, every_s=0.01):
        assert out.painted.wait(10)
    assert ("\x1b" in out.getvalue()) is terminal
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_no_colour_is_no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = Waited()
    with Progress(schedule(5), Console(file=out, force_terminal=True), every_s=0.01):
        assert out.painted.wait(10)
    assert "\x1b" not in out.getvalue()


def test_a_record_costs_less_than_50_us() -> None:
    progress = Progress(schedule(5), Console(file=io.StringIO()))
    record = answered(0, 0.0, gaps=(0.01,) * 100)
    costs = []
    for _ in range(500):
        start = time.perf_counter()
        progress(record)
        costs.append(time.perf_counter() - start)
    assert statistics.median(costs) < 50e-6


def test_the_table_at_the_end() -> None:
    ends = records(100)
    shown = text(final(summarise(schedule(100), ends, health(), PROFILES["chat"])))
    assert "INVALID" not in shown
    assert "constant 10/s for 10 s, seed 7: 100 requests" in shown
    ttft = next(line for line in shown.splitlines() if line.strip().startswith("TTFT "))
    assert ttft.count("[") == 3, "three percentiles with intervals"
    assert "–" in ttft, "100 samples have no p99"
    assert "ttft ≤ 1000 ms: " in shown
    assert "goodput" in shown
    assert "TTFT, network" in shown
    assert "lag p50 0.20, p99 1.10 ms" in shown


def test_invalid_is_on_top() -> None:
    shown = text(final(summarise(schedule(3), records(3), health("the [bold]load[/] was late"), PROFILES["chat"])))
    assert shown.splitlines()[:2] == ["INVALID: this run does not count", "  the [bold]load[/] was late"]


def test_all_failed_says_so() -> None:
    ends = [failed(0, 0.0), failed(1, 0.1, "timeout", None)]
    shown = text(final(summarise(schedule(2), ends, health(), PROFILES["chat"])))
    assert "failed: http 1 (503: 1), timeout 1" in shown
    assert "0.0 % [0.0 %" in shown


def test_two_sides() -> None:
    found = [Compared("TTFT p50", "ms", 100.0, 107.0, Comparison(1.07, 1.03, 1.11, 0.002, "worse", 12, 0, 0.02))]
    shown = text(compared("one [x]", "two", found, ["pair 3: late"]), 160)
    assert shown.splitlines()[0].startswith("INVALID")
    assert "A: one [x]" in shown
    line = next(line for line in shown.splitlines() if "TTFT p50" in line)
    assert line.split() == "TTFT p50 [ms] 100 107 +7.0 % [+3.0 %, +11.0 %] ±2.0 % 0.002 12 worse".split()
