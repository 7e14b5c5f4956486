from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from headrace_bench import gateways, idle
from headrace_bench.fault import Fault, Misuse
from headrace_bench.idle import Plan, Subject
from headrace_bench.report import table as tables
from headrace_bench.server import Server
from headrace_bench.verbs import idle as verb


def asked(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.add(parser)
    parsed = parser.parse_args(list(argv))
    parsed.verb, parsed.command = "idle", ("headrace-bench", "idle", *argv)
    return parsed


FOUND = {"held": 10, "refused": 0, "ended": 0, "kb_each": 41.0, "ttft_ratio": 1.1, "again_ratio": 1.0, "files_left": 2}


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--url", "http://127.0.0.1:1", "--model", "m", "--queued", "1"], "one server or the other"),
        (["--url", "http://127.0.0.1:1"], "--model: of the server at --url"),
    ],
)
def test_misuse_is_one_line(argv: list[str], why: str) -> None:
    with pytest.raises(Misuse, match=why):
        verb.run(asked(*argv))


@pytest.mark.parametrize("url", ["http://192.0.2.1:80", "http://127.0.0.1:9"])
def test_a_server_whose_process_is_not_seen(url: str, tmp_path: Path) -> None:
    with pytest.raises(Fault, match="its memory cannot be measured"):
        verb.run(asked("--url", url, "--model", "m", "--streams", "2", "--out", str(tmp_path / "out")))


def test_a_server_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Subject, Subject | None, Plan]] = []

    def measure(subject: Subject, beside: Subject | None, plan: Plan, _say: Any) -> dict[str, Any]:
        seen.append((subject, beside, plan))
        return FOUND

    monkeypatch.setattr(idle, "measure", measure)
    out = tmp_path / "out"
    with gateways.upstream(tmp_path) as server:
        argv = ["--url", server.url, "--model", "scripted", "--key", "SECRET", "--streams", "10", "--out", str(out)]
        assert verb.run(asked(*argv)) == 0
        ((subject, beside, plan),) = seen
        assert subject.pids == server.pids()
    assert (subject.key, beside, plan.files_each, plan.probes) == ("SECRET", None, 1, 200)
    table = tables.read(out)
    assert ("memory a stream, KB", "41", "<= 40", "MISSED") in table.rows
    assert ("TTFT with the streams ÷ without", "1.1", "<= 1.2", "met") in table.rows
    assert "SECRET" not in table.command
    assert json.loads((out / "idle.json").read_text()) == FOUND


def test_a_limit_of_the_server_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "allowed", lambda _pid: 64)
    with gateways.upstream(tmp_path) as server, pytest.raises(Fault, match="may open 64 files and 100 are needed"):
        verb.run(asked("--url", server.url, "--model", "m", "--streams", "100", "--out", str(tmp_path / "out")))


def test_a_gateway_has_a_second_one_beside_it_and_a_queue_has_no_probes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[Server] = []

    def enter(self: Server) -> Server:
        entered.append(self)
        return self

    monkeypatch.setattr(Server, "__enter__", enter)
    monkeypatch.setattr(Server, "__exit__", lambda *_: None)
    monkeypatch.setattr(Server, "pids", lambda _self: [1])
    seen: list[tuple[Subject | None, Plan]] = []

    def measure(_subject: Subject, beside: Subject | None, plan: Plan, _say: Any) -> dict[str, Any]:
        seen.append((beside, plan))
        return FOUND

    monkeypatch.setattr(idle, "measure", measure)
    assert verb.run(asked("--streams", "5", "--out", str(tmp_path / "a"))) == 0
    assert [server.name for server in entered] == ["upstream", "headrace", "headrace-beside"]
    assert seen[0][0] is not None
    assert seen[0][1].files_each == 2
    assert verb.run(asked("--queued", "0.5", "--streams", "5", "--out", str(tmp_path / "b"))) == 0
    assert "scripted:0.5" in entered[-1].command
    assert "engine.max_waiting=65536" in entered[-1].command
    assert (seen[1][0], seen[1][1].probes, seen[1][1].files_each) == (None, 0, 1)
    assert any("no probes" in note for note in tables.read(tmp_path / "b").notes)


def test_whatever_a_server_does_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> dict[str, Any]:
        raise ConnectionResetError(104, "reset")

    monkeypatch.setattr(idle, "measure", fails)
    with gateways.upstream(tmp_path) as server, pytest.raises(Fault, match="ConnectionResetError"):
        verb.run(asked("--url", server.url, "--model", "m", "--streams", "2", "--out", str(tmp_path / "out")))
