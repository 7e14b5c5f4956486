"""llama.cpp's quantiser on the demo model: one conversion, shared, takes a second or two."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from headrace.core.errors import StartupError
from headrace.core.quantisation import TARGETS
from headrace.engines.quantiser import file_type, main, make_file, quantise
from headrace.engines.snapshot import file_digest
from headrace.engines.vocab import Vocabulary

pytestmark = pytest.mark.real

ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
Q4_0 = TARGETS["q4_0"]


@pytest.fixture(scope="module")
def converted(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("tuned") / "demo.Q4_0.gguf"
    make_file(demo_model, target, Q4_0.number, 2, ENVIRON)
    return target


def test_a_files_type_is_in_its_metadata(demo_model: Path, converted: Path) -> None:
    assert file_type(demo_model) == 3
    assert file_type(converted) == Q4_0.number


def test_the_model_is_the_same_but_for_its_weights(demo_model: Path, converted: Path) -> None:
    before, after = (Vocabulary.open(path).info("m", 0, 0) for path in (demo_model, converted))
    assert after == before, "vocabulary, chat template and special tokens"
    text = "Tokens are the same: ünïcode 🙂 <|im_end|>"
    ids = [Vocabulary.open(path).encode(text, special=True) for path in (demo_model, converted)]
    assert ids[0] == ids[1]


def test_its_kv_is_never_taken_for_the_original_s(demo_model: Path, converted: Path) -> None:
    """The bytes of the file are part of an engine's fingerprint, which names its KV everywhere."""
    assert file_digest(demo_model) != file_digest(converted)


def test_nothing_is_left_beside_it(converted: Path) -> None:
    assert list(converted.parent.iterdir()) == [converted]


def test_what_is_no_model_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and nothing else, not even a header of the right length")
    folder = tmp_path / "tuned"
    folder.mkdir()
    with pytest.raises(StartupError) as caught:
        make_file(broken, folder / "x.gguf", Q4_0.number, 1, ENVIRON)
    assert "\n" not in caught.value.message
    assert list(folder.iterdir()) == []
    with pytest.raises(StartupError):
        file_type(broken)


def test_a_folder_that_cannot_be_written_is_one_line(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError):
        make_file(demo_model, tmp_path / "none" / "x.gguf", Q4_0.number, 1, ENVIRON)


def test_the_child_tells_its_failure_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert main(str(broken), str(tmp_path / "x"), "2", "1") == 2
    assert "broken.gguf cannot be converted" in capsys.readouterr().err
    with pytest.raises(StartupError):
        quantise(broken, tmp_path / "x", 2, 1)
