from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from headrace_bench.fault import Fault
from headrace_bench.first_start import cache, chosen, until_ready
from headrace_bench.server import Server, free_port


def profile(place: Path, name: str, text: str) -> None:
    folder = place / "headrace" / "tuned"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(text)


def test_the_folder_is_fresh_in_the_cache_and_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with cache() as place:
        assert place.parent == tmp_path / "headrace"
        assert not list(place.iterdir())
        (place / "big.gguf").touch()
    assert not place.exists()
    assert (tmp_path / "headrace").is_dir()


def test_what_was_chosen_is_read_from_the_profile(tmp_path: Path) -> None:
    model = tmp_path / "a.gguf"
    assert chosen(tmp_path, model) == model, "nothing was left"
    profile(tmp_path, "other", json.dumps({"source": {"path": "/b.gguf"}, "converted": {"path": "/b.BF16.gguf"}}))
    assert chosen(tmp_path, model) == model, "that is another file's"
    profile(tmp_path, "plain", json.dumps({"source": {"path": str(model)}, "converted": None}))
    assert chosen(tmp_path, model) == model
    profile(tmp_path, "plain", json.dumps({"source": {"path": str(model)}, "converted": {"path": "/a.BF16.gguf"}}))
    assert chosen(tmp_path, model) == Path("/a.BF16.gguf")


def test_a_profile_that_cannot_be_read_is_a_line(tmp_path: Path) -> None:
    profile(tmp_path, "x", "{}")
    with pytest.raises(Fault, match=r"x\.json: not a profile"):
        chosen(tmp_path, tmp_path / "a.gguf")


def test_a_start_is_timed_and_ended(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    server = Server("web", command, url=f"http://127.0.0.1:{port}", ready="/", log=tmp_path / "log")
    assert until_ready(server) > 0
    broken = Server("x", [sys.executable, "-c", "1/0"], url="http://127.0.0.1:9", ready="/", log=tmp_path / "log")
    with pytest.raises(Fault, match="ZeroDivisionError") as caught:
        until_ready(broken)
    assert "\n" not in str(caught.value)
