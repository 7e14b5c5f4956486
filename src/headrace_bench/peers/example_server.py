"""`examples/server/server.py` of llama-cpp-python: a server with batching, on the same build of the library as ours.

It is in the source archive only. It gets an environment of its own with what it names at its top.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

from headrace_bench.fault import Fault
from headrace_bench.peers import kept

NAME = "server.py"
NEEDS = ("fastapi", "jinja2", "numpy", "openai", "pydantic", "safetensors", "uvicorn", "websockets", "diskcache")
MEMBER = "examples/server/server.py"
BATCH = 128
SEQUENCES = 16
CELLS = 16384

# It loads the multimodal library when it is imported and uses it for images only; our build leaves it out.
WITHOUT_IMAGES = """
import runpy, sys, types
sys.modules["llama_cpp.mtmd_cpp"] = types.ModuleType("llama_cpp.mtmd_cpp")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def folder(home: Path) -> Path:
    """Where that of our engine's version is kept."""
    return home / f"{NAME}-{kept.engine_version()}"


def locate(home: Path) -> Path | None:
    """The source file; None where it is not installed."""
    place = folder(home)
    return place / NAME if (place / kept.LAST).is_file() and (place / NAME).is_file() else None


def python(source: Path) -> Path:
    """The interpreter that was made for a source file that `locate` found."""
    return kept.interpreter(source.parent / "venv")


def install(home: Path) -> None:
    """Fetches it and what it needs. Raises Fault."""
    place = folder(home)
    runs = kept.environment(place / "venv")
    kept.pip(runs, "install", "typing-extensions", *NEEDS)
    requirement = f"{kept.ENGINE}=={kept.engine_version()}"
    kept.pip(runs, "download", "--no-binary", ":all:", "--no-deps", "--dest", str(place), requirement)
    archives = list(place.glob("llama_cpp_python-*.tar.gz"))
    if not archives:
        raise Fault(f"pip brought no source archive of {requirement}")
    for archive in archives:
        extract(archive, place / NAME)
        archive.unlink()
    kept.share_engine(place / "venv")
    (place / kept.LAST).touch()


def extract(archive: Path, target: Path) -> None:
    """The one file that is wanted of the source archive. Raises Fault."""
    with tarfile.open(archive) as tar:
        for member in tar:
            source = tar.extractfile(member) if member.name.endswith(f"/{MEMBER}") else None
            if source is not None:
                target.write_bytes(source.read())
                return
    raise Fault(f"{archive.name} has no {MEMBER}")


def version(source: Path) -> str:
    """Of the package that the file is from."""
    return f"{kept.ENGINE} {source.parent.name.removeprefix(f'{NAME}-')}"


def config(model: Path, alias: str, port: int, threads: int) -> dict[str, Any]:
    """Its configuration file.

    Its defaults are a context of 512 tokens and one sequence, which serves none of the scenarios: it gets as many KV
    cells as Headrace's default and as many sequences as the tuned llama-server.
    """
    return {
        "server": {"host": "127.0.0.1", "port": port},
        "model": {
            "path": str(model),
            "alias": alias,
            "n_ctx": CELLS,
            "n_batch": BATCH,
            "n_seq_max": SEQUENCES,
            "threads": threads,
            "threads_batch": threads,
        },
    }


def command(runs: Path, source: Path, settings: Path) -> list[str]:
    """`settings` is a file with what `config` gives."""
    return [str(runs), "-c", WITHOUT_IMAGES, str(source), "-C", str(settings)]
