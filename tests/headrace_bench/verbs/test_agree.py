from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace_bench import agreement
from headrace_bench.__main__ import main
from headrace_bench.agreement import Agreement, Seen
from headrace_bench.client.target import Target


@pytest.fixture
def other(tmp_path: Path) -> Path:
    file = tmp_path / "other.py"
    file.write_text("")
    return file


@pytest.mark.parametrize(("ours", "status"), [(100.0, 0), (110.0, 1)])
def test_whether_they_agree_is_the_exit_status(
    ours: float,
    status: int,
    other: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    targets: list[Target] = []

    def fake(target: Target, peerload: Path, rounds: int) -> Agreement:
        targets.append(target)
        return Agreement((Seen(ours, 20.0),) * rounds, (Seen(100.0, 20.0),) * rounds)

    monkeypatch.setattr(agreement, "agree", fake)
    file = tmp_path / "rounds.json"
    assert main(["agree", "--peerload", str(other), "--rounds", "3", "--json", str(file)]) == status
    assert f"{ours / 100:.4f}" in capsys.readouterr().out
    assert len(json.loads(file.read_text())) == 3
    assert targets[0].model.startswith("even:")
    assert not targets[0].keep_alive  # the other client opens a connection a request


def test_a_client_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agree", "--peerload", "nowhere.py"]) == 2
    assert "--peerload nowhere.py: there is no such file" in capsys.readouterr().err


def test_ours_is_measured_on_a_scripted_server() -> None:
    from headrace_bench.client.rehearsal import server

    with server() as url:
        found = agreement.measured(Target(url, "even:20:2:4", keep_alive=False), 1)
    assert found.ttft_p50 >= 20
    assert found.longest_gap > 0


@pytest.mark.parametrize("flag", [["--model", "m"], ["--key", "k"], ["--http2"]])
def test_what_the_scripted_server_has_not_is_refused(
    flag: list[str], other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["agree", "--peerload", str(other), *flag]) == 2
    assert "of the server at --url" in capsys.readouterr().err
