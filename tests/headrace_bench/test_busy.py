from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench_tables import table
from headrace_bench.busy import keep, measure, read, report, rotate, troubles
from headrace_bench.lab import Lab
from headrace_bench.report.table import read as read_table
from headrace_bench.server import Server, free_port

CLIENT = """
import json, sys
asked = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if asked["--seed"] == "2":
    sys.exit("broke down")
ms = float(asked["--seed"]) * 10
figures = {"ttft": {"p50": ms, "p95": ms}, "chunks_per_s": ms, "failed": 1}
result = {name: figures for name in asked["--only"].split(",")}
open(asked["--out"], "w").write(json.dumps({**result, "asked": asked}))
"""


def test_everybody_is_first_once() -> None:
    names = ["a", "b", "c"]
    assert [rotate(names, turn) for turn in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics").write_text("headrace_up 1\n")
    client = tmp_path / "client.py"
    client.write_text(CLIENT)
    out = tmp_path / "out"
    out.mkdir()
    started: list[str] = []

    def web(name: str) -> Server:
        started.append(name)
        port = free_port()
        place = ["--bind", "127.0.0.1", "--directory", str(tmp_path)]
        command = [sys.executable, "-m", "http.server", str(port), *place]
        return Server(name, command, url=f"http://127.0.0.1:{port}", ready="/", log=tmp_path / "log")

    def broken() -> Server:
        started.append("broken")
        return Server(
            "broken", [sys.executable, "-c", "1/0"], url="http://127.0.0.1:9", ready="/", log=tmp_path / "log"
        )

    servers = {"headrace": lambda: web("headrace"), "web": lambda: web("web"), "broken": broken}
    lab = Lab(Path("some.gguf"), out, rounds=2)
    rounds = measure(lab, servers, ["single", "full"], 3.0, [sys.executable, str(client)])

    assert started == ["headrace", "web", "broken", "web", "broken", "headrace"]
    asked: dict[str, Any] = rounds[0]["web"]["asked"]
    assert (asked["--model"], asked["--only"], asked["--seconds"]) == ("some", "single,full", "3")
    assert rounds[0]["headrace"]["single"]["ttft"]["p50"] == 10.0
    assert "ZeroDivisionError" in rounds[0]["broken"]["failed"]
    assert rounds[1]["headrace"]["failed"].startswith("CalledProcessError")
    assert (out / "headrace-1.metrics").read_text() == "headrace_up 1\n"
    assert "broke down" in (out / "headrace-2.log").read_text()
    assert json.loads((out / "web-1.json").read_text())["command"][0] == sys.executable
    assert read(out) == rounds
    assert "round 2: web" in capsys.readouterr().err


def test_the_report_hides_no_failure() -> None:
    good = {"full": {"chunks_per_s": 9.0, "ttft": {"p95": 5.0}, "failed": 0}}
    some = {"full": {"chunks_per_s": 9.0, "ttft": {"p95": 10.0}, "failed": 3}}
    lines = report(
        [{"headrace": some, "server.py": good}, {"headrace": good, "server.py": {"failed": "no start"}}], ["full"]
    ).splitlines()
    assert "| full | TTFT p95, ms | 10 | 5 | server.py | 2 | 2 | <= 0.7 | MISSED |" in lines
    assert lines[-2:] == ["round 1: headrace: full: 3 requests failed", "round 2: server.py: no start"]


def test_the_bars_are_kept_as_a_table_of_their_own(tmp_path: Path) -> None:
    rounds: list[dict[str, dict[str, Any]]] = [
        {"headrace": {"single": {"ttft": {"p50": 5.0}}}, "server.py": {"failed": "at /home/me/x"}}
    ]
    keep(tmp_path / "bars", table(columns=(), rows=()), rounds, ["single"])
    made = read_table(tmp_path / "bars")
    assert (made.verb, made.columns[:3]) == ("busy", ("scenario", "figure", "headrace"))
    assert made.rows[0][:3] == ("single", "TTFT p50, ms", "5")
    assert made.notes == ("round 1: server.py: at x",)


def test_a_scenario_that_did_not_end_is_told() -> None:
    assert troubles({"mixed": {"failed": "Failed: HTTP 500"}, "full": {"failed": 0}}) == ["mixed: Failed: HTTP 500"]
