from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_bench.__main__ import main
from headrace_bench.client.run import Run
from headrace_bench.client.target import Target
from headrace_bench.figures import slo
from headrace_bench.figures.summary import summarise
from headrace_bench.load.schedule import Planned, Schedule
from headrace_bench.record import Health, Outcome, Record
from headrace_bench.report import folder
from headrace_bench.verbs import flags
from headrace_bench.verbs.run import failed_share, status


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A scripted server in a process of its own, that wants a key."""
    command = [sys.executable, "-m", "headrace_bench.client.scripted", "--limit", "120", "--key", "sesame"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


def command(url: str, out: Path, *more: str) -> list[str]:
    return ["run", "--url", url, "--model", "a", "--key", "sesame", "--out", str(out), *more]


SHORT = ("--arrivals", "constant:20", "--duration", "1", "--warmup", "0.2")


def test_a_run_leaves_a_folder_a_table_and_a_page(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    out = tmp_path / "out"
    assert main(command(url, out, *SHORT)) in (0, 1)  # 1 where this machine is too busy to measure on
    said = capsys.readouterr().out
    assert "TTFT" in said
    assert str(out / "report.html") in said.replace("\n", "")
    found = folder.read(out)
    assert found.summary is not None
    assert found.summary.counts.completed == 20
    assert len(found.records) == 24
    assert found.config.flags["arrivals"] == "constant:20"
    assert found.schedule.kind == "constant:20"
    assert (out / "report.html").stat().st_size > 10_000
    assert "sesame" not in (out / "config.json").read_text()
    assert json.loads((out / "summary.json").read_text())["schema"] >= 1


@pytest.mark.parametrize(("headrace", "server"), [(True, "Headrace"), (False, None)])
def test_what_the_server_says_that_it_is(
    headrace: bool, server: str | None, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = flags.target_of

    def told(given: argparse.Namespace) -> Target:
        return dataclasses.replace(asked(given), headrace=headrace)

    monkeypatch.setattr(flags, "target_of", told)
    assert main(command(url, tmp_path / "out", *SHORT)) in (0, 1)
    assert folder.read(tmp_path / "out").config.server == server


def test_a_folder_that_is_there_is_not_written_to(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    (tmp_path / "mine").write_text("kept")
    assert main(command(url, tmp_path, *SHORT)) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("more", "code", "why"),
    [
        (["--arrivals", "poison:1"], 2, "poison is not a kind"),
        (["--workload", "chat,size=2"], 2, "size is not known here"),
        (["--slo", "fast"], 2, "fast"),
        (["--url", "http://127.0.0.1:9"], 1, "no server answers there"),
        (["--key", "wrong"], 1, "does not take this API key"),
        (["--model", "other"], 1, "it has no model 'other'"),
    ],
)
def test_what_is_wrong_is_one_line_and_no_folder(
    more: list[str], code: int, why: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(command(url, out, *SHORT, *more)) == code
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1
    assert not out.exists()


def signalled(url: str, out: Path, number: signal.Signals) -> tuple[int, str]:
    """Exit status and output of a long load that gets a signal after its first record."""
    load = command(url, out, "--arrivals", "constant:20", "--duration", "100", "--warmup", "0")
    with subprocess.Popen(
        [sys.executable, "-m", "headrace_bench", *load], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        while not (out / "requests.jsonl").is_file() or not (out / "requests.jsonl").stat().st_size:
            assert program.poll() is None
            time.sleep(0.02)
        program.send_signal(number)
        said, _ = program.communicate(timeout=60)
    return program.returncode, said


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_keeps_the_folder(url: str, tmp_path: Path) -> None:
    code, said = signalled(url, tmp_path / "out", signal.SIGINT)
    assert code == 130
    assert "interrupted" in said
    found = folder.read(tmp_path / "out")
    assert found.records
    assert found.health is not None
    assert any("interrupted" in line for line in found.health.invalid)
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_load_that_is_told_to_end_keeps_what_it_wrote(url: str, tmp_path: Path) -> None:
    assert signalled(url, tmp_path / "out", signal.SIGTERM)[0] == 143
    found = folder.read(tmp_path / "out")
    assert found.records
    assert not found.torn


def test_a_missing_library_costs_the_page_and_not_the_run(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: Path) -> Path:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr("headrace_bench.report.page.make", missing)
    assert main(command(url, tmp_path / "out", *SHORT)) in (0, 1)
    assert "no page: it needs matplotlib: pip install" in capsys.readouterr().err
    assert folder.read(tmp_path / "out").summary is not None


def ran(*outcomes: Outcome, invalid: tuple[str, ...] = (), interrupted: bool = False) -> Run:
    requests = tuple(
        Planned(index=i, at=i / 10, messages=(), max_tokens=1, prompt_tokens=1) for i in range(len(outcomes))
    )
    records = tuple(
        Record(index=i, scheduled=i / 10, dispatched=i / 10, outcome=outcome) for i, outcome in enumerate(outcomes)
    )
    quiet: dict[str, Any] = dict.fromkeys(("lag_p50", "lag_p99", "lag_max", "steal", "asked_rate", "sent_rate"))
    numbers: dict[str, Any] = dict.fromkeys(("loop_lag_p99", "loop_lag_max", "cpu", "gc_longest", "load_average"), 0.0)
    health = Health(**quiet, **numbers, gc_pauses=0, invalid=invalid)
    schedule = Schedule(seed=1, kind="x", users=None, duration=10.0, warmup=0.0, requests=requests)
    return Run(schedule, records, health, Target("http://127.0.0.1:9", "m"), "then", interrupted)


@pytest.mark.parametrize(
    ("done", "share", "code"),
    [
        (ran("ok", "ok"), 0.0, 0),
        (ran("ok", "http", "ok", "truncated"), 0.5, 1),
        (ran(*("ok",) * 199, "http"), 0.005, 0),
        (ran("hung_up", "ok", "ok"), 0.0, 0),
        (ran("hung_up", "hung_up"), 0.0, 0),
        (ran(), 1.0, 1),
        (ran("ok", invalid=("late",)), 0.0, 1),
        (ran("ok", invalid=("interrupted",), interrupted=True), 0.0, 130),
    ],
)
def test_the_exit_status(done: Run, share: float, code: int) -> None:
    summary = summarise(done.schedule, done.records, done.health, slo.parse("chat"))
    assert failed_share(summary) == pytest.approx(share)
    assert status(done, summary, 0.01) == code
