"""The machine and the build of llama.cpp that times belong to.

    machine()   processor, cores, architecture, instruction sets      what a kernel may use
    build()     version of llama-cpp-python, digest of its libraries  what was compiled

Rules: whatever is kept of a measurement names both, since the same file on the same processor is five times faster with
another build; nothing is loaded to tell, and nothing here fails: what cannot be read is "".
"""

from __future__ import annotations

import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import xxhash

KERNELS = (
    "avx", "avx2", "fma", "f16c", "bmi2", "avx_vnni", "avx512f", "avx512bw", "avx512vbmi", "avx512_vnni", "avx512_bf16",
    "amx_tile", "amx_int8", "amx_bf16", "amx_fp16", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme",
)  # fmt: skip
"""Instruction sets, by the names of Linux, that kernels of llama.cpp are compiled for."""

Machine = tuple[str, int | None, str, str]


def machine() -> Machine:
    """What tells machines apart on which the same model takes different times: processor, cores, architecture, and
    those of its instruction sets that kernels use. A cloud calls many processors by one name."""
    return _processor(), os.cpu_count(), platform.machine(), " ".join(instruction_sets())


def instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Those of KERNELS that this processor has, in that order; empty where it cannot be told."""
    found = _field(cpuinfo, "flags") or _field(cpuinfo, "Features")
    return tuple(name for name in KERNELS if name in set(found.split()))


@cache
def build() -> str:
    """Names what computes: the version of llama-cpp-python and a digest of its libraries, as `0.3.36+1f2e3d4c`."""
    try:
        number = version("llama-cpp-python")
    except PackageNotFoundError:
        number = ""
    spec = find_spec("llama_cpp")
    folders = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    digest = xxhash.xxh3_64()
    for file in sorted(file for folder in folders for file in (folder / "lib").glob("*") if file.is_file()):
        try:
            digest.update(file.read_bytes())
        except OSError:
            continue
    return f"{number}+{digest.hexdigest()[:8]}"


def _processor() -> str:
    """The processor's name; "" where that cannot be told."""
    return _field(Path("/proc/cpuinfo"), "model name") or platform.processor()


def _field(cpuinfo: Path, name: str) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")
