"""A GGUF file of random weights, made on the spot: a llama of a few narrow layers, each of another number format.

    head │ metadata │ names, shapes, formats, offsets │ tensors, each aligned to 32 bytes

Rules: the same formats and seed give the same bytes, and another format of one layer changes that layer alone; blocks
are drawn as they stand in the file, so nothing is quantised here: any bytes are valid quants, and the scales are chosen
so that each matrix maps what has a deviation of 1 to about the same, as trained ones do. No vocabulary: a token is its
number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

EMBEDDING = 256
"""Also the vocabulary: K-quants have blocks of 256 values."""
FEED_FORWARD = 512
HEADS = 4
_ALIGNMENT = 32
_F32 = 0

FORMATS = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20}
"""ggml_type numbers."""

_LAYOUTS: dict[str, tuple[int, int, int, int, float]] = {
    # values of a block, bytes before its scales, float16 scales, bytes behind, deviation of its values at a scale of 1
    "Q4_0": (32, 0, 1, 16, 4.6),
    "Q4_1": (32, 0, 2, 16, 4.6),
    "Q8_0": (32, 0, 1, 32, 74.0),
    "Q4_K": (256, 0, 2, 140, 220.0),
    "Q5_K": (256, 0, 2, 172, 450.0),
    "Q6_K": (256, 208, 1, 0, 1370.0),
    "IQ4_NL": (32, 0, 1, 16, 70.0),
}
_SECOND = {"Q4_1": -7.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""The second scale, that of the minimum, in units of the first: so that the mean is about 0."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def write_model(path: Path, formats: tuple[str, ...], seed: int = 1) -> None:
    """Write the model with one layer for each of `formats`; its output has the first one's."""
    infos, data = [], bytearray()
    for number, (name, rows, columns, form) in enumerate(_tensors(formats)):
        shape = (columns, rows) if rows else (columns,)
        kind = FORMATS.get(form, _F32)
        infos.append(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(data)))
        data += _drawn(np.random.default_rng([seed, number]), rows, columns, form)
        data += b"\0" * (-len(data) % _ALIGNMENT)
    metadata = list(_metadata(len(formats)))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(metadata)) + b"".join([*metadata, *infos])
    path.write_bytes(head + b"\0" * (-len(head) % _ALIGNMENT) + data)


def _metadata(layers: int) -> Iterator[bytes]:
    for name, text in (("general.architecture", "llama"), ("tokenizer.ggml.model", "none")):
        yield _text(name) + struct.pack("<I", 8) + _text(text)
    for name, number in (
        ("vocab_size", EMBEDDING),
        ("context_length", 256),
        ("embedding_length", EMBEDDING),
        ("block_count", layers),
        ("feed_forward_length", FEED_FORWARD),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", HEADS),
        ("rope.dimension_count", EMBEDDING // HEADS),
    ):
        yield _text(f"llama.{name}") + struct.pack("<II", 4, number)
    yield _text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5)


def _tensors(formats: tuple[str, ...]) -> Iterator[tuple[str, int, int, str]]:
    """(name, rows, columns, format); rows 0: a vector. What is not a matrix product's weight is F32."""
    yield "token_embd.weight", EMBEDDING, EMBEDDING, "F32"
    for layer, form in enumerate(formats):
        block = f"blk.{layer}."
        yield f"{block}attn_norm.weight", 0, EMBEDDING, "F32"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"{block}{name}.weight", EMBEDDING, EMBEDDING, form
        yield f"{block}ffn_norm.weight", 0, EMBEDDING, "F32"
        for name in ("ffn_gate", "ffn_up"):
            yield f"{block}{name}.weight", FEED_FORWARD, EMBEDDING, form
        yield f"{block}ffn_down.weight", EMBEDDING, FEED_FORWARD, form
    yield "output_norm.weight", 0, EMBEDDING, "F32"
    yield "output.weight", EMBEDDING, EMBEDDING, formats[0]


def _drawn(rng: np.random.Generator, rows: int, columns: int, form: str) -> bytes:
    """The bytes of a tensor."""
    if not rows:
        return np.ones(columns, dtype="<f4").tobytes()
    if form == "F32":
        return rng.standard_normal((rows, columns)).astype("<f4").tobytes()
    values, before, scales, behind, deviation = _LAYOUTS[form]
    n = rows * columns // values
    first = rng.uniform(0.7, 1.3, n) / (deviation * columns**0.5)
    pair = np.stack([first, first * _SECOND.get(form, 0.0)][:scales], axis=1).astype("<f2")
    parts: list[Bytes] = [
        rng.integers(0, 256, (n, before), dtype=np.uint8),
        pair.view(np.uint8).reshape(n, 2 * scales),
        rng.integers(0, 256, (n, behind), dtype=np.uint8),
    ]
    return np.concatenate(parts, axis=1).tobytes()


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
