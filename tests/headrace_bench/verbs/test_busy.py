from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace_bench.__main__ import main


def test_the_table_of_an_earlier_run_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, ms in (("headrace", 50.0), ("server.py", 100.0)):
        record = {"server": name, "round": 1, "result": {"single": {"ttft": {"p50": ms}}}}
        (tmp_path / f"{name}-1.json").write_text(json.dumps(record))
    assert main(["busy", "--table", str(tmp_path), "--only", "single"]) == 0
    assert "| single | TTFT p50, ms | 50 | 100 | server.py | 0.5 | 0.5 | <= 1 | met |" in capsys.readouterr().out
