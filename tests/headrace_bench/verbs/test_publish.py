from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench_tables import table
from headrace_bench.report.table import write
from headrace_bench.verbs import publish


def test_it_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- begin: peers --><!-- end: peers -->\n")
    write(tmp_path, table())
    parser = argparse.ArgumentParser()
    publish.add(parser)
    assert publish.run(parser.parse_args(["--page", str(page), str(tmp_path)])) == 0
    assert capsys.readouterr().out == f"{page}: peers\n"
    assert "| TTFT, ms | 12 |" in page.read_text()


def test_a_folder_may_name_its_place(tmp_path: Path) -> None:
    assert publish.split("results/x") == (Path("results/x"), "")
    assert publish.split("results/x=peers-amx") == (Path("results/x"), "peers-amx")
    (tmp_path / "a=b").mkdir()
    assert publish.split(str(tmp_path / "a=b")) == (tmp_path / "a=b", "")
