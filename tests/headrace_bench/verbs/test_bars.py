from __future__ import annotations

from pathlib import Path

import pytest

from headrace_bench.__main__ import main
from headrace_bench.verbs.bars import judge


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
    ("argv", "why"),
    [
        (["busy"], "--model"),
        (["busy", "--model", "m"], "--peerload"),
        (["busy", "--model", "m", "--peerload", "p", "--only", "nonsense"], "choose from single, shared"),
        (["busy", "--model", "m", "--peerload", "p", "--peers", "vllm"], "--peers vllm"),
        (["memory", "--model", "m", "--only", "decode"], "choose from restore, turns"),
        (["first-token", "--model", "m", "--only", "turns"], "choose from decode"),
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
