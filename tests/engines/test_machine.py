"""What times belong to."""

from __future__ import annotations

from pathlib import Path

from headrace.engines.machine import build, instruction_sets, machine


def test_instruction_sets_are_those_of_kernels_in_one_order(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: X\nflags\t\t: sse2 amx_int8 avx2 avx512f sha_ni\n\nprocessor\t: 1\n")
    assert instruction_sets(file) == ("avx2", "avx512f", "amx_int8")


def test_the_features_of_arm_are_read_too(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nFeatures\t: fp asimd sve i8mm asimddp\n")
    assert instruction_sets(file) == ("asimd", "asimddp", "i8mm", "sve")


def test_what_cannot_be_read_is_empty(tmp_path: Path) -> None:
    assert instruction_sets(tmp_path / "none") == ()


def test_a_build_is_named_by_version_and_libraries() -> None:
    number, _, digest = build().partition("+")
    assert number
    assert len(digest) == 8
    assert machine() == machine()
