from __future__ import annotations

from pathlib import Path

from headrace_bench.peers import kept, python_server


def test_it_is_there_once_it_is_complete(tmp_path: Path) -> None:
    place = tmp_path / "llama_cpp.server"
    place.mkdir()
    assert python_server.locate(tmp_path) is None
    (place / ".complete").touch()
    runs = python_server.locate(tmp_path)
    assert runs == place / "venv" / "bin" / "python"
    assert python_server.version(runs) == f"llama-cpp-python {kept.engine_version()}"
