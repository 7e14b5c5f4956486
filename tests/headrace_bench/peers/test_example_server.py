from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from headrace_bench.fault import Fault
from headrace_bench.peers import example_server, kept


def archive(folder: Path, *names: str) -> Path:
    path = folder / "llama_cpp_python-1.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()))
    return path


def test_one_file_is_taken_of_the_archive(tmp_path: Path) -> None:
    path = archive(tmp_path, "p-1/setup.py", "p-1/examples/server/server.py")
    example_server.extract(path, tmp_path / "server.py")
    assert (tmp_path / "server.py").read_text() == "p-1/examples/server/server.py"
    assert not (tmp_path / "p-1").exists()


def test_an_archive_without_it(tmp_path: Path) -> None:
    with pytest.raises(Fault, match=r"has no examples/server/server\.py"):
        example_server.extract(archive(tmp_path, "p-1/server.py"), tmp_path / "server.py")


def test_it_is_there_once_it_is_complete(tmp_path: Path) -> None:
    place = tmp_path / f"server.py-{kept.engine_version()}"
    place.mkdir()
    (place / "server.py").touch()
    assert example_server.locate(tmp_path) is None
    (place / ".complete").touch()
    source = example_server.locate(tmp_path)
    assert source == place / "server.py"
    assert example_server.python(source) == place / "venv" / "bin" / "python"
    assert example_server.version(source) == f"llama-cpp-python {kept.engine_version()}"
    (place / "server.py").unlink()
    assert example_server.locate(tmp_path) is None


def test_a_download_without_the_source_is_no_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "environment", lambda folder: folder / "bin" / "python")
    monkeypatch.setattr(kept, "pip", lambda *_: None)
    monkeypatch.setattr(kept, "share_engine", lambda _: None)
    place = tmp_path / f"server.py-{kept.engine_version()}"
    place.mkdir()
    with pytest.raises(Fault, match="pip brought no source archive of llama-cpp-python=="):
        example_server.install(tmp_path)
    assert example_server.locate(tmp_path) is None
    archive(place, "p-1/examples/server/server.py")
    example_server.install(tmp_path)
    assert example_server.locate(tmp_path) == place / "server.py"
    assert sorted(path.name for path in place.iterdir()) == [".complete", "server.py"]
