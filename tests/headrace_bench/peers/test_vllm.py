from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from headrace_bench.fault import Fault
from headrace_bench.peers import vllm


def test_only_what_text_needs_is_installed() -> None:
    requires = [
        "regex",
        "requests>=2.33.0",
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
        'torchaudio; platform_machine != "s390x"',
        'torchvision; platform_machine != "riscv64"',
        "torchcodec>=0.14",
        'intel-openmp==2024.2.1; platform_machine == "x86_64"',
        'pandas; extra == "bench"',
        "fastapi[standard]<0.137.0,>=0.133.0",
    ]
    assert vllm.needed(requires) == [
        "regex",
        "requests>=2.33.0",
        'intel-openmp==2024.2.1; platform_machine == "x86_64"',
        "fastapi[standard]<0.137.0,>=0.133.0",
    ]


def test_a_machine_that_cannot() -> None:
    assert vllm.able("processor : 0\nflags\t\t: sse avx avx2 fma\n") is None
    assert "AVX2" in (vllm.able("processor : 0\nflags\t\t: sse avx\n") or "")
    assert "AVX2" in (vllm.able("") or "")


def test_as_many_cores_as_threads() -> None:
    assert vllm.environment(2, [7, 3, 5])["VLLM_CPU_OMP_THREADS_BIND"] == "3,5"


def program(folder: Path, code: str) -> Path:
    """An interpreter at its place in an environment, that does `code` whatever it is asked for."""
    place = folder / "venv" / "bin" / "python"
    place.parent.mkdir(parents=True)
    place.write_text(f"#!{sys.executable}\nimport os, sys\n{code}\n")
    place.chmod(0o755)
    return place


def test_weights_are_made_once_for_a_file(tmp_path: Path) -> None:
    model = tmp_path / "a.gguf"
    model.write_bytes(b"1234")
    os.utime(model, (1000, 1000))
    runs = program(tmp_path, f"os.mkdir(sys.argv[3]); open({str(tmp_path / 'log')!r}, 'a').write(sys.argv[2] + ' ')")
    place = vllm.weights(runs, model)
    assert place == tmp_path / "weights" / "a-4-1000"
    assert vllm.weights(runs, model) == place
    assert (tmp_path / "log").read_text().split() == [str(model)]


def test_weights_that_cannot_be_made(tmp_path: Path) -> None:
    model = tmp_path / "a.gguf"
    model.touch()
    with pytest.raises(Fault, match="ValueError: GGUF model with architecture x is not supported"):
        vllm.weights(program(tmp_path, "raise ValueError('GGUF model with architecture x is not supported')"), model)
