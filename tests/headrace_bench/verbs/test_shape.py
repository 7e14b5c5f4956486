from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from headrace_bench.shapes import made
from headrace_bench.verbs import shape


def test_it_prints_where_the_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Path, int]] = []

    def file(folder: Path, say: object, seed: int) -> Path:
        asked.append((folder, seed))
        return folder / "it.gguf"

    monkeypatch.setattr(made, "file", file)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parser = argparse.ArgumentParser()
    shape.add(parser)
    assert shape.run(parser.parse_args([])) == 0
    assert shape.run(parser.parse_args(["--folder", "here", "--seed", "3"])) == 0
    assert asked == [(tmp_path / "headrace" / "shapes", 1), (Path("here"), 3)]
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "headrace" / "shapes" / "it.gguf"), "here/it.gguf"]
