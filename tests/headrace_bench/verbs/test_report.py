from __future__ import annotations

from pathlib import Path

import pytest

from bench_runs import health, records, schedule
from headrace_bench.__main__ import main
from headrace_bench.figures.slo import PROFILES
from headrace_bench.figures.summary import summarise
from headrace_bench.report.folder import Journal, config


def folder(path: Path, *, whole: bool) -> Path:
    plan, ends = schedule(12), records(12)
    made = config(
        verb="run", command=["headrace-bench", "run"], url="http://h:1", model="demo", seed=7, wall="w", flags={}
    )
    with Journal(path, made, plan) as journal:
        for record in ends[:9]:
            journal(record)
        if whole:
            journal.finish(ends[:9], health(), summarise(plan, ends[:9], health(), PROFILES["chat"]))
    return path


def test_the_page_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = folder(tmp_path / "run", whole=True)
    measured = (where / "requests.jsonl").read_bytes(), (where / "summary.json").read_bytes()
    assert main(["report", str(where)]) == 0
    assert (where / "report.html").read_text().startswith("<!doctype html>")
    assert (where / "plots/ttft.png").is_file()
    shown = capsys.readouterr().out
    assert str(where / "report.html") in shown
    assert "INVALID" not in shown
    assert ((where / "requests.jsonl").read_bytes(), (where / "summary.json").read_bytes()) == measured


def test_a_run_that_was_cut_short_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder(tmp_path / "run", whole=False))]) == 0
    assert capsys.readouterr().out.startswith("INVALID: this run does not count\n  the run was cut short: 9 of 12")


def test_a_folder_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"headrace-bench: {tmp_path}: not a run's folder, it has no config.json\n"
