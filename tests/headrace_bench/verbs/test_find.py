from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_bench.__main__ import main
from headrace_bench.capacity import capacity
from headrace_bench.client.run import Run
from headrace_bench.client.target import Target
from headrace_bench.load.arrivals import Closed, Gamma, Poisson
from headrace_bench.load.schedule import Schedule
from headrace_bench.record import Record
from headrace_bench.verbs import find
from made_runs import health, record
from scripted_servers import Serving, serving

LOAD = ["--model", "m", "--workload", "chat,max_in=16", "--warmup", "0", "--drain", "1"]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(0.0) as one:
        yield one


def answers(
    target: Target, schedule: Schedule, *, drain_s: float, on_record: Callable[[Record], None], most: float = 9.0
) -> Run:
    """In time up to `most` requests a second, or users."""
    asked = schedule.requests[: (schedule.users or 0) * 20] if schedule.users else schedule.requests
    load = schedule.users or int(schedule.kind.partition(":")[2].partition(".")[0])
    ttft = 0.1 if load <= most else 3.0
    records = [record(one.index, one.at or 0.0, ttft, gap=0.001) for one in asked]
    return Run(schedule, tuple(records), health(), target, "")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "capacity", functools.partial(capacity, run=answers, clock=lambda: 0.0))


def told(out: Path) -> dict[str, Any]:
    return msgspec.json.decode((out / "find.json").read_bytes(), type=dict[str, Any])


@pytest.mark.usefixtures("made")
def test_a_rate_is_found_and_written(server: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["find", "--url", server.url, "--arrivals", "constant:2", "--out", str(out), *LOAD]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("2 met: 100.0 %")
    assert "requests/s meets chat at 95 % (attainment 100.0 % [" in said[-2]
    assert said[-2].endswith("% more does not")
    result = told(out)["result"]
    met, unmet = result["met"], result["unmet"]
    assert isinstance(met, float)
    assert isinstance(unmet, float)
    assert 9.5 < met < 10 <= unmet <= met * 1.051
    assert (result["confirmed"], result["concurrency_limited"], result["ended"]) == (True, False, "confirmed")
    assert len(told(out)["points"]) == len(said) - 2
    assert said[-2] in (out / "report.html").read_text()
    assert sorted(path.name for path in (out / "plots").iterdir()) == ["goodput.png", "goodput.svg"]
    assert ">95 %</th>" in (out / "report.html").read_text()


@pytest.mark.usefixtures("made")
def test_the_page_names_the_confidence_that_was_asked_for(server: Serving, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--arrivals", "constant:2", "--high", "4", "--confidence", "0.9", "--out", str(out)]
    assert main(["find", "--url", server.url, *flags, *LOAD]) == 0
    page = (out / "report.html").read_text()
    assert ">90 %</th>" in page
    assert ">95 %</th>" not in page


def test_an_interrupt_between_two_points_leaves_them(
    server: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = 0

    def settle(*_: object) -> None:
        nonlocal settled
        settled += 1
        if settled == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(find, "settle", settle)
    monkeypatch.setattr(find, "capacity", functools.partial(capacity, run=answers, clock=lambda: 0.0))
    out = tmp_path / "out"
    assert main(["find", "--url", server.url, "--arrivals", "constant:2", "--out", str(out), *LOAD]) == 130
    assert capsys.readouterr().err == "headrace-bench: interrupted at 8; what was measured is kept\n"
    assert len(told(out)["points"]) == 2
    assert (out / "report.html").is_file()


def test_a_trace_that_is_too_short_for_more_leaves_its_points(
    server: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fast(target: Target, schedule: Schedule, *, drain_s: float, on_record: Callable[[Record], None]) -> Run:
        records = [record(one.index, one.at or 0.0, 0.1, gap=0.001) for one in schedule.requests]
        return Run(schedule, tuple(records), health(), target, "")

    monkeypatch.setattr(find, "capacity", functools.partial(capacity, run=fast, clock=lambda: 0.0))
    out, trace = tmp_path / "out", tmp_path / "trace.csv"
    rows = "".join(f"{n},80,80\n" for n in range(120))
    trace.write_text("arrival_s,context_tokens,generated_tokens\n" + rows)
    flags = ["--arrivals", f"trace:{trace},rate=2", "--out", str(out), "--model", "m"]
    assert main(["find", "--url", server.url, *flags, "--warmup", "10", "--drain", "1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("headrace-bench: it ended at ")
    assert "what was measured is kept: --warmup 10: " in error
    assert len(told(out)["points"]) >= 1
    assert (out / "report.html").is_file()


@pytest.mark.usefixtures("made")
def test_users_are_no_rate(server: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["find", "--url", server.url, "--arrivals", "closed:4", "--out", str(out), *LOAD]) == 0
    said = capsys.readouterr().out.splitlines()[-2]
    assert said.startswith("9 users at once meets chat at 95 %")
    assert said.endswith("concurrency-limited: this is no capacity at a rate")
    assert told(out)["result"]["unit"] == "users"


def test_a_server_that_goes_away_leaves_its_points(
    server: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with serving(0.0) as mortal:

        def run(target: Target, schedule: Schedule, *, drain_s: float, on_record: Callable[[Record], None]) -> Run:
            if schedule.kind == "constant:8":
                mortal.die()
                gone = tuple(record(one.index, one.at or 0.0, 0.0, outcome="connect") for one in schedule.requests)
                return Run(schedule, gone, health(), target, "")
            return answers(target, schedule, drain_s=drain_s, on_record=on_record)

        monkeypatch.setattr(find, "capacity", functools.partial(capacity, run=run, clock=lambda: 0.0))
        assert main(["find", "--url", mortal.url, "--arrivals", "constant:2", "--out", str(out), *LOAD]) == 1
    error = capsys.readouterr().err
    assert error.startswith("headrace-bench: the server went away at 8: ")
    assert error.count("\n") == 1
    assert len(told(out)["points"]) == 3
    assert told(out)["result"] is None
    assert (out / "report.html").is_file()


@pytest.mark.usefixtures("made")
def test_nothing_found_is_said_and_fails(server: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--arrivals", "constant:2", "--slo", "ttft=1", "--limit", "1e9", "--out", str(tmp_path / "out")]
    assert main(["find", "--url", server.url, *flags, *LOAD]) == 1
    assert "no load was shown to meet ttft=1 at 95 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--high", "1", "--low", "2"], "--high 1: the search begins at 2"),
        (["--limit", "10"], "--limit 10: the first point alone may take"),
        (["--requests", "5"], "--requests: a search draws"),
        (["--arrivals", "rate:nowhere"], "this kind cannot be set to a rate"),
        (["--target", "1"], "--target"),
        (["--hang-ups", "0.05"], "--hang-ups 0.05: who hangs up has no whole answer, so no load can reach --target"),
        (["--hang-ups", "0.5", "--target", "0.6"], "--hang-ups 0.5"),
        (["--seed", "-1"], "--seed"),
        (["--arrivals", "constant:1e12"], "1,000,000 are the most that are drawn"),
    ],
)
def test_what_cannot_be_is_one_line(flags: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["find", "--url", "http://127.0.0.1:9", *flags]))
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_no_server_is_one_line_and_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "out")]) == 1
    assert "no server answers there" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_arrivals_at_another_load() -> None:
    assert find.at_load(Poisson(1.0), 7.5) == Poisson(7.5)
    assert find.at_load(Gamma(1.0, 3.0), 7.5) == Gamma(7.5, 3.0)
    assert find.at_load(Closed(1, think=2.0), 7.0) == Closed(7, think=2.0)
