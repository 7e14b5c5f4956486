from __future__ import annotations

import pytest

from headrace.core.quantisation import TARGETS, Loss, format_name, is_same, loss, most_bytes

F32, F16, Q4_0, Q4_1, Q8_0, BF16, Q4_K_M, Q6_K = 0, 1, 2, 3, 7, 32, 15, 18


@pytest.mark.parametrize(
    ("number", "target", "expected"),
    [
        (Q4_1, "f16", Loss.NOTHING),
        (Q8_0, "f16", Loss.NOTHING),
        (Q4_1, "bf16", Loss.ROUNDING),
        (Q8_0, "bf16", Loss.AGAIN),
        (BF16, "bf16", Loss.NOTHING),
        (F32, "bf16", Loss.AGAIN),
        (F32, "f16", Loss.AGAIN),
        (BF16, "f16", Loss.ROUNDING),
        (Q4_1, "q8_0", Loss.ROUNDING),
        (Q4_K_M, "q8_0", Loss.ROUNDING),
        (Q6_K, "q8_0", Loss.ROUNDING),
        (F16, "q8_0", Loss.AGAIN),
        (BF16, "q8_0", Loss.AGAIN),
        (Q4_1, "q4_0", Loss.AGAIN),
        (Q8_0, "q4_0", Loss.AGAIN),
        (F16, "q4_0", Loss.AGAIN),
        (10, "q4_0", Loss.AGAIN),
        (None, "f16", Loss.AGAIN),
        (999, "q8_0", Loss.AGAIN),
    ],
)
def test_what_is_lost_on_the_way(number: int | None, target: str, expected: Loss) -> None:
    assert loss(number, TARGETS[target]) is expected


def test_the_same_format_is_known() -> None:
    assert is_same(Q4_0, TARGETS["q4_0"])
    assert not is_same(Q4_1, TARGETS["q4_0"])
    assert not is_same(None, TARGETS["q4_0"])


def test_names() -> None:
    assert [format_name(number) for number in (Q4_1, None, 999)] == ["q4_1", "unknown", "unknown"]


def test_the_room_that_a_file_needs_is_never_too_little() -> None:
    """Sizes that were measured, of the demo model's 98 MB."""
    made = {"q8_0": 145_000_000, "q4_0": 92_000_000, "f16": 271_000_000, "bf16": 271_000_000}
    for name, size in made.items():
        assert size < most_bytes(98_362_432, Q4_1, TARGETS[name]) < 2.5 * size
        assert most_bytes(98_362_432, None, TARGETS[name]) > most_bytes(98_362_432, Q4_1, TARGETS[name])
