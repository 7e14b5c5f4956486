from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from headrace_bench.peers.vllm_weights import convert


class Kept:
    """A tokenizer or a model that remembers how it was loaded."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.config = types.SimpleNamespace(quantization_config="gguf", hidden=1)
        self.hf_quantizer: object = "gguf"

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        left = vars(self.config)
        (folder / f"{len(list(folder.iterdir()))}").write_text(
            f"{sorted(self.asked)} {sorted(left)} {self.hf_quantizer}"
        )


def libraries(monkeypatch: pytest.MonkeyPatch, kind: type[Kept] = Kept) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    loader = types.SimpleNamespace(from_pretrained=lambda _folder, **asked: kind(asked))
    fake = types.SimpleNamespace(
        AutoTokenizer=loader, AutoModelForCausalLM=loader, GgufConfig=lambda dequantize: {"dequantize": dequantize}
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(bfloat16="bf16"))


class Full(Kept):
    """The disk is full, or somebody has waited long enough, when a part is there."""

    end: type[BaseException] = OSError

    def save_pretrained(self, folder: Path) -> None:
        super().save_pretrained(folder)
        raise self.end


@pytest.mark.parametrize("end", [OSError, KeyboardInterrupt])
def test_what_was_not_finished_is_removed(
    end: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries(monkeypatch, Full)
    monkeypatch.setattr(Full, "end", end)
    with pytest.raises(end):
        convert(tmp_path / "a.gguf", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_folder_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch)
    stale = tmp_path / "out.part"
    stale.mkdir()
    (stale / "torn").touch()
    convert(tmp_path / "a.gguf", tmp_path / "out")
    model, tokenizer = sorted((tmp_path / "out").iterdir())
    assert model.read_text() == "['dtype', 'gguf_file', 'quantization_config'] ['hidden'] None"
    assert tokenizer.read_text().startswith("['gguf_file']")
    assert not stale.exists()
