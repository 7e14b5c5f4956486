"""A GGUF file's weights, tokenizer and chat template as a folder that vLLM loads: `python vllm_weights.py FILE FOLDER`.

Rules: run by the interpreter of vLLM's own environment, which has transformers, and by path, so that nothing of ours
has to be importable there; the model hubs are never asked; the folder appears whole or not at all.

The weights are unpacked into bfloat16: a weight of four bits needs no more, and vLLM has CPU kernels for it.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any


def convert(source: Path, folder: Path) -> None:
    """Writes config.json, the weights as safetensors, and the tokenizer's files."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    scratch = folder.with_name(folder.name + ".part")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        _write(torch, transformers, source, scratch)
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _write(torch: Any, transformers: Any, source: Path, folder: Path) -> None:
    at = {"gguf_file": source.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **at)
    unpacked = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, **at, dtype=torch.bfloat16, quantization_config=unpacked
    )
    # Left in the configuration it would send whoever loads the folder to look for the GGUF file.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
