"""The machine and the programs behind a figure: read once a run, stored with it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import msgspec

LIBRARIES = ("headrace", "numpy", "msgspec", "uvloop", "httptools", "h2", "rich", "matplotlib", "hdrhistogram")


FEATURES = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimddp", "i8mm", "bf16",
    "sve",
)  # fmt: skip
"""Of what processors can do, by Linux's names, that on which the speed of a model's kernels depends."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What ran the client. None: the system does not say."""

    cpu: str | None
    cores: int
    """That this process may use."""
    memory: int | None
    """Bytes."""
    kernel: str
    governor: str | None = None
    """Of the first core's clock."""
    features: tuple[str, ...] = ()
    """Those of FEATURES that the processor has: a cloud calls many processors by one name."""


def machine(root: Path = Path("/")) -> Machine:
    """This machine, by /proc and /sys below `root`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    kernel = f"{platform.system()} {platform.release()} {platform.machine()}"
    memory = _field(root / "proc/meminfo", "MemTotal")
    cpuinfo = root / "proc/cpuinfo"
    able = set((_field(cpuinfo, "flags") or _field(cpuinfo, "Features") or "").split())
    return Machine(
        cpu=_field(cpuinfo, "model name") or platform.processor() or None,
        cores=cores,
        memory=None if memory is None else int(memory.split()[0]) * 1024,
        kernel=kernel,
        governor=_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        features=tuple(name for name in FEATURES if name in able),
    )


def versions() -> dict[str, str]:
    """Python and the libraries that a measurement passes through; those that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _field(path: Path, name: str) -> str | None:
    for line in (_text(path) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip() or None
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None
