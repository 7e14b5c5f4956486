from __future__ import annotations

from pathlib import Path

from headrace.engines.machine import KERNELS
from headrace_bench.report.machine import FEATURES, machine, versions


def test_what_the_system_says(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\nflags\t: fpu amx_int8 avx2 avx512f\n"
    )
    (tmp_path / "proc/meminfo").write_text("MemTotal:       1024 kB\nMemFree: 3 kB\n")
    found = machine(tmp_path)
    assert (found.cpu, found.memory, found.governor) == ("Some CPU @ 2.0GHz", 1024 * 1024, None)
    assert found.cores >= 1
    assert found.features == ("avx2", "avx512f", "amx_int8")
    assert found.kernel


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert machine(tmp_path).memory is None
    assert machine(tmp_path).features == ()


def test_the_names_are_those_that_headrace_knows_kernels_by() -> None:
    assert set(FEATURES) <= set(KERNELS)


def test_versions_name_what_is_installed() -> None:
    assert {"python", "numpy", "matplotlib"} <= versions().keys()
