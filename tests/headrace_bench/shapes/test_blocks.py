from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace_bench.shapes.blocks import blocks, ones, packed
from headrace_bench.shapes.container import Q4_K, Q6_K, Bytes

Floats = np.ndarray[Any, np.dtype[np.float64]]


def half(raw: Bytes) -> Floats:
    found: Floats = np.ascontiguousarray(raw).view("<f2")[:, 0].astype(float)
    return found


def scale_and_min(raw: Bytes, j: int) -> tuple[Any, Any]:
    """As llama.cpp's `get_scale_min_k4` reads them."""
    q = raw.astype(int)
    if j < 4:
        return q[:, j] & 63, q[:, j + 4] & 63
    return (q[:, j + 4] & 15) | (q[:, j - 4] >> 6 << 4), (q[:, j + 4] >> 4) | (q[:, j] >> 6 << 4)


def weights_4(raw: Bytes) -> Floats:
    """As `dequantize_row_q4_K`."""
    d, low, q = half(raw[:, 0:2]), half(raw[:, 2:4]), raw[:, 16:]
    out = np.empty((len(raw), 256))
    for j in range(8):
        scale, least = scale_and_min(raw[:, 4:16], j)
        part = q[:, j // 2 * 32 : j // 2 * 32 + 32]
        bits = part >> 4 if j % 2 else part & 15
        out[:, j * 32 : j * 32 + 32] = (d * scale)[:, None] * bits - (low * least)[:, None]
    return out


def weights_6(raw: Bytes) -> Floats:
    """As `dequantize_row_q6_K`."""
    out = np.empty((len(raw), 256))
    d, scales = half(raw[:, 208:]), np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(float)
    for i in range(256):
        n, at = divmod(i, 128)
        quarter, k = divmod(at, 32)
        low = raw[:, n * 64 + k + (quarter % 2) * 32]
        bits = (low >> 4 if quarter > 1 else low & 15) | ((raw[:, 128 + n * 32 + k] >> (2 * quarter) & 3) << 4)
        out[:, i] = d * scales[:, n * 8 + at // 16] * (bits.astype(float) - 32)
    return out


@pytest.mark.parametrize(("kind", "read"), [(Q4_K, weights_4), (Q6_K, weights_6)])
def test_the_weights_are_as_asked(kind: int, read: Any) -> None:
    found = read(blocks(np.random.default_rng(1), kind, 400, 0.02))
    assert np.isfinite(found).all()
    assert abs(found.mean()) < 0.0005
    assert found.std() == pytest.approx(0.02, rel=0.02)
    assert len(np.unique(found)) > 100


def test_the_same_generator_makes_the_same_bytes() -> None:
    one, other = (blocks(np.random.default_rng(seed), Q4_K, 3, 1.0) for seed in (1, 1))
    assert (one == other).all()
    assert (one != blocks(np.random.default_rng(2), Q4_K, 3, 1.0)).any()


def test_scales_of_six_bits_come_back() -> None:
    rng = np.random.default_rng(1)
    scales, mins = rng.integers(0, 64, (2, 50, 8), np.uint8)
    raw = packed(scales, mins)
    for j in range(8):
        scale, least = scale_and_min(raw, j)
        assert (scale == scales[:, j]).all()
        assert (least == mins[:, j]).all()


def test_a_norm_is_ones() -> None:
    assert ones(3).view("<f4").tolist() == [1.0, 1.0, 1.0]
