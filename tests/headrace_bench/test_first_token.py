from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from headrace_bench import first_token
from headrace_bench.first_token import _figures, _peerload, streams
from headrace_bench.lab import Lab
from headrace_bench.server import Server

ROOT = Path(__file__).parents[2]


def pair(ours: float, theirs: float) -> dict[str, object]:
    def one(x: float) -> dict[str, object]:
        return {
            "single": {"ttft": {"p50": x}, "gap": {"p50": x, "p99": x}},
            "shared": {"cold": {"p95": x}, "warm": {"p95": x}},
            "leave": {"ttft_alone": 10.0, "ttft_after_hang_up": x},
        }

    return {"headrace": one(ours), "llama-server": one(theirs)}


def test_a_figure_is_the_median_of_the_ratios_within_rounds() -> None:
    found = _figures([pair(1, 2), pair(30, 10), pair(10, 10)])
    assert found["single_ttft_p50"] == found["shared_cold_p95"] == 1.0
    assert found["leave"] == 1.0


def client(tmp_path: Path, text: str) -> tuple[Lab, Server]:
    file = tmp_path / "client.py"
    file.write_text(text)
    server = Server("s", [], url="http://127.0.0.1:9", ready="/", log=tmp_path / "log")
    return Lab(Path("m.gguf"), tmp_path, peerload=file), server


def test_a_load_client_that_fails_says_why(tmp_path: Path) -> None:
    lab, server = client(tmp_path, "import sys; sys.exit('no such model')")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        _peerload(lab, server, ["single"], 1)
    assert "no such model" in caught.value.stderr


def test_a_load_client_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, server = client(tmp_path, "import signal; signal.pause()")
    monkeypatch.setattr(first_token, "LIMIT_S", 0.3)
    with pytest.raises(subprocess.TimeoutExpired):
        _peerload(lab, server, ["single"], 1)


def test_streams_are_measured_on_a_real_server(tmp_path: Path) -> None:
    found = streams(Lab(Path("none"), tmp_path), n=8, rate=200.0, tokens=20, idle_s=0.1)
    assert found["wrong"] == 0
    assert found["streams"] == 8
    assert json.dumps(found)


def test_the_laboratory_knows_nothing_of_the_server() -> None:
    for path in (ROOT / "src" / "headrace_bench").glob("*.py"):
        assert not re.search(r"^\s*(from|import) headrace\b", path.read_text(), re.M), path
