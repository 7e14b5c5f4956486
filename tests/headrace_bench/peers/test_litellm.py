from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from headrace_bench.fault import Fault
from headrace_bench.peers import kept, litellm


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What pip was told; a download brings a file with `wheel` in it."""
    asked: list[tuple[str, ...]] = []

    def act(_python: Path, *words: str) -> None:
        asked.append(words)
        if words[0] == "download":
            folder = Path(words[words.index("--dest") + 1])
            (folder / f"litellm-{litellm.VERSION}-cp310-abi3-any.whl").write_bytes(b"wheel")

    def environment(folder: Path) -> Path:
        folder.mkdir(parents=True)
        return folder / "bin" / "python"

    monkeypatch.setattr(kept, "pip", act)
    monkeypatch.setattr(kept, "environment", environment)
    return asked


def test_only_the_known_file_is_installed(
    tmp_path: Path, pip: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert litellm.locate(tmp_path) is None
    with pytest.raises(Fault, match="not the file whose digest is known"):
        litellm.install(tmp_path)
    assert [words[0] for words in pip] == ["download"], "nothing of it was run"
    assert litellm.locate(tmp_path) is None

    monkeypatch.setattr(litellm, "WHEEL", hashlib.sha256(b"wheel").hexdigest())
    monkeypatch.setattr(kept, "environment", lambda folder: folder / "bin" / "python")
    litellm.install(tmp_path)
    assert pip[1][-1] == f"litellm=={litellm.VERSION}"
    assert pip[2][0] == "install"
    assert pip[2][-1].endswith(".whl[proxy]")
    place = tmp_path / f"litellm-{litellm.VERSION}"
    assert litellm.locate(tmp_path) == place / "venv" / "bin" / "litellm"
    assert not list(place.glob("*.whl"))


def test_no_wheel_at_all(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="no wheel is not the file"):
        litellm.known(tmp_path)


def test_it_gets_nothing_of_ours_and_fetches_nothing() -> None:
    words = litellm.command(Path("/p/venv/bin/litellm"), Path("/out/litellm.yaml"), 4711)
    assert words[:2] == ["env", "-i"]
    told = dict(word.split("=", 1) for word in words if "=" in word)
    assert told["HOME"] == "/out"
    assert told["HTTPS_PROXY"] == litellm.NOBODY
    assert told["NO_PROXY"] == "127.0.0.1"
    assert told["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--num_workers") + 1] == "1"
    assert words[words.index("--telemetry") + 1] == "False"


def test_its_file_names_one_model() -> None:
    text = litellm.config("http://127.0.0.1:1", "scripted")
    assert text.count("model_name:") == 1
    assert "model: openai/scripted\n" in text
    assert "api_base: http://127.0.0.1:1/v1\n" in text


def test_its_version(tmp_path: Path) -> None:
    assert litellm.version(tmp_path / "venv" / "bin" / "litellm") == "litellm of unknown version"
