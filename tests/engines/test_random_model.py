"""The file of random weights: what a GGUF reader finds in it, and what depends on what."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.engines.random_model import EMBEDDING, FORMATS, write_model
from headrace.engines.vocab import Vocabulary


def made(path: Path, *formats: str, seed: int = 1) -> bytes:
    write_model(path, formats, seed)
    return path.read_bytes()


def test_formats_and_seed_make_the_bytes(tmp_path: Path) -> None:
    first = made(tmp_path / "a", "Q4_0", "Q4_K")
    assert first == made(tmp_path / "b", "Q4_0", "Q4_K")
    assert first != made(tmp_path / "c", "Q4_0", "Q4_K", seed=2)


def test_another_format_changes_its_layer_alone(tmp_path: Path) -> None:
    """Q8_0 and Q5_K differ in size, so what is behind the layer moves; what is before and behind stays as it is."""
    one, other = (made(tmp_path / form, "Q4_0", form) for form in ("Q8_0", "Q5_K"))
    tail = EMBEDDING * EMBEDDING // 32 * 18  # the output's matrix, Q4_0
    assert one[-tail:] == other[-tail:]
    assert len(one) != len(other)


@pytest.mark.parametrize("form", FORMATS)
def test_the_library_takes_every_format(form: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, (form,))
    assert Vocabulary.open(path).size == EMBEDDING
