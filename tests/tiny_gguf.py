"""Models of 100 KB, made on the spot: whole ones, and ones that are broken in a way of the test's choice."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

U32, I32, F32, BOOL, TEXT, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
EMBEDDING, HEADS, FORWARD, LAYERS, CONTEXT = 32, 2, 64, 2, 256
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *(f"\u2581{c}" for c in "abcdefgh")]
_CODES = {U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q"}

Typed = tuple[int, Any]
"""(GGUF type, value); of an array: (ARRAY, (item type, items))."""


def keys(**changes: Typed | None) -> dict[str, Typed]:
    """The metadata of a small model; `changes` by the last part of a key, with `__` for a dot; None takes it out."""
    n = len(TOKENS)
    own: dict[str, Typed] = {
        "general.architecture": (TEXT, "llama"),
        "general.name": (TEXT, "tiny"),
        "general.file_type": (U32, 0),
        "llama.context_length": (U32, CONTEXT),
        "llama.embedding_length": (U32, EMBEDDING),
        "llama.block_count": (U32, LAYERS),
        "llama.feed_forward_length": (U32, FORWARD),
        "llama.attention.head_count": (U32, HEADS),
        "llama.attention.head_count_kv": (U32, HEADS),
        "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
        "llama.rope.dimension_count": (U32, EMBEDDING // HEADS),
        "llama.rope.freq_base": (F32, 10000.0),
        "tokenizer.ggml.model": (TEXT, "llama"),
        "tokenizer.ggml.tokens": (ARRAY, (TEXT, TOKENS)),
        "tokenizer.ggml.scores": (ARRAY, (F32, [-float(i) for i in range(n)])),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [2, 3, 3, *[6] * 256, *[1] * (n - 259)])),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.eos_token_id": (U32, 2),
    }
    for name, value in changes.items():
        dotted = name.replace("__", ".")
        full = next((key for key in own if key.endswith("." + dotted) or key == dotted), dotted)
        if value is None:
            own.pop(full, None)
        else:
            own[full] = value
    return own


def weights(seed: int = 1, vocabulary: int = len(TOKENS), layers: int = LAYERS) -> dict[str, Any]:
    """Its tensors, F32, by name; rows first, as numpy has them."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Any:
        return rng.normal(0.0, columns**-0.5, (rows, columns)).astype(np.float32)

    tensors: dict[str, Any] = {
        "token_embd.weight": matrix(vocabulary, EMBEDDING),
        "output_norm.weight": np.ones(EMBEDDING, np.float32),
        "output.weight": matrix(vocabulary, EMBEDDING),
    }
    for layer in range(layers):
        for name, rows, columns in (
            ("attn_q", EMBEDDING, EMBEDDING), ("attn_k", EMBEDDING, EMBEDDING), ("attn_v", EMBEDDING, EMBEDDING),
            ("attn_output", EMBEDDING, EMBEDDING), ("ffn_gate", FORWARD, EMBEDDING), ("ffn_up", FORWARD, EMBEDDING),
            ("ffn_down", EMBEDDING, FORWARD),
        ):  # fmt: skip
            tensors[f"blk.{layer}.{name}.weight"] = matrix(rows, columns)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = np.ones(EMBEDDING, np.float32)
    return tensors


def encoded(metadata: Mapping[str, Typed], tensors: Mapping[str, Any], version: int = 3) -> bytes:
    """The file's bytes."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, (kind, value) in metadata.items():
        head += _text(key) + struct.pack("<I", kind) + _value(kind, value)
    data = b""
    for name, array in tensors.items():
        shape = array.shape[::-1]
        head += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", 0, len(data))
        data += _padded(array.tobytes())
    return _padded(head) + data


def tiny_gguf(file: Path, tensors: Mapping[str, Any] | None = None, **changes: Typed | None) -> Path:
    """Write one; `changes` as for `keys`."""
    file.write_bytes(encoded(keys(**changes), weights() if tensors is None else tensors))
    return file


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == TEXT:
        return _text(value)
    if kind == ARRAY:
        item, items = value
        return struct.pack("<IQ", item, len(items)) + b"".join(_items(item, items))
    return struct.pack(_CODES[kind], value)


def _items(item: int, items: Sequence[Any]) -> Iterable[bytes]:
    return (_value(item, one) for one in items)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 32)
