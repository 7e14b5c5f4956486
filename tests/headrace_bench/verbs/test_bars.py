from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from headrace_bench.__main__ import main
from headrace_bench.lab import Lab
from headrace_bench.verbs.bars import judge, measure


@pytest.mark.parametrize(
    ("value", "sign", "bar", "word"),
    [
        (0.93, ">=", 0.93, "met"),
        (0.9, ">=", 0.93, "MISSED"),
        (5.1, "<=", 5, "MISSED"),
        (5.0, "<=", 5, "met"),
        (200, "<", 200, "MISSED"),
        (None, "<=", 5, "MISSED"),
        (float("nan"), "<=", 5, "MISSED"),
    ],
)
def test_a_bar_is_judged_as_written(value: float | None, sign: str, bar: float, word: str) -> None:
    assert judge("decode", "ratio", value, sign, bar).endswith(f"  {word}")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (subprocess.CalledProcessError(3, ["python", "-c", "a\nb"], stderr="Traceback\nno model\n"),
         "the client ended with status 3: no model"),
        (subprocess.CalledProcessError(-9, ["x"]), "the client ended with status -9"),
        (subprocess.TimeoutExpired(["x"], 900.0), "the client was not done within 900 s"),
        (ConnectionError(), "ConnectionError"),
    ],
)  # fmt: skip
def test_a_client_that_fails_is_one_line(
    error: Exception, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Lab) -> dict[str, Any]:
        raise error

    assert measure(Lab(Path("m"), tmp_path), "first-token", {"decode": fail}, (), ["decode"]) == 1
    assert capsys.readouterr().err == f"headrace-bench: decode: {line}\n"


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["busy"], "--model"),
        (["busy", "--model", "m"], "--peerload"),
        (["busy", "--model", "m", "--peerload", "p", "--only", "nonsense"], "choose from single, shared"),
        (["busy", "--model", "m", "--peerload", "p", "--peers", "vllm"], "--peers vllm"),
        (["memory", "--model", "m", "--only", "decode"], "choose from restore, turns"),
        (["first-token", "--model", "m", "--only", "turns"], "choose from start, decode"),
    ],
)
def test_misuse_is_one_line(
    argv: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.startswith("headrace-bench: ")
    assert said.count("\n") == 1
