"""Number formats of model files, and what is lost on the way from one to another.

    Q4_1 ──► F16     nothing: a finer format holds every weight as it is, but what Q4_1 lost does not come back
         ──► BF16    next to nothing, while the old steps are coarse: 8 bits of mantissa are enough for 6-bit weights
         ──► Q8_0    next to nothing: the new grid is much finer than the one the weights lie on
         ──► Q4_0    again: every weight moves to another coarse grid

Rules: a file is judged by the type in its metadata, of which some tensors are exceptions. What is not known counts as
losing, since nobody can be told that it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SOURCE = "source"
"""Stands for the file as it is, among the names of formats."""


@dataclass(frozen=True, slots=True)
class Format:
    """A type of file. `number`: llama.cpp's `llama_ftype`."""

    name: str
    number: int
    bits: int
    """Of a weight, its block's scale not counted."""
    stored: float
    """Bits of a weight in the file, at most: with scales, and with the finer embeddings that llama.cpp keeps."""


class Loss(StrEnum):
    """What the weights lose that are converted."""

    NOTHING = "nothing"
    ROUNDING = "rounding"
    """Far less than was lost before."""
    AGAIN = "precision"


TARGETS = {
    "q8_0": Format("q8_0", 7, 8, 8.7),
    "q4_0": Format("q4_0", 2, 4, 6.5),
    "f16": Format("f16", 1, 16, 16.5),
    "bf16": Format("bf16", 32, 16, 16.5),
}
"""What the quantiser is asked for."""

_BITS = {
    0: ("f32", 32),
    1: ("f16", 16),
    32: ("bf16", 16),
    7: ("q8_0", 8),
    18: ("q6_k", 6),
    8: ("q5_0", 5),
    9: ("q5_1", 5),
    16: ("q5_k_s", 5),
    17: ("q5_k_m", 5),
    2: ("q4_0", 4),
    3: ("q4_1", 4),
    14: ("q4_k_s", 4),
    15: ("q4_k_m", 4),
    25: ("iq4_nl", 4),
    30: ("iq4_xs", 4),
    11: ("q3_k_s", 3),
    12: ("q3_k_m", 3),
    13: ("q3_k_l", 3),
    10: ("q2_k", 2),
    21: ("q2_k_s", 2),
}
"""`llama_ftype` → name and bits of a weight."""

_LEAST_BITS = 1.5
"""Of a weight of any file: what is assumed of an unknown one."""


def format_name(number: int | None) -> str:
    """The name of a file's type; "unknown" where it is none of those above."""
    return _BITS[number][0] if number in _BITS else "unknown"


def loss(number: int | None, target: Format) -> Loss:
    """What a file of type `number` loses on the way to `target`."""
    if number not in _BITS:
        return Loss.AGAIN
    name, bits = _BITS[number]
    if target.name == "bf16":
        # Eight bits of mantissa move a weight by 2^-9 of itself at most: by a sixteenth of a step at 6 bits, a quarter
        # at 8.
        return Loss.NOTHING if name == "bf16" else Loss.ROUNDING if bits <= 6 else Loss.AGAIN
    if target.bits >= 16:
        # A bfloat16 beyond the range of F16 would be lost; those of trained weights are not.
        return Loss.AGAIN if bits > 16 else Loss.ROUNDING if name == "bf16" else Loss.NOTHING
    # A grid that is two bits finer moves no weight by more than an eighth of the old step. Four bits are too few for
    # that even after two: the old blocks are shorter, with scales of their own.
    return Loss.ROUNDING if target.bits == 8 and bits <= 6 else Loss.AGAIN


def is_same(number: int | None, target: Format) -> bool:
    """Is the file of that type already?"""
    return number == target.number


def most_bytes(size: int, number: int | None, target: Format) -> int:
    """Bytes that a file of `size` bytes and type `number` takes as `target`, at most."""
    bits = _BITS[number][1] if number in _BITS else _LEAST_BITS
    return int(size * target.stored / bits)
