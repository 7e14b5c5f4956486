from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli.admin_double import desk
from headrace.cli import main

READY: dict[str, Any] = {
    "name": "a", "kind": "llama", "model": "smollm2-135m", "family": "f", "state": "ready", "seconds": 7300.0,
    "reason": "", "weights": {"chat": 0.9, "old": 0.0}, "leases": 3, "healthy": True, "predicted_ttft_ms": 85.4,
    "memory_bytes": 300 * 2**20,
}  # fmt: skip
GONE = {
    **READY, "name": "b", "state": "gone", "seconds": 3.2, "weights": {}, "reason": "no such file", "leases": 0,
    "predicted_ttft_ms": None, "memory_bytes": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["engines", *arguments])
    return caught.value.code if isinstance(caught.value.code, int) else 0


def test_a_row_for_each_and_why_one_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    with desk(
        [(200, {"engines": [READY, {**READY, "name": "c", "healthy": False, "seconds": 130.0}, GONE]})]
    ) as server:
        assert status_of("--at", server.url) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["engine", "kind", "model", "state", "for", "answers", "leases", "TTFT", "memory"]
    assert lines[1] == [
        "a",
        "llama",
        "smollm2-135m",
        "ready",
        "2",
        "h",
        "chat",
        "90",
        "%",
        "3",
        "85",
        "ms",
        "300",
        "MiB",
    ]
    assert lines[2][3:7] == ["ready,", "unwell", "2", "min"]
    assert lines[3] == ["b", "llama", "smollm2-135m", "gone", "3", "s", "–", "0", "–", "–"]
    assert lines[4:] == [["b:", "no", "such", "file"]]


def test_one_that_drains_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    with desk([(200, {"engines": [{**READY, "state": "draining", "healthy": False}]})]) as server:
        assert status_of("--at", server.url) == 0
    assert "unwell" not in capsys.readouterr().out


def test_without_engines_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with desk([(200, {"engines": []})]) as server:
        assert status_of("--at", server.url) == 0
    assert capsys.readouterr().out == "There are no engines.\n"
