from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from headrace.engines.llama_lib import ABORT_CALLBACK, C, load_model, model_meta, recent_log


def test_the_flag_reader_reads_the_flag() -> None:
    flag = ctypes.create_string_buffer(2)
    pointer = ctypes.cast(flag, ctypes.c_void_p)
    assert not ABORT_CALLBACK(pointer)
    flag[0] = b"\1"
    assert ABORT_CALLBACK(pointer)
    flag[0] = b"\0"
    assert not ABORT_CALLBACK(pointer)


def test_metadata(demo_model: Path) -> None:
    model = load_model(demo_model, vocab_only=True)
    assert model
    assert model_meta(model, "general.architecture") == "llama"
    template = model_meta(model, "tokenizer.chat_template")
    assert template is not None
    assert "<|im_start|>" in template
    assert model_meta(model, "no.such.key") is None
    C.llama_model_free(model)


def test_the_library_keeps_quiet_and_its_last_words_are_kept(
    tmp_path: Path, demo_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "é.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    assert not load_model(tmp_path / "é.gguf", vocab_only=True)
    assert "version" in recent_log()
    assert "\n" not in recent_log()
    model = load_model(demo_model, vocab_only=True)
    assert recent_log() == "", "an old error is not blamed on the next file"
    C.llama_model_free(model)
    assert capfd.readouterr() == ("", "")
