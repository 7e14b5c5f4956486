from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from headrace_bench.fault import Fault, Misuse
from headrace_bench.peers import catalogue, vllm
from headrace_bench.peers.catalogue import ROWS, Row, find, named


def test_peers_by_name() -> None:
    assert named("") == list(ROWS)
    assert named("vllm, llama-server") == ["llama-server", "vllm"]
    with pytest.raises(Misuse, match="--only tgi: no such peer; choose from llama-server"):
        named("vllm,tgi")


def test_gateways_are_no_servers() -> None:
    assert named("", catalogue.GATEWAYS) == ["litellm"]
    with pytest.raises(Misuse, match="--only vllm: no such peer; choose from litellm"):
        named("vllm", catalogue.GATEWAYS)
    with pytest.raises(Misuse, match="--only litellm"):
        named("litellm")


def test_a_gateway_s_place_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(lambda home: home / "litellm", lambda _: None, lambda _: "litellm 1", "a minute")
    monkeypatch.setattr(catalogue, "GATEWAYS", {"litellm": row})
    found = find(["litellm"], tmp_path, None, print)
    assert (dict(found.versions), dict(found.places)) == ({"litellm": "litellm 1"}, {"litellm": tmp_path / "litellm"})


def put(monkeypatch: pytest.MonkeyPatch, rows: dict[str, Row]) -> None:
    monkeypatch.setattr(catalogue, "ROWS", rows)


def test_what_is_missing_is_installed_and_a_failure_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: set[str] = set()
    tried: list[str] = []

    def broken(_home: Path) -> None:
        tried.append("broken")
        raise Fault("no compiler")

    def works(_home: Path) -> None:
        tried.append("works")
        there.add("works")

    bad = Row(lambda _: None, broken, str, "long")
    good = Row(lambda home: home / "python" if "works" in there else None, works, lambda _: "p 1.0", "a minute")
    put(monkeypatch, {"llama-server": bad, "llama-server-tuned": bad, "llama_cpp.server": good})
    said: list[str] = []

    found = find(list(catalogue.ROWS), tmp_path, None, said.append)
    assert set(found.left_out) == set(catalogue.ROWS)
    assert not tried
    found = find(list(catalogue.ROWS), tmp_path, None, said.append, install=True)
    assert tried == ["broken", "works"], "two peers of one program: one try"
    assert found.left_out == {"llama-server": "no compiler", "llama-server-tuned": "no compiler"}
    assert found.versions == {"llama_cpp.server": "p 1.0"}
    assert found.programs.python_server == tmp_path / "python"
    assert found.programs.llama_server is None
    assert said == ["installing llama-server: long", "installing llama_cpp.server: a minute"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), tarfile.ReadError("not a gzip file")])
def test_whatever_breaks_an_installation_stops_nobody(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_home: Path) -> None:
        raise error

    good = Row(lambda home: home / "python", lambda _: None, lambda _: "p 1.0", "")
    put(monkeypatch, {"llama-server": Row(lambda _: None, broken, str, "long"), "llama_cpp.server": good})
    found = find(list(catalogue.ROWS), tmp_path, None, lambda _: None, install=True)
    assert found.left_out == {"llama-server": str(error)}
    assert list(found.versions) == ["llama_cpp.server"]


def test_an_environment_without_our_library_leaves_its_server_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Row(lambda home: home / "python", lambda _: None, lambda _: "p 1.0", "")
    half = Row(lambda home: home / "server.py" / "server.py", lambda _: None, str, "")
    put(monkeypatch, {"server.py": half, "llama_cpp.server": good})
    found = find(list(catalogue.ROWS), tmp_path, None, lambda _: None)
    assert list(found.left_out) == ["server.py"]
    assert found.programs.server_py is None
    assert list(found.versions) == ["llama_cpp.server"]


def test_weights_that_cannot_be_made_leave_vllm_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_program: Path, _model: Path) -> Path:
        raise Fault("architecture x")

    monkeypatch.setattr(vllm, "weights", refuse)
    put(monkeypatch, {"vllm": Row(lambda home: home, lambda _: None, str, "")})
    found = find(["vllm"], tmp_path, Path("a.gguf"), print)
    assert (found.left_out, dict(found.versions)) == ({"vllm": "architecture x"}, {})
    assert found.programs.vllm is None
