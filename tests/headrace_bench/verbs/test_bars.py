from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace_bench.__main__ import main
from headrace_bench.verbs import first_token, memory
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


def test_every_bar_belongs_to_a_part() -> None:
    assert {bar[0] for bar in first_token.BARS} == set(first_token.PARTS)
    assert {bar[0] for bar in memory.BARS} == set(memory.PARTS)


def test_the_bars_of_memory() -> None:
    assert [(figure, sign, bar) for _, figure, sign, bar in memory.BARS] == [
        ("ram_times", ">=", 100),
        ("ssd_times", ">=", 30),
        ("p95_ratio", "<=", 0.2),
        ("restart_ratio", "<=", 1.5),
        ("copy_ratio", ">=", 1.5),
        ("prose_ratio", ">=", 0.98),
        ("right", ">=", 8),
    ]


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


def test_the_table_of_an_earlier_run_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, ms in (("headrace", 50.0), ("server.py", 100.0)):
        record = {"server": name, "round": 1, "result": {"single": {"ttft": {"p50": ms}}}}
        (tmp_path / f"{name}-1.json").write_text(json.dumps(record))
    assert main(["busy", "--table", str(tmp_path), "--only", "single"]) == 0
    assert "| single | TTFT p50, ms | 50 | 100 | server.py | 0.5 | <= 1 | met |" in capsys.readouterr().out
