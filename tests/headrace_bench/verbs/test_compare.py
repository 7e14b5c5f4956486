from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_bench.__main__ import main
from headrace_bench.client.run import Run
from headrace_bench.client.target import Target
from headrace_bench.duel import duel
from headrace_bench.figures import summary
from headrace_bench.figures.summary import Summary
from headrace_bench.load.schedule import Schedule
from headrace_bench.report import folder
from headrace_bench.verbs import compare
from made_runs import Servers, record
from scripted_servers import Serving, command, serving

LOAD = ["--model", "m", "--arrivals", "constant:20", "--workload", "chat,max_in=16", "--duration", "2", "--warmup", "0"]


@pytest.fixture(scope="module")
def a() -> Iterator[Serving]:
    with serving(0.0) as server:
        yield server


@pytest.fixture(scope="module")
def b() -> Iterator[Serving]:
    with serving(0.0) as server:
        yield server


@pytest.fixture
def them(a: Serving, b: Serving, monkeypatch: pytest.MonkeyPatch) -> Servers:
    """The servers are there, and are asked what they are; the runs are made."""
    made = Servers({a.url: 0.2, b.url: 0.1}, noise=0.02)
    monkeypatch.setattr(compare, "duel", functools.partial(duel, run=made.run, calm=lambda: None))
    return made


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer pairs than say anything, where it is about something else."""
    monkeypatch.setattr(compare, "MIN_PAIRS", 1)


def told(out: Path) -> dict[str, object]:
    return msgspec.json.decode((out / "comparison.json").read_bytes(), type=dict[str, object])


@pytest.fixture(scope="module")
def compared(a: Serving, b: Serving, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a comparison of six pairs left."""
    out = tmp_path_factory.mktemp("compared") / "out"
    made = Servers({a.url: 0.2, b.url: 0.1}, noise=0.02)
    flags = ["--a", a.url, "--b", b.url, "--a-name", "old", "--b-name", "new", "--pairs", "6", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "duel", functools.partial(duel, run=made.run, calm=lambda: None))
        assert main(["compare", *flags, *LOAD]) == 0
    return out


def test_a_comparison_leaves_a_sentence_its_runs_and_a_page(compared: Path, b: Serving) -> None:
    document = told(compared)
    assert str(document["sentence"]).startswith("ttft_p50 of new against old: ")
    assert str(document["sentence"]).endswith(": better")
    assert (document["claimed"], document["schema"]) == (True, 1)
    assert isinstance(document["figures"], dict)
    assert document["figures"]["ttft_p50_ms"]["a"] == pytest.approx(200, rel=0.1)
    assert document["figures"]["attainment_percent"]["verdict"] == "no difference"
    runs = sorted(path.name for path in (compared / "runs").iterdir())
    assert (runs[:2], runs[-2:], len(runs)) == (["floor-01-1", "floor-01-2"], ["pair-06-a", "pair-06-b"], 24)
    kept = folder.read(compared / "runs" / "pair-06-b")
    assert (kept.config.url, kept.config.verb, len(kept.records)) == (b.url, "compare", 40)
    assert str(document["sentence"]) in (compared / "report.html").read_text()
    assert sorted(path.suffix for path in (compared / "plots").iterdir()) == [".png"] * 3 + [".svg"] * 3


def test_recorded_runs_are_compared_where_they_asked_the_same(
    compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = compared / "runs"
    sides = [",".join(str(runs / f"pair-{n:02}-{which}") for n in range(1, 7)) for which in "ab"]
    assert main(["compare", "--folders", *sides, "--out", str(tmp_path / "again")]) == 0
    said = capsys.readouterr().out
    assert "6 pairs" in said
    assert "not claimed: there is no A/A floor" in said
    assert told(tmp_path / "again")["claimed"] is False
    strangers = [str(runs / "pair-01-a"), str(runs / "pair-02-b")]
    assert main(["compare", "--folders", *strangers]) == 1
    assert "nothing can be claimed: no run of A asked the same as a run of B" in capsys.readouterr().err
    assert main(["compare", "--folders", strangers[0], strangers[0]]) == 2


@pytest.mark.usefixtures("few")
def test_a_server_that_dies_in_the_middle_leaves_what_was_measured(
    a: Serving, them: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with serving(0.0) as mortal:
        them.ttft[mortal.url] = 0.1

        def run(target: Target, schedule: Schedule, *, drain_s: float) -> Run:
            if len(them.asked) == 2 + 6:
                mortal.die()
            ran = them.run(target, schedule, drain_s=drain_s)
            if target.url != mortal.url or mortal.process.poll() is None:
                return ran
            gone = tuple(record(one.index, one.at or 0.0, 0.0, outcome="connect") for one in schedule.requests)
            return replace(ran, records=gone)

        monkeypatch.setattr(compare, "duel", functools.partial(duel, run=run, calm=lambda: None))
        flags = [
            "--a",
            a.url,
            "--b",
            mortal.url,
            "--b-name",
            "mortal",
            "--pairs",
            "8",
            "--floor-pairs",
            "1",
            "--out",
            str(out),
        ]
        assert main(["compare", *flags, *LOAD]) == 1
    error = capsys.readouterr().err
    assert error.startswith("headrace-bench: mortal went away in pair 4: ")
    assert error.count("\n") == 1
    document = told(out)
    assert isinstance(document["pairs"], list)
    assert len(document["pairs"]) == 3
    assert document["claimed"] is False


@pytest.mark.parametrize("where", ["calm", "keep"])
def test_an_interrupt_between_two_runs_leaves_what_was_measured(
    where: str, a: Serving, b: Serving, them: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def calm() -> None:
        if where == "calm" and len(them.asked) == 12 + 4:
            raise KeyboardInterrupt

    def summarise(*given: Any) -> Summary:
        if where == "keep" and len(them.asked) == 12 + 5:
            raise KeyboardInterrupt
        return summary.summarise(*given)

    monkeypatch.setattr(compare, "duel", functools.partial(duel, run=them.run, calm=calm))
    monkeypatch.setattr(compare, "summarise", summarise)
    out = tmp_path / "out"
    assert main(["compare", "--a", a.url, "--b", b.url, "--pairs", "6", "--out", str(out), *LOAD]) == 130
    assert capsys.readouterr().err == "headrace-bench: interrupted between two runs; what was measured is kept\n"
    document = told(out)
    assert isinstance(document["pairs"], list)
    assert len(document["pairs"]) == 2
    assert "it ended before its time: interrupted" in (out / "report.html").read_text()


@pytest.mark.usefixtures("few")
def test_no_pair_that_counts_is_invalid(
    a: Serving, b: Serving, them: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    them.invalid = lambda n, target: (f"requests were sent late: p99 {n} ms",)
    out = tmp_path / "out"
    assert (
        main(["compare", "--a", a.url, "--b", b.url, "--pairs", "1", "--floor-pairs", "1", "--out", str(out), *LOAD])
        == 1
    )
    said = capsys.readouterr().out
    assert "INVALID" in said
    assert "4 pairs: requests were sent late" in said
    assert "INVALID" in (out / "report.html").read_text()


@pytest.mark.usefixtures("few")
def test_a_server_that_we_start_is_ended(
    a: Serving, them: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    them.ttft = _Any({})
    out = tmp_path / "out"
    start = shlex.join(command(0.0, port="{port}"))
    flags = ["--a-cmd", start, "--b", a.url, "--pairs", "1", "--floor-pairs", "1", "--out", str(out)]
    assert main(["compare", *flags, *LOAD]) == 0
    assert (out / "a.log").read_text().startswith("http://127.0.0.1:")
    wrong = [sys.executable, "-c", "print('no such thing')", "{port}"]
    flags = ["--a-cmd", shlex.join(wrong), "--b", a.url, "--out", str(tmp_path / "other")]
    assert main(["compare", *flags, *LOAD]) == 1
    assert "no such thing" in capsys.readouterr().err


class _Any(dict[str, float]):
    def __missing__(self, key: str) -> float:
        return 0.1


@pytest.mark.parametrize(
    ("flags", "line", "status"),
    [
        (["--a", "http://127.0.0.1:9"], "which server is B?", 2),
        (["--a", "http://127.0.0.1:9", "--a-cmd", "x {port}", "--b", "A"], "which server is A?", 2),
        (["--a", "http://127.0.0.1:9", "--b", "A"], "A: http://127.0.0.1:9: no server answers there", 1),
        (["--a", "A", "--b", "A", "--b-model", "other"], "B: ", 1),
        (["--a", "A", "--b", "A", "--primary", "speed"], "--primary", 2),
        (["--a", "A", "--b", "A", "--a-name", "x", "--b-name", "x"], "both sides are called x", 2),
        (["--a-cmd", "server", "--b", "A"], "where does it listen?", 2),
        (["--a", "A", "--b", "A", "--slo", "fast"], "SLO 'fast'", 2),
        (["--a", "A", "--b", "A", "--pairs", "5"], "--pairs 5: below 6 no difference can be told from chance", 2),
        (["--a", "A", "--b", "A", "--floor-pairs", "5"], "--floor-pairs 5: below 6", 2),
        (["--a", "A", "--b", "A", "--seed", "-1"], "--seed", 2),
        (["--a", "http://a..b", "--b", "A"], "a host that no name can be", 2),
        (["--folders", "nowhere", "neither"], "nowhere: no such folder", 2),
    ],
)
def test_what_cannot_be_is_one_line(
    flags: list[str], line: str, status: int, a: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [a.url if flag == "A" else flag for flag in flags]
    with pytest.raises(SystemExit) as ended:  # argparse raises it, the program too
        sys.exit(main(["compare", *given, *LOAD, "--out", str(tmp_path / "out")]))
    assert ended.value.code == status
    error = capsys.readouterr().err
    assert line in error
    assert error.startswith("headrace-bench: ")
    assert error.count("\n") == 1


def test_a_folder_that_has_something_in_it_is_left_alone(
    a: Serving, b: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept").write_text("mine")
    assert main(["compare", "--a", a.url, "--b", b.url, "--out", str(tmp_path), *LOAD]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_wrong_key_is_said(a: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(0.0, key="right") as locked:
        flags = ["--a", a.url, "--b", locked.url, "--key", "wrong", "--out", str(tmp_path / "out")]
        assert main(["compare", *flags, *LOAD]) == 1
    error = capsys.readouterr().err
    assert "B: " in error
    assert "401" in error
    assert not (tmp_path / "out").exists()
