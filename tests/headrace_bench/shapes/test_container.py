from __future__ import annotations

import io
import struct

import numpy as np
import pytest

from headrace_bench.shapes.container import F32, Q4_K, Q6_K, Tensor, Value, padded, write


def test_a_file_to_the_byte() -> None:
    out = io.BytesIO()
    tensors = [Tensor("a", (3,), F32), Tensor("b", (2, 2), F32)]
    data = [np.arange(3, dtype="<f4").view(np.uint8), *(np.full(2, n, "<f4").view(np.uint8) for n in (7, 8))]
    keys: dict[str, Value] = {"n": 5, "x": 0.5, "s": "é", "l": ("u", "vw"), "i": [1, -1], "b": True}
    write(out, keys, tensors, data)
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 6)
    head += struct.pack("<Q1sII", 1, b"n", 4, 5)
    head += struct.pack("<Q1sIf", 1, b"x", 6, 0.5)
    head += struct.pack("<Q1sIQ2s", 1, b"s", 8, 2, "é".encode())
    head += struct.pack("<Q1sIIQQ1sQ2s", 1, b"l", 9, 8, 2, 1, b"u", 2, b"vw")
    head += struct.pack("<Q1sIIQii", 1, b"i", 9, 5, 2, 1, -1)
    head += struct.pack("<Q1sI?", 1, b"b", 7, True)
    head += struct.pack("<Q1sIQIQ", 1, b"a", 1, 3, F32, 0)
    head += struct.pack("<Q1sIQQIQ", 1, b"b", 2, 2, 2, F32, 32)
    written = out.getvalue()
    assert written[: len(head)] == head
    begin = padded(len(head))
    assert not any(written[len(head) : begin])
    assert written[begin:] == struct.pack("<3f20x4f16x", 0, 1, 2, 7, 7, 8, 8)


def test_sizes_are_those_of_whole_blocks() -> None:
    assert Tensor("w", (512, 3), Q4_K).size == 6 * 144
    assert Tensor("w", (256, 3), Q6_K).size == 3 * 210
    with pytest.raises(ValueError, match="rows of 100"):
        _ = Tensor("w", (100, 256), Q4_K).size


def test_data_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="4 bytes too many"):
        write(io.BytesIO(), {}, [Tensor("a", (1,), F32)], [np.zeros(8, np.uint8)])
