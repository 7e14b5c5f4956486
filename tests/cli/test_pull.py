from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli import pull
from headrace.core.errors import StartupError
from headrace.models import Progress


class FakeStore:
    def __init__(self, directory: Path, *, progress: Progress, accept_terms: bool) -> None:
        self.directory, self.progress, self.accept_terms = directory, progress, accept_terms

    def resolve(self, name: str) -> Path:
        if name == "none":
            raise StartupError("there is no model none")
        if name == "gemma3-270m" and not self.accept_terms:
            raise StartupError("terms")
        if name == "new":
            for done in (1, 2):
                self.progress("Unpacking new.gguf", done, 2)
        return self.directory / f"{name}.gguf"


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pull, "Store", FakeStore)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_it_says_where_the_file_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert pull.run("smollm2-135m") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        f"smollm2-135m (Apache-2.0) is at {tmp_path}/headrace/models/smollm2-135m.gguf",
        "Serve it with: headrace serve smollm2-135m",
    ]
    assert captured.err == ""


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    pull.run("new")
    captured = capsys.readouterr()
    assert "Unpacking new.gguf" in captured.err
    assert "Unpacking" not in captured.out


def test_a_refusal_is_passed_on_and_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StartupError):
        pull.run("none")
    assert capsys.readouterr() == ("", "")


def test_terms_that_are_accepted_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StartupError, match="terms"):
        pull.run("gemma3-270m")
    assert pull.run("gemma3-270m", accept_terms=True) == 0
    captured = capsys.readouterr()
    assert "gemma3-270m comes under the Gemma Terms of Use, which you accept" in captured.err
    assert "https://ai.google.dev/gemma/terms" in captured.err
    assert "gemma3-270m (Gemma Terms of Use) is at" in captured.out
    pull.run("smollm2-135m", accept_terms=True)
    assert capsys.readouterr().err == ""
