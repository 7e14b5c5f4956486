from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from headrace_bench.fault import Fault, Misuse
from headrace_bench.lab import HEADRACE, Lab, Programs
from headrace_bench.peers import catalogue
from headrace_bench.peers.catalogue import Found
from headrace_bench.report import table as tables
from headrace_bench.server import Server, free_port
from headrace_bench.verbs import peers

CLIENT = """
import json, sys
asked = dict(zip(sys.argv[1::2], sys.argv[2::2]))
figures = {"p50": 10.0, "p95": 20.0, "p99": 30.0}
result = {name: {"ttft": figures, "gap": figures} for name in asked["--only"].split(",")}
open(asked["--out"], "w").write(json.dumps(result))
"""


def asked(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    peers.add(parser)
    parsed = parser.parse_args(list(argv))
    parsed.verb, parsed.command = "peers", ("headrace-bench", "peers", *argv)
    return parsed


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    model, client = tmp_path / "some.gguf", tmp_path / "client.py"
    model.touch()
    client.write_text(CLIENT)
    return model, client


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--gguf", "MODEL"], "--peerload PATH"),
        (["--peerload", "CLIENT"], "--gguf MODEL"),
        (["--gguf", "none.gguf", "--peerload", "CLIENT"], "--gguf none.gguf: no such file"),
        (["--gguf", "MODEL", "--peerload", "CLIENT", "--only", "tgi"], "--only tgi"),
        (["--gguf", "MODEL", "--peerload", "CLIENT", "--scenarios", "all"], "--scenarios all"),
        (["--gguf", "MODEL", "--peerload", "CLIENT", "--rounds", "0"], "--rounds 0"),
        (["--gguf", "MODEL", "--peerload", "CLIENT", "--headrace-args", "'a"], "--headrace-args: No"),
        (["--gguf", "MODEL", "--peerload", "CLIENT", "--peers-gguf", "chosen"], "give --by-itself too"),
        (["--gguf", "MODEL", "--peerload", "CLIENT", "--peers-gguf", "none.gguf"], "none.gguf: no such file"),
    ],
)
def test_misuse_is_one_line(argv: list[str], why: str, files: tuple[Path, Path]) -> None:
    names = {"MODEL": str(files[0]), "CLIENT": str(files[1])}
    with pytest.raises(Misuse) as caught:
        peers.run(asked(*(names.get(word, word) for word in argv)))
    assert why in str(caught.value)


def test_a_folder_with_something_in_it_is_not_written_to(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "find", lambda *_, **__: Found(Programs(), {}, {}))
    with pytest.raises(Misuse, match="not empty"):
        peers.run(asked("--gguf", str(files[0]), "--peerload", str(files[1]), "--out", str(tmp_path)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["client.py", "some.gguf"]


def web(self: Lab, *_flags: str, name: str = HEADRACE) -> Server:
    """Something that answers, in the place of a server."""
    port = free_port()
    return Server(
        name,
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(self.folder)],
        url=f"http://127.0.0.1:{port}",
        ready="/",
        log=self.folder / f"{name}.log",
        env={"VLLM_CPU_KVCACHE_SPACE": "2", "LD_LIBRARY_PATH": "/opt/lib"},
    )


def broken(self: Lab, name: str = "llama_cpp.server") -> Server:
    """What stops at once."""
    return Server(
        name, [sys.executable, "-c", "raise SystemExit('no\\nway')"], url="http://127.0.0.1:9", ready="/",
        log=self.folder / "broken.log",
    )  # fmt: skip


def test_one_table_with_commands_versions_and_what_failed(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Found(
        Programs(python_server=Path("/p/python")),
        {"llama_cpp.server": "llama-cpp-python 0.3"},
        {"vllm": "no AVX2 by\n /home/me/x"},
    )
    monkeypatch.setattr(catalogue, "find", lambda *_, **__: found)
    monkeypatch.setattr(Lab, "headrace", web)
    monkeypatch.setattr(Lab, "python_server", broken)
    out = tmp_path / "out"
    argv = ["--gguf", str(files[0]), "--peerload", str(files[1]), "--scenarios", "single", "--rounds", "1"]
    more = ["--headrace-args=--key SECRET", "--out", str(out)]
    assert peers.run(asked(*argv, *more)) == 0

    table = tables.read(out)
    assert table.columns[2:4] == ("headrace", "llama_cpp.server")
    assert table.rows[0] == ("single", "TTFT p50, ms", "**10**", "–", "–", "–", "–")
    assert table.command == (
        "headrace-bench peers --gguf MODEL --peerload client.py --scenarios single --rounds 1 "
        "'--headrace-args=--key …' --out DIR"
    )
    assert table.commands["headrace"].startswith("VLLM_CPU_KVCACHE_SPACE=2 python")
    assert str(tmp_path) not in json.dumps([table.commands, table.command, table.notes])
    assert table.versions["llama_cpp.server"] == "llama-cpp-python 0.3"
    assert "`vllm` was left out: no AVX2 by x" in table.notes
    assert any(note.startswith("round 1: `llama_cpp.server`: NotReady") and "\n" not in note for note in table.notes)
    captured = capsys.readouterr()
    assert tables.markdown(table) in captured.out
    assert "vllm: left out: no AVX2 by" in captured.err


def test_ours_by_itself_and_with_everything_off(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(
        catalogue, "find", lambda *_, **__: Found(Programs(python_server=Path("/p")), {"llama_cpp.server": "1"}, {})
    )
    started: list[tuple[str, bool, str]] = []

    def ours(self: Lab, *flags: str, name: str = HEADRACE) -> Server:
        assert self.cache is not None
        tuned = self.cache / "headrace" / "tuned"
        if not started:  # what a first start leaves
            tuned.mkdir(parents=True)
            made = {"source": {"path": str(self.model)}, "converted": {"path": "/w/some.BF16.gguf"}}
            (tuned / "some.json").write_text(json.dumps(made))
        started.append((name, "engine.prefix_cache=false" in flags, str(self.theirs)))
        return web(self, *flags, name=name)

    def theirs(self: Lab, name: str = "llama_cpp.server") -> Server:
        started.append((name, False, str(self.theirs)))
        return web(self, name=name)

    monkeypatch.setattr(Lab, "headrace", ours)
    monkeypatch.setattr(Lab, "python_server", theirs)
    out = tmp_path / "out"
    argv = ["--gguf", str(files[0]), "--peerload", str(files[1]), "--scenarios", "single", "--rounds", "1"]
    more = ["--by-itself", "--everything-off", "--peers-gguf", "chosen", "--out", str(out)]
    assert peers.run(asked(*argv, *more)) == 0
    assert started == [
        (HEADRACE, False, str(files[0])),
        (HEADRACE, False, "/w/some.BF16.gguf"),
        ("headrace-off", True, "/w/some.BF16.gguf"),
        ("llama_cpp.server", False, "/w/some.BF16.gguf"),
    ]
    table = tables.read(out)
    assert table.columns[2:5] == ("headrace", "headrace-off", "llama_cpp.server")
    assert any("It serves some.BF16.gguf, which it made" in note for note in table.notes)
    assert tables.read(out / "bars").verb == "busy"
    assert not list((tmp_path / "home" / "headrace").iterdir()), "what the first start left is gone"
    assert "first start: " in capsys.readouterr().err


def test_there_is_no_second_table_where_ours_serves_the_file_as_it_is(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(catalogue, "find", lambda *_, **__: Found(Programs(), {}, {}))
    monkeypatch.setattr(Lab, "headrace", web)
    argv = ["--gguf", str(files[0]), "--peerload", str(files[1]), "--by-itself", "--peers-gguf", "chosen"]
    with pytest.raises(Fault, match="serves the file as it is"):
        peers.run(asked(*argv, "--out", str(tmp_path / "out")))


def test_nobody_finished(files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "find", lambda *_, **__: Found(Programs(), {}, {}))
    monkeypatch.setattr(Lab, "headrace", lambda self, *_: broken(self, HEADRACE))
    argv = ["--gguf", str(files[0]), "--peerload", str(files[1]), "--rounds", "1", "--out", str(tmp_path / "out")]
    with pytest.raises(Fault, match="no server finished a round"):
        peers.run(asked(*argv))
    assert tables.read(tmp_path / "out").rows, "what was measured is kept"


def test_only_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        catalogue, "find", lambda *_, **__: Found(Programs(), {"vllm": "vllm-cpu 1"}, {"server.py": "no"})
    )
    assert peers.run(asked("--install")) == 1
    assert capsys.readouterr().err == "server.py: left out: no\nvllm: vllm-cpu 1\n"


def test_a_crowded_machine_is_named(tmp_path: Path) -> None:
    for name, load in (("a", 0.5), ("b", 1000.0)):
        record = {"server": name, "round": 1, "load_average_before": [load, 0.0, 0.0]}
        (tmp_path / f"{name}-1.json").write_text(json.dumps(record))
    (tmp_path / "server.py.json").write_text('{"server": {}, "model": {}}')
    assert peers.busy_machine(tmp_path) == ["round 1: `b`: the load average was 1000.0 when it began"]


def test_ports_and_folders_have_names(tmp_path: Path) -> None:
    record = {
        "command": [
            "/v/bin/python",
            "-m",
            "headrace",
            "serve",
            "/m/a.gguf",
            "--port",
            "4711",
            "--set",
            "tiers.ssd_path=/tmp/x",
            "--key",
            "SECRET",
        ],
        "environment": {},
    }
    (tmp_path / "headrace-1.json").write_text(json.dumps(record))
    assert peers.commands(tmp_path, ["headrace"], {"/m/a.gguf": "MODEL"}) == {
        "headrace": "python -m headrace serve MODEL --port PORT --set tiers.ssd_path=DIR --key …"
    }
