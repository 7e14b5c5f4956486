from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.engines import footing as module
from headrace.engines.footing import Footing, load_rung, rung_file, save_rung
from headrace.engines.ladder import Ending, Kept, llama_rungs

SETTINGS: dict[str, Any] = {"extra_buffers": True, "flash_attention": True, "kv_type": "f16", "threads_batch": 2}
CRASH = Ending(-signal.SIGSEGV)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"x")
    return file


def standing(model: Path) -> Footing:
    footing = Footing(llama_rungs(SETTINGS), model, model.parent / "rungs")
    footing.begin(SETTINGS)
    return footing


def test_it_falls_rung_by_rung_and_then_says_why_not() -> None:
    footing = Footing(llama_rungs(SETTINGS))
    footing.begin(SETTINGS)
    assert (footing.depth, footing.note) == (0, "")
    for depth in (1, 2, 3):
        assert footing.fall(CRASH) == ""
        assert footing.depth == depth
        assert "SIGSEGV" in footing.note
    assert "SIGSEGV" in footing.fall(CRASH)
    assert footing.depth == 3


def test_what_does_not_lead_down_is_final() -> None:
    footing = Footing(llama_rungs(SETTINGS))
    assert "SIGKILL" in footing.fall(Ending(-signal.SIGKILL))
    assert footing.depth == 0


def test_the_rung_that_works_is_kept_for_the_next_start(model: Path) -> None:
    footing = standing(model)
    footing.fall(CRASH)
    footing.stand()
    again = standing(model)
    assert (again.depth, again.rung.name) == (1, "no-extra-buffers")
    assert again.note == footing.note
    again.stand()
    assert len(list((model.parent / "rungs").iterdir())) == 1


def test_the_top_is_not_worth_a_file(model: Path) -> None:
    standing(model).stand()
    assert not (model.parent / "rungs").exists()


def test_a_kept_rung_that_fails_too_is_forgotten(model: Path) -> None:
    footing = standing(model)
    footing.fall(CRASH)
    footing.stand()
    again = standing(model)
    while not again.fall(CRASH):
        pass
    assert standing(model).depth == 0


@pytest.mark.parametrize("change", ["build", "machine", "file"])
def test_another_build_machine_or_file_starts_at_the_top(
    model: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    footing = standing(model)
    footing.fall(CRASH)
    footing.stand()
    if change == "file":
        os.utime(model, (5, 5))
    else:
        monkeypatch.setattr(module, change, lambda: "another")
    assert standing(model).depth == 0


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"settings": 3, "why": ""}', b"\xff"])
def test_a_file_that_cannot_be_used_counts_as_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    assert load_rung(tmp_path / "x") is None


def test_what_cannot_be_written_is_not_worth_failing_for(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    save_rung(tmp_path / "file" / "x.json", Kept({}, ""))
    assert load_rung(tmp_path / "file" / "x.json") is None
    assert rung_file(tmp_path, tmp_path / "nowhere").parent == tmp_path
