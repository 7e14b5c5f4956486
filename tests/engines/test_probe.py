from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from headrace.core.errors import StartupError
from headrace.engines.probe import check_vocabulary, main
from tiny_gguf import ARRAY, TEXT, TOKENS, tiny_gguf

pytestmark = pytest.mark.real

ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GGML_NO_BACKTRACE": "1"}


def test_a_good_file_passes(tmp_path: Path) -> None:
    check_vocabulary(tiny_gguf(tmp_path / "x.gguf"), ENVIRON)


def test_one_that_ends_the_library_is_one_line(tmp_path: Path) -> None:
    twice = tiny_gguf(tmp_path / "x.gguf", tokens=(ARRAY, (TEXT, [*TOKENS[:-1], TOKENS[0]])))
    with pytest.raises(StartupError, match=r"SIGABRT: .*GGML_ASSERT") as caught:
        check_vocabulary(twice, ENVIRON)
    assert "\n" not in caught.value.message


def test_one_that_is_refused_is_refused_in_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.gguf").touch()
    with pytest.raises(StartupError, match="is empty"):
        check_vocabulary(tmp_path / "x.gguf", ENVIRON)
    assert main(str(tmp_path / "x.gguf")) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(str(tiny_gguf(tmp_path / "y.gguf"))) == 0


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="0 s"):
        check_vocabulary(tiny_gguf(tmp_path / "x.gguf"), ENVIRON, timeout_s=0.0)
